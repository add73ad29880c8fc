"""StepStream, synchronous.

Steps that nobody waits for yet are sent by a thread, which reads their replies, while their
caller does something else; one that is waited for at once is sent and its reply received by its
caller, and no other thread wakes for it.
"""

from __future__ import annotations

import threading
import time
import weakref
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from kvclient import calls, convert
from kvclient.channel import BACKOFFS_S, STEP_STREAM
from kvclient.duplex import Duplex
from kvclient.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    Unavailable,
    no_answer,
)
from kvclient.sequence import Flight, ReadReply, checked_reply, may_follow
from kvclient.values import Step, StepMark, StepResult
from kvdepot.v1 import cache_pb2

if TYPE_CHECKING:
    from kvclient.session import Session

STEPS_IN_FLIGHT_MAX = 8
"""Steps that may be sent before the first of them is answered, unless told otherwise."""


class PendingStep:
    """A Step that was sent. Its answer comes meanwhile."""

    __slots__ = ("_flight", "_session")

    def __init__(self, session: Session, flight: Flight[StepResult]) -> None:
        self._session = session
        self._flight = flight

    def result(self) -> StepResult:
        """The answer, waited for. It raises what ``Session.step`` would have raised.

        After Unavailable or DeadlineExceeded the answer is still not known: ask again.
        """
        return self._session._result(self._flight)

    @property
    def is_settled(self) -> bool:
        """Whether its answer, or the error that it ended with, is known for good."""
        return self._flight.is_settled

    def is_here(self) -> bool:
        """Whether ``result`` would not wait."""
        flight = self._flight
        if flight.is_settled:
            return True
        connection = flight.sent_on
        if connection is None or connection.is_over:
            return False
        num_here = connection.replies.qsize()
        # A copy: another thread may take answers meanwhile.
        return num_here > 0 and flight in tuple(self._session._sequence.flights)[:num_here]


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
        self._ended = threading.Event()
        self._watch: threading.Thread | None = None
        self._max_in_flight = checked_max_in_flight(max_in_flight, session.reply_window)

    def call(self, step: Step, *, mark: StepMark | None = None) -> StepResult:
        """The answer to one Step."""
        return self.send(step, mark=mark, is_awaited=True).result()

    def send(
        self, step: Step, *, mark: StepMark | None = None, is_awaited: bool = False
    ) -> PendingStep:
        """Sends a Step and does not wait for its answer; in order with all other calls.

        ``is_awaited``: its result is asked for at once, which may as well send it.
        """
        if self._closed:
            raise FailedPrecondition("the stream is closed", reason="STREAM_CLOSED")
        call = calls.step(step, mark)
        return PendingStep(self._session, self._session._begin(call, self, is_awaited=is_awaited))

    def close(self) -> None:
        """Ends the stream; the session stays, and so does what is in flight."""
        self._closed = True
        self._ended.set()
        self._drop()

    def __enter__(self) -> StepStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _takes(self, flights: Any) -> bool:
        """Whether another Step may follow these now, or they must be settled first."""
        return may_follow(flights, self._connection, self._max_in_flight)

    def _put(self, flight: Flight[Any], *, is_awaited: bool) -> None:
        """Sends it, if need be on a new connection. ``is_awaited``: its caller reads the reply."""
        connection = self._connection
        if connection is None or connection.is_over:
            self._drop()
            channel = self._session.client._stubs.open_channel()
            connection = self._connection = _Connection(Duplex(channel, STEP_STREAM))
            if self._watch is None:
                # It knows the stream weakly: one that nobody refers to any more ends.
                interval_s = min(0.5, self._timeout_s / 8)
                self._watch = threading.Thread(
                    target=_watch, args=(weakref.ref(self), self._ended, interval_s), daemon=True
                )
                self._watch.start()
        flight.sent_on = connection
        flight.asked_at = time.monotonic()
        connection.put(flight.call.request, is_awaited=is_awaited)

    def _fetch(self, flight: Flight[Any]) -> Any:
        """The reply to the oldest flight.

        Half the time for an answer; then, or when the stream breaks, sent again on a new
        one. What follows on the broken one is sent again as its turn comes.
        """
        deadline = time.monotonic() + self._timeout_s
        waits_s = iter(BACKOFFS_S)
        while True:
            left_s = deadline - time.monotonic()
            try:
                return self._fetch_once(flight, min(left_s, self._timeout_s / 2))
            except Unavailable:
                wait_s = next(waits_s, None)
                if wait_s is None or time.monotonic() + wait_s >= deadline:
                    raise
                time.sleep(wait_s)
            except DeadlineExceeded:
                if time.monotonic() >= deadline or next(waits_s, None) is None:
                    raise

    def _fetch_once(self, flight: Flight[Any], timeout_s: float) -> Any:
        if flight.sent_on is None or flight.sent_on is not self._connection:
            if self._closed:
                return self._session._send(flight)
            self._put(flight, is_awaited=True)
        connection = flight.sent_on
        try:
            reply = connection.receive(max(0.0, timeout_s))
            if connection.is_late and isinstance(reply, grpc.RpcError | None):
                raise no_answer(timeout_s)
            closed = self._closed or self._session.client._stubs.closed
            return checked_reply(reply, flight, closed=closed)
        except Empty:
            self._drop()
            raise no_answer(timeout_s) from None
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class _Connection:
    """One open stream. A reply is a message, or the RpcError that ended it, or None.

    A message whose reply is awaited is sent by its caller, who then waits for the reply. All
    others are a thread's, which sleeps while there are none.
    """

    def __init__(self, duplex: Duplex) -> None:
        # Received and read already, of Steps that nobody waited for.
        self.replies: SimpleQueue[Any] = SimpleQueue()
        self.is_late = False
        self._duplex = duplex
        # Who holds it works the call.
        self._turn = threading.Lock()
        self._is_closed = False
        self._deadline: float | None = None
        # For the thread; None ends it.
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_thread_waiting = False
        # Replies that the thread has or will have.
        self._num_read_ahead = 0

    @property
    def is_over(self) -> bool:
        """Whether the call has ended, as far as this side has heard."""
        return self._duplex.is_over

    def put(self, request: Any, *, is_awaited: bool) -> None:
        """Sends one message. Unless ``is_awaited``, its reply is read as it comes."""
        message = request.SerializeToString()
        if is_awaited and not self._num_read_ahead:
            with self._turn:
                self._duplex.send(message)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvdepot-steps", daemon=True)
            self._thread.start()
        self._num_read_ahead += 1
        self._messages.put(message)
        if self._is_thread_waiting:
            self._duplex.wake()

    def receive(self, timeout_s: float) -> Any:
        """The next reply. When it is late: Empty, or what ``cancel_if_late`` left."""
        if self._num_read_ahead:
            try:
                reply = self.replies.get(timeout=timeout_s)
            except Empty:
                self.is_late = True
                raise
            self._num_read_ahead -= 1
        else:
            reply = self._wait(timeout_s)
        return _parsed(reply) if isinstance(reply, bytes) else reply

    def cancel_if_late(self) -> None:
        """A wait at the call has no deadline of its own: this ends one that takes too long."""
        deadline = self._deadline
        if deadline is not None and time.monotonic() > deadline:
            self.is_late = True
            self._duplex.cancel()

    def close(self) -> None:
        """Ends the stream."""
        self._is_closed = True
        self._duplex.cancel()
        self._messages.put(None)
        self._hear_out()

    def _wait(self, timeout_s: float) -> Any:
        self._deadline = time.monotonic() + timeout_s
        try:
            with self._turn:
                while not self._has_reply():
                    self._duplex.wait()
                return self._next_reply()
        finally:
            self._deadline = None
            if self._is_closed:
                self._hear_out()

    def _work(self) -> None:
        while (message := self._messages.get()) is not None:
            with self._turn:
                self._converse(message)
            if self._is_closed:
                self._hear_out()
                return

    def _converse(self, message: bytes | None) -> None:
        """Sends it and those that come meanwhile, until all are answered."""
        num_unanswered = 0
        while message is not None or num_unanswered:
            if message is not None:
                self._duplex.send(message)
                num_unanswered += 1
            self._is_thread_waiting = True
            # Looked at only now: whoever puts one later sees that the thread is to be woken.
            if self._messages.empty() and not self._has_reply():
                self._duplex.wait()
            self._is_thread_waiting = False
            while num_unanswered and self._has_reply():
                self.replies.put(_read(self._next_reply()))
                num_unanswered -= 1
            message = None if self._messages.empty() else self._messages.get()

    def _has_reply(self) -> bool:
        return bool(self._duplex.received) or self._duplex.is_over

    def _next_reply(self) -> Any:
        duplex = self._duplex
        return duplex.received.popleft() if duplex.received else duplex.error

    def _hear_out(self) -> None:
        """Has gRPC let go of the call: now, or whoever has the turn does, at its end."""
        if self._turn.acquire(blocking=False):
            try:
                self._duplex.hear_out()
            finally:
                self._turn.release()


def _read(reply: Any) -> Any:
    """A message, read. One that cannot be is left as it is: its caller has the error."""
    if not isinstance(reply, bytes):
        return reply
    try:
        message = _parsed(reply)
        return ReadReply(message.op_seq, convert.step_result(message))
    except Exception:
        return reply


def _parsed(reply: bytes) -> cache_pb2.StepResponse:
    try:
        return cache_pb2.StepResponse.FromString(reply)
    except DecodeError:
        raise InternalError("the server sent what is no StepResponse", reason="BAD_REPLY") from None


def _watch(stream: weakref.ref[StepStream], ended: threading.Event, interval_s: float) -> None:
    while not ended.wait(interval_s):
        watched = stream()
        if watched is None:
            return
        connection = watched._connection
        if connection is not None:
            connection.cancel_if_late()
        del watched, connection


def checked_max_in_flight(max_in_flight: int | None, reply_window: int) -> int:
    """The bound as given, or the default; InvalidArgument beyond what the server replays."""
    if max_in_flight is None:
        return max(1, min(STEPS_IN_FLIGHT_MAX, reply_window))
    if not 1 <= max_in_flight <= reply_window:
        raise InvalidArgument(
            f"max_in_flight must be at least 1 and at most the {reply_window} replies that the "
            f"server keeps, not {max_in_flight}",
            field="max_in_flight",
        )
    return max_in_flight
