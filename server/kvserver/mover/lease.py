"""A transfer that a peer has opened for an import, kept open until it is closed."""

from __future__ import annotations

import threading
import time

import kvclient.errors
from kvdepot.v1 import transfer_pb2 as pb
from kvserver.mover.peer import Peer


class Lease:
    """Renews it from the moment it is made until ``close``.

    ``asked_at``: when the transfer was asked for, as of ``time.monotonic``.
    """

    def __init__(self, peer: Peer, opened: pb.OpenTransferResponse, asked_at: float) -> None:
        self.opened = opened
        # Why what is read counts for nothing; empty as long as it does.
        self.lost = ""
        self._peer = peer
        self._ttl = opened.lease_ttl_seconds
        self._lasts_until = asked_at + self._ttl
        self._over = threading.Event()
        threading.Thread(target=self._keep, daemon=True, name="kvdepot-lease").start()

    def close(self, seconds: float) -> None:
        """Close the transfer. Raises what the peer answers if what was read does not count."""
        self._over.set()
        self._peer.close_transfer(self.opened.transfer_id, seconds)

    def _keep(self) -> None:
        request = pb.RenewTransferRequest(transfer_id=self.opened.transfer_id)
        while not self._over.wait(self._ttl / 3):
            asked_at = time.monotonic()
            try:
                answer = self._peer.call("RenewTransfer", request, self._ttl / 3)
                self._lasts_until = asked_at + answer.lease_ttl_seconds
            except kvclient.errors.KVDepotError as error:
                told = isinstance(
                    error, kvclient.errors.NotFound | kvclient.errors.FailedPrecondition
                )
                if told or time.monotonic() > self._lasts_until:
                    self.lost = f"{error.reason}: the lease could not be renewed: {error.message}"
                    return
