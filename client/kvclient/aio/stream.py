"""StepStream over the asyncio stub."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import grpc

from kvclient import calls
from kvclient.channel import BACKOFFS_S
from kvclient.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    KVDepotError,
    Unavailable,
    no_answer,
)
from kvclient.sequence import Flight, checked_reply, may_follow
from kvclient.stream import checked_max_in_flight
from kvclient.values import Step, StepMark, StepResult

if TYPE_CHECKING:
    from kvclient.aio.session import Session


class PendingStep:
    """A Step that was sent. Its answer comes meanwhile."""

    __slots__ = ("_flight", "_session")

    def __init__(self, session: Session, flight: Flight[StepResult]) -> None:
        self._session = session
        self._flight = flight

    async def result(self) -> StepResult:
        """The answer, waited for. It raises what ``Session.step`` would have raised.

        After Unavailable or DeadlineExceeded the answer is still not known: ask again.
        """
        return await self._session._result(self._flight)

    def is_here(self) -> bool:
        """Whether ``result`` would not wait."""
        flight = self._flight
        if flight.is_settled:
            return True
        connection = flight.sent_on
        if connection is None or connection.is_over:
            return False
        flights = self._session._sequence.flights
        return flight in list(flights)[: connection.replies.qsize()]


class StepStream:
    """Steps of one session. Opens when first used, again when it broke.

    Up to ``max_in_flight`` may be sent before the first is answered; one more waits for
    that. What a broken stream left unanswered is sent again, in order, with its number.
    """

    def __init__(self, session: Session, max_in_flight: int | None = None) -> None:
        self._session = session
        self._timeout_s = session.client.timeout_s
        self._connection: _Connection | None = None
        self._closed = False
        self._max_in_flight = checked_max_in_flight(max_in_flight, session.reply_window)

    async def call(self, step: Step, *, mark: StepMark | None = None) -> StepResult:
        """The answer to one Step."""
        return await (await self.send(step, mark=mark)).result()

    async def send(self, step: Step, *, mark: StepMark | None = None) -> PendingStep:
        """Sends a Step and does not wait for its answer; in order with all other calls."""
        if self._closed:
            raise FailedPrecondition("the stream is closed", reason="STREAM_CLOSED")
        flight = await self._session._begin(calls.step(step, mark), self)
        return PendingStep(self._session, flight)

    async def close(self) -> None:
        """Ends the stream; the session stays, and so does what is in flight."""
        self._closed = True
        self._drop()

    async def __aenter__(self) -> StepStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _takes(self, flights: Any) -> bool:
        """Whether another Step may follow these now, or they must be settled first."""
        return may_follow(flights, self._connection, self._max_in_flight)

    async def _put(self, flight: Flight[Any]) -> None:
        """Sends it, if need be on a new connection."""
        connection = self._connection
        if connection is None or connection.is_over:
            self._drop()
            open_stream = self._session.client._stubs.method("KVCacheService", "StepStream")
            connection = self._connection = _Connection(open_stream())
        flight.sent_on = connection
        flight.asked_at = time.monotonic()
        await connection.write(flight.call.request)

    async def _fetch(self, flight: Flight[Any]) -> Any:
        """The reply to the oldest flight.

        Half the time for an answer; then, or when the stream breaks, sent again on a new
        one. What follows on the broken one is sent again as its turn comes.
        """
        deadline = time.monotonic() + self._timeout_s
        waits_s = iter(BACKOFFS_S)
        while True:
            left_s = deadline - time.monotonic()
            try:
                return await self._fetch_once(flight, min(left_s, self._timeout_s / 2))
            except Unavailable:
                wait_s = next(waits_s, None)
                if wait_s is None or time.monotonic() + wait_s >= deadline:
                    raise
                await asyncio.sleep(wait_s)
            except DeadlineExceeded:
                if time.monotonic() >= deadline or next(waits_s, None) is None:
                    raise

    async def _fetch_once(self, flight: Flight[Any], timeout_s: float) -> Any:
        try:
            reply = await asyncio.wait_for(self._exchange(flight), timeout_s)
        except asyncio.TimeoutError:
            self._drop()
            raise no_answer(timeout_s) from None
        try:
            closed = self._closed or self._session.client._stubs.closed
            return checked_reply(reply, flight, closed=closed)
        except KVDepotError:
            self._drop()
            raise

    async def _exchange(self, flight: Flight[Any]) -> Any:
        if flight.sent_on is None or flight.sent_on is not self._connection:
            if self._closed:
                return await self._session._send(flight)
            await self._put(flight)
        return await flight.sent_on.replies.get()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class _Connection:
    """One open stream. Its task reads replies as they come, until the stream ends.

    ``replies`` are messages, then the RpcError that ended the stream, or None.
    """

    def __init__(self, stream: Any) -> None:
        self.replies: asyncio.Queue[Any] = asyncio.Queue()
        self.is_over = False
        self._stream = stream
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def write(self, request: Any) -> None:
        """Sends one message; that the stream has ended is told by what is read."""
        with contextlib.suppress(asyncio.InvalidStateError, grpc.RpcError):
            await self._stream.write(request)

    async def _read(self) -> None:
        end: grpc.RpcError | None = None
        try:
            while (reply := await self._stream.read()) is not grpc.aio.EOF:
                self.replies.put_nowait(reply)
        except grpc.RpcError as error:
            end = error
        finally:
            self.is_over = True
            self.replies.put_nowait(end)

    def close(self) -> None:
        """Ends the stream."""
        self._stream.cancel()
        self._reader.cancel()
