"""A session's lease, as its client keeps it: when to renew it, and when it must be gone.

Knows no clock, no thread and no wire. Times are seconds of a clock that only rises.
"""

from __future__ import annotations

from kvclient.errors import CacheLost, KVDepotError, lost_by

_PARTS = 3
"""A session that called nothing for this part of its lease is renewed."""
_PAUSES = 12
"""A renewal that failed at once is tried again after this part of the lease, at most 1 s."""


class Lease:
    """One session's.

    The server counts from when it hears a call, which is no earlier than the call was
    sent: so the lease lasts ``ttl_s`` from when the last answered call was sent, or longer.
    """

    def __init__(self, ttl_s: float, asked_at: float) -> None:
        self.ttl_s = ttl_s
        self.ends_at = asked_at + ttl_s
        self.due_at = asked_at + ttl_s / _PARTS

    @property
    def attempt_s(self) -> float:
        """How long one renewal may take: what is left has room for another."""
        return max(0.05, self.ttl_s / _PARTS)

    def renewed(self, asked_at: float) -> None:
        """A call that was sent at ``asked_at`` was answered."""
        self.ends_at = max(self.ends_at, asked_at + self.ttl_s)
        self.due_at = max(self.due_at, asked_at + self.ttl_s / _PARTS)

    def failed(self, error: KVDepotError, now: float) -> CacheLost | None:
        """A renewal failed. The session's end, if that is what it means by now."""
        lost = lost_by(error)
        if lost is None and now >= self.ends_at:
            lost = CacheLost(
                f"the lease of {self.ttl_s:g} s could not be renewed in time: {error.message}",
                reason="LEASE_EXPIRED",
            )
        self.due_at = now + min(1.0, self.ttl_s / _PAUSES)
        return lost
