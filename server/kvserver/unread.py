"""Large replies that clients have not taken yet: how much of them the server holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcore.errors import ResourceExhausted

if TYPE_CHECKING:
    from kvserver.rpc import Context

LARGE_BYTES = 16 << 10
"""A smaller reply takes less than its call does; those are bounded by their number."""

SMALL = frozenset(
    {
        *("OpenSession", "KeepAlive", "CloseSession", "CacheBlocks", "Free", "ReturnBlocks"),
        *("GetStats", "Drain", "RenewTransfer", "CloseTransfer", "Check"),
    }
)
"""RPCs whose replies are never large: what keeps a session alive and gives back goes on."""


class UnreadReplies:
    """Bytes of large replies, by connection. Beyond ``nbytes_max``, who has any gets no more.

    So the others go on, each with one large reply at least. Clients of the Unix socket
    cannot be told apart, nor can those behind one proxy: they count as one connection.
    """

    def __init__(self, nbytes_max: float) -> None:
        self.nbytes = 0
        self._nbytes_max = nbytes_max
        self._by_peer: Counter[str] = Counter()

    def require_room(self, context: Context) -> None:
        """ResourceExhausted if too much is unread, and some of it on this connection."""
        if self.nbytes <= self._nbytes_max or (peer := context.peer()) not in self._by_peer:
            return
        raise ResourceExhausted(
            f"{self._by_peer[peer]} bytes of replies are not read on this connection, of "
            f"{self.nbytes} on all; at most {self._nbytes_max} are held: read them first",
            reason="UNREAD_REPLIES",
            retryable=True,
        )

    def hold(self, context: Context, nbytes: int) -> Callable[[object], None]:
        """A call answers so much. To be called, with anything, when the client has taken it."""
        peer = context.peer()
        self.nbytes += nbytes
        self._by_peer[peer] += nbytes

        def release(_: object) -> None:
            self.nbytes -= nbytes
            self._by_peer[peer] -= nbytes
            if not self._by_peer[peer]:
                del self._by_peer[peer]

        return release
