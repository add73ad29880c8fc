"""A worker that says under which session it writes, asyncio: see ``kvclient.attachment``."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import grpc

from kvclient import calls
from kvclient.attachment import AttachmentState
from kvclient.errors import from_rpc_error, no_answer, stream_ended

if TYPE_CHECKING:
    from kvclient.aio.client import Client


class Attachment:
    """One worker, attached until ``close``; ask ``check`` before every write."""

    def __init__(self, client: Client, session_id: str, epoch: str, name: str) -> None:
        self._client = client
        self._state = AttachmentState()
        self._answered = asyncio.Event()
        attach = client._stubs.method("KVTransferService", "AttachWorker")
        self._call: Any = attach(calls.attach_worker(session_id, epoch, name))
        self._task = asyncio.create_task(self._read(), name="kvdepot-attachment")

    def check(self) -> None:
        """Raises when this worker must not write any more.

        CacheLost when the session is over; Unavailable when the server is gone or silent.
        """
        error = self._state.error(time.monotonic())
        if error is not None:
            raise error

    async def close(self) -> None:
        """This worker writes no more; it is detached."""
        self._state.detached()
        self._call.cancel()
        await asyncio.wait([self._task])

    async def __aenter__(self) -> Attachment:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _attached(self) -> Attachment:
        """This, once the server knows of it."""
        timeout_s = self._client.timeout_s
        try:
            await asyncio.wait_for(self._answered.wait(), timeout_s)
            self.check()
        except asyncio.TimeoutError:
            await self.close()
            raise no_answer(timeout_s) from None
        except BaseException:
            await self.close()
            raise
        return self

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self._state.heard(message, time.monotonic())
                self._answered.set()
            self._state.ended(stream_ended())
        except grpc.RpcError as error:
            self._state.ended(from_rpc_error(error))
        except asyncio.CancelledError:  # by close
            pass
        finally:
            self._answered.set()
