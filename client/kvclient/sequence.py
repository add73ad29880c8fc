"""A session's ``op_seq``: which number a call gets, and what a failed one leaves behind.

No input or output here: the clients ask before a call and tell how it went.
"""

from __future__ import annotations

from typing import Any

from kvclient import convert
from kvclient.calls import Call
from kvclient.errors import FailedPrecondition, KVDepotError, ResourceExhausted, Unavailable


class Sequence:
    """The calls of one session, one at a time.

    A call whose answer did not come may or may not have been done. It stays
    ``pending``: sent again with its number, it is done once, whatever happened. That
    must come before the next call, for the server takes no number out of turn.
    """

    def __init__(self, session_id: str, epoch: str) -> None:
        self.session_id = session_id
        self.epoch = epoch
        self.pending: Call[Any] | None = None
        self._next = 1
        # The last call was refused on the way: it may or may not have taken its number.
        self._unsure = False

    def begin(self, call: Call[Any]) -> None:
        """Gives the call the next number."""
        assert self.pending is None
        self._number(call)
        self.pending = call

    def succeeded(self) -> None:
        """The pending call was answered."""
        self.pending = None
        self._unsure = False
        self._next += 1

    def failed(self, error: KVDepotError) -> bool:
        """The pending call ended in ``error``; whether to send it again now, renumbered."""
        call = self.pending
        assert call is not None
        if isinstance(error, FailedPrecondition) and error.expected_op_seq is not None:
            if self._unsure and error.expected_op_seq == self._next - 1:
                self._next -= 1
                self._unsure = False
                self._number(call)
                return True
            if error.expected_op_seq == self._next + 1:
                self.succeeded()  # it was done, but its answer is kept no more
            self.pending = None
        elif error.answered and not isinstance(error, Unavailable):
            self.succeeded()
        elif isinstance(error, ResourceExhausted):
            # Too large for the wire, one way or the other; sending it again is no use.
            self.succeeded()
            self._unsure = True
        return False

    def _number(self, call: Call[Any]) -> None:
        convert.set_context(
            call.request.context,
            session_id=self.session_id,
            epoch=self.epoch,
            op_seq=self._next,
            mark=call.mark,
        )


def unsettled(error: KVDepotError) -> Unavailable:
    """What a call raises that is not begun, as the one before it failed again with ``error``."""
    return Unavailable(
        f"not begun; the call before it is not settled: {error.message}",
        reason="UNSETTLED",
        retryable=True,
    )
