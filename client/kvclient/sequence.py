"""A session's ``op_seq``: which number a call gets, and what a failed one leaves behind.

No input or output here: the clients ask before a call and tell how it went.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Generic, NamedTuple, TypeVar

import grpc

from kvclient import convert
from kvclient.calls import Call
from kvclient.errors import (
    FailedPrecondition,
    InternalError,
    KVDepotError,
    ResourceExhausted,
    Unavailable,
    stream_ended,
    unanswered,
)

Result = TypeVar("Result")


class ReadReply(NamedTuple):
    """A reply that was read as it came; who asks for the result only takes it."""

    op_seq: int
    result: Any


class Flight(Generic[Result]):
    """One call from when it got its number until its answer, or its error, is known.

    ``fetch`` takes the flight and gives the reply; it sends the call (again) if need be.
    ``asked_at`` is when the call was last sent, in seconds of the monotonic clock.
    """

    __slots__ = ("_error", "_reply", "asked_at", "call", "fetch", "is_settled", "sent_on")

    def __init__(self, call: Call[Result], fetch: Any) -> None:
        self.call = call
        self.fetch = fetch
        self.asked_at = time.monotonic()
        # The connection that carries it, where there is one.
        self.sent_on: Any = None
        self.is_settled = False
        self._reply: Any = None
        self._error: KVDepotError | None = None

    def result(self) -> Result:
        """What the call gives or raises, once it is settled."""
        assert self.is_settled
        if self._error is not None:
            raise self._error
        reply: Any = self._reply
        if isinstance(reply, ReadReply):
            result: Result = reply.result
            return result
        return self.call.read(reply)

    def settle(self, reply: Any, error: KVDepotError | None) -> None:
        """It was answered, or failed for good."""
        self._reply, self._error = reply, error
        self.is_settled = True


class Sequence:
    """The calls of one session, in order.

    A call whose answer did not come may or may not have been done. It stays in flight:
    sent again with its number, it is done once, whatever happened. That must come before
    the calls after it, for the server takes no number out of turn.
    """

    def __init__(self, session_id: str, epoch: str) -> None:
        self.session_id = session_id
        self.epoch = epoch
        # Oldest first, with consecutive numbers.
        self.flights: deque[Flight[Any]] = deque()
        self._first = 1
        # The last call was refused on the way: it may or may not have taken its number.
        self._unsure = False

    @property
    def pending(self) -> Flight[Any] | None:
        """The oldest call whose answer did not come yet."""
        return self.flights[0] if self.flights else None

    def begin(self, call: Call[Result], fetch: Any = None) -> Flight[Result]:
        """Gives the call the next number."""
        flight = Flight(call, fetch)
        self._number(flight, self._first + len(self.flights))
        self.flights.append(flight)
        return flight

    def succeeded(self, reply: Any = None) -> None:
        """The pending call was answered."""
        self._unsure = False
        self._settled(reply, None)

    def failed(self, error: KVDepotError) -> bool:
        """The pending call ended in ``error``; whether to send it again now, renumbered."""
        if isinstance(error, FailedPrecondition) and error.expected_op_seq is not None:
            if self._unsure and error.expected_op_seq == self._first - 1:
                self._unsure = False
                self._renumber(self._first - 1)
                return True
            first = self._first
            if first < error.expected_op_seq <= first + len(self.flights):
                # It was done, but its answer is kept no more.
                self._unsure = False
                self._settled(None, error)
            else:
                self._settled(None, error)
                self._renumber(first)
        elif error.took_op_seq:
            self._unsure = False
            self._settled(None, error)
        elif error.answered:
            # Refused before its number was looked at. It stays in flight if that may pass.
            if not error.retryable and not isinstance(error, Unavailable):
                first = self._first
                self._settled(None, error)
                self._renumber(first)
        elif isinstance(error, ResourceExhausted):
            # Too large for the wire, one way or the other; sending it again is no use.
            self._settled(None, error)
            self._unsure = True
        return False

    def _settled(self, reply: Any, error: KVDepotError | None) -> None:
        self.flights.popleft().settle(reply, error)
        self._first += 1

    def _renumber(self, first: int) -> None:
        self._first = first
        for number, flight in enumerate(self.flights, first):
            self._number(flight, number)

    def _number(self, flight: Flight[Any], op_seq: int) -> None:
        convert.set_context(
            flight.call.request.context,
            session_id=self.session_id,
            epoch=self.epoch,
            op_seq=op_seq,
            mark=flight.call.mark,
        )


def unsettled(error: KVDepotError) -> Unavailable:
    """What a call raises that is not begun, as one before it failed again with ``error``."""
    return Unavailable(
        f"not begun; the call before it is not settled: {error.message}",
        reason="UNSETTLED",
        retryable=True,
    )


def may_follow(flights: deque[Flight[Any]], connection: Any, num_max: int) -> bool:
    """Whether another call may follow these on ``connection``, or they must be settled first."""
    if not flights:
        return True
    return (
        len(flights) < num_max
        and connection is not None
        and not connection.is_over
        and flights[0].sent_on is connection
        and flights[-1].sent_on is connection
    )


def checked_reply(reply: Any, flight: Flight[Any], *, closed: bool) -> Any:
    """What came on a stream: the reply to ``flight``, or else, raised, how the stream ended."""
    if reply is None:
        raise stream_ended()
    if isinstance(reply, grpc.RpcError):
        raise unanswered(reply, closed=closed)
    op_seq = flight.call.request.context.op_seq
    if reply.op_seq != op_seq:
        raise InternalError(f"asked {op_seq}, answered {reply.op_seq}", reason="BAD_REPLY")
    return reply
