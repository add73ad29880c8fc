"""The twin of ``kvclient.imports.Import``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import grpc

from kvclient import imports
from kvclient.errors import KVDepotError, from_rpc_error
from kvdepot.v1 import transfer_pb2 as pb

if TYPE_CHECKING:
    from kvclient.aio.client import Client


class Import:
    """One import that runs: iterate over its progress, or wait for its ``result``.

    ``close`` ends it early. Its blocks are nobody's until no byte can land in them any more.
    """

    def __init__(
        self,
        client: Client,
        request: pb.ImportBlocksRequest,
        deadline_s: float | None,
        translate: Callable[[KVDepotError], KVDepotError] = lambda error: error,
    ) -> None:
        self._call = imports.begin(client, request, deadline_s)
        self._translate = translate
        self._result: imports.ImportResult | None = None
        self._items = self._read()

    def __aiter__(self) -> AsyncIterator[imports.ImportProgress]:
        return self._items

    async def _read(self) -> AsyncIterator[imports.ImportProgress]:
        try:
            async for message in self._call:
                if message.done:
                    self._result = imports.result(message)
                else:
                    yield imports.progress(message)
        except grpc.RpcError as error:
            raise self._translate(from_rpc_error(error)) from None

    async def result(self) -> imports.ImportResult:
        """Wait for the end; how it went. Raises what the server, or its peer, refuses."""
        async for _ in self._items:
            pass
        if self._result is None:
            raise imports.unfinished()
        return self._result

    def close(self) -> None:
        """Ends the import, if it runs."""
        self._call.cancel()

    async def __aenter__(self) -> Import:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()
