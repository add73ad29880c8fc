"""Transfers that peers have opened for imports, kept open until they are closed."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import weakref

import kvclient.errors
from kvdepot.v1 import transfer_pb2 as pb
from kvserver.mover.peer import Peer

# The longest that a server of ours gives.
_TTL_SECONDS_MAX = 86_400.0


class Leases:
    """Has leases renewed from a third of their time on: most transfers end sooner.

    One thread for all, as starting one costs as much as a part of a small import.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # When each is due; of equal times the first first.
        self._due: list[tuple[float, int, weakref.ref[Lease]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def keep(self, peer: Peer, opened: pb.OpenTransferResponse, asked_at: float) -> Lease:
        """The lease of a transfer that was asked for at ``asked_at`` of ``time.monotonic``."""
        lease = Lease(peer, opened, asked_at)
        due = time.monotonic() + lease.ttl_seconds / 3
        with self._changed:
            heapq.heappush(self._due, (due, next(self._numbers), weakref.ref(lease)))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, daemon=True, name="kvdepot-leases"
                )
                self._thread.start()
            elif self._due[0][0] == due:
                self._changed.notify()
        return lease

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                _, _, reference = heapq.heappop(self._due)
            if (lease := reference()) is not None:
                lease.renew_until_closed()
            del lease


class Lease:
    """Of one transfer."""

    def __init__(self, peer: Peer, opened: pb.OpenTransferResponse, asked_at: float) -> None:
        self.opened = opened
        # Why what is read counts for nothing; empty as long as it does.
        self.lost = ""
        self._peer = peer
        # A peer may say anything, and no wait is endless; of NaN, 0.
        self.ttl_seconds = max(0.0, min(opened.lease_ttl_seconds, _TTL_SECONDS_MAX))
        self._lasts_until = asked_at + self.ttl_seconds
        self._over = threading.Event()

    def renew_until_closed(self) -> None:
        """In a thread of its own, from now on: a peer may be slow to answer."""
        if not self._over.is_set():
            threading.Thread(target=self._keep, daemon=True, name="kvdepot-lease").start()

    def close(self, seconds: float) -> None:
        """Close the transfer. Raises what the peer answers if what was read does not count."""
        self._over.set()
        self._peer.close_transfer(self.opened.transfer_id, seconds)

    def _keep(self) -> None:
        request = pb.RenewTransferRequest(transfer_id=self.opened.transfer_id)
        while True:
            asked_at = time.monotonic()
            try:
                answer = self._peer.call("RenewTransfer", request, self.ttl_seconds / 3)
                self._lasts_until = asked_at + answer.lease_ttl_seconds
            except kvclient.errors.KVDepotError as error:
                told = isinstance(
                    error, kvclient.errors.NotFound | kvclient.errors.FailedPrecondition
                )
                if told or time.monotonic() > self._lasts_until:
                    self.lost = f"{error.reason}: the lease could not be renewed: {error.message}"
                    return
            if self._over.wait(self.ttl_seconds / 3):
                return
