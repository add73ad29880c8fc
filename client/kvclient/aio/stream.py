"""StepStream over the asyncio stub."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import grpc

from kvclient import calls
from kvclient.calls import Call
from kvclient.channel import BACKOFFS_S
from kvclient.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    Unavailable,
    unanswered,
)
from kvclient.values import Step, StepMark, StepResult

if TYPE_CHECKING:
    from kvclient.aio.session import Session


class StepStream:
    """Steps of one session, one at a time. Opens when first used, again when it broke.

    A Step whose answer a broken stream lost is sent again with its number.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._timeout_s = session.client.timeout_s
        self._stream: Any = None
        self._closed = False

    async def call(self, step: Step, *, mark: StepMark | None = None) -> StepResult:
        """The answer to one Step."""
        if self._closed:
            raise FailedPrecondition("the stream is closed", reason="STREAM_CLOSED")
        return await self._session._call(calls.step(step, mark), self._send)

    async def close(self) -> None:
        """Ends the stream; the session stays."""
        self._closed = True
        self._drop()

    async def __aenter__(self) -> StepStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _send(self, call: Call[Any]) -> Any:
        """Half the time for an answer; then, or when the stream breaks, sent again on a new one."""
        deadline = time.monotonic() + self._timeout_s
        waits_s = iter(BACKOFFS_S)
        while True:
            left_s = deadline - time.monotonic()
            try:
                return await self._send_once(call, min(left_s, self._timeout_s / 2))
            except Unavailable:
                wait_s = next(waits_s, None)
                if wait_s is None or time.monotonic() + wait_s >= deadline:
                    raise
                await asyncio.sleep(wait_s)
            except DeadlineExceeded:
                if time.monotonic() >= deadline or next(waits_s, None) is None:
                    raise

    async def _send_once(self, call: Call[Any], timeout_s: float) -> Any:
        if self._stream is None:
            stubs = self._session.client._stubs
            self._stream = stubs.method("KVCacheService", "StepStream")()
        stream = self._stream
        try:
            reply = await asyncio.wait_for(self._exchange(stream, call), timeout_s)
        except asyncio.TimeoutError:
            self._drop()
            raise DeadlineExceeded(
                f"no answer within {timeout_s:g} s", reason="DEADLINE_EXCEEDED", retryable=True
            ) from None
        except grpc.RpcError as error:
            self._drop()
            closed = self._closed or self._session.client._stubs.closed
            raise unanswered(error, closed=closed) from None
        except BaseException:
            self._drop()
            raise
        if reply.op_seq != call.request.context.op_seq:
            self._drop()
            raise InternalError(
                f"asked {call.request.context.op_seq}, answered {reply.op_seq}", reason="BAD_REPLY"
            )
        return reply

    @staticmethod
    async def _exchange(stream: Any, call: Call[Any]) -> Any:
        with contextlib.suppress(asyncio.InvalidStateError):  # ended; reading says why
            await stream.write(call.request)
        reply = await stream.read()
        if reply is grpc.aio.EOF:
            raise Unavailable("the server ended the stream", reason="STREAM_ENDED", retryable=True)
        return reply

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
