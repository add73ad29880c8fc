"""What the synchronous and the asyncio session share: what was opened, and whether it is over."""

from __future__ import annotations

from typing import Any

from kvclient.calls import Opened, Opening
from kvclient.errors import CacheLost, FailedPrecondition, KVDepotError, lost_by
from kvclient.lease import Lease
from kvclient.sequence import Sequence


class BaseSession:
    """A session as its client knows it. Neither sends nor waits.

    ``reply_window``: so many of its last replies does the server keep, so that a call whose
    reply was lost is answered, not done, when it is sent again. Of large replies it keeps
    fewer; FailedPrecondition, OP_SEQ_OUT_OF_WINDOW, then says that it was done, not how.
    ``step_operations_max``: a Step with more operations is refused.
    """

    def __init__(self, client: Any, opening: Opening, opened: Opened, *, asked_at: float) -> None:
        self.client = client
        self.session_id = opened.session_id
        self.epoch = opened.epoch
        self.pool = opened.pool
        self.reply_window = opened.reply_window
        self.lease_ttl_s = opened.lease_ttl_s
        self.step_operations_max = opened.step_operations_max
        self._opening = opening
        self._lease = Lease(opened.lease_ttl_s, asked_at)
        self._lost: CacheLost | None = None
        self._sequence = Sequence(opened.session_id, opened.epoch)
        self._closed = False
        client._keeper.add(self)

    @property
    def lost(self) -> CacheLost | None:
        """Why the session is over, as far as this side knows; None while it is not."""
        return self._lost

    def _lose(self, lost: CacheLost) -> None:
        if self._lost is None:
            self._lost = lost
        self.client._keeper.remove(self)

    def _as_lost(self, error: KVDepotError) -> KVDepotError:
        """The error, or that the session is lost, which it says."""
        lost = lost_by(error)
        if lost is None:
            return error
        self._lose(lost)
        return lost

    def _check_not_lost(self) -> None:
        if self._lost is not None:
            raise self._lost.again()

    def _check_open(self) -> None:
        if self._closed:
            raise FailedPrecondition("the session is closed", reason="SESSION_CLOSED")
        self._check_not_lost()
