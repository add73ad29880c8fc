"""The twin of ``kvclient.event_stream.Stream``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvclient import event_stream
from kvclient.errors import from_rpc_error
from kvclient.events import EventBatch


class Stream:
    """What happens to the index, to iterate over; ``close`` ends it early."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._batches = self._read()

    def __aiter__(self) -> AsyncIterator[EventBatch]:
        return self

    async def __anext__(self) -> EventBatch:
        return await self._batches.__anext__()

    async def _read(self) -> AsyncIterator[EventBatch]:
        try:
            async for message in self._call:
                yield event_stream.batch(message)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def close(self) -> None:
        """Ends the stream."""
        self._call.cancel()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()
