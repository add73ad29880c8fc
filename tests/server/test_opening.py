"""An import's transfers, opened one ahead at a peer that has room for so many."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from kvclient.errors import ResourceExhausted
from kvdepot.v1 import transfer_pb2 as pb
from kvserver.mover.lease import Leases
from kvserver.mover.opening import Opening
from kvserver.mover.parts import Part

HASHES = [bytes([number]) for number in range(8)]
# Two blocks each.
PARTS = [Part(((begin, begin + 2),)) for begin in range(0, 8, 2)]


class FakePeer:
    """Has room for ``room`` transfers at a time, and for ``blocks`` blocks in each."""

    def __init__(self, room: int, blocks: int) -> None:
        self._room, self._blocks = room, blocks
        self.open: set[str] = set()
        self.opened: list[int] = []
        self.num_refused = 0

    def call(self, method: str, request: Any, seconds: float, *, linger: bool = False) -> Any:
        if method == "RenewTransfer":
            return pb.RenewTransferResponse(lease_ttl_seconds=30.0)
        (group,) = request.groups
        too_large = len(group.block_hashes) > self._blocks
        if too_large or len(self.open) == self._room:
            self.num_refused += 1
            reason = "TOO_MANY_BLOCKS" if too_large else "TOO_MANY_TRANSFERS"
            raise ResourceExhausted("no room", reason=reason, retryable=not too_large)
        self.opened += [HASHES.index(block_hash) for block_hash in group.block_hashes]
        transfer_id = str(len(self.opened))
        self.open.add(transfer_id)
        return pb.OpenTransferResponse(transfer_id=transfer_id, lease_ttl_seconds=30.0)

    def close_transfer(self, transfer_id: str, seconds: float) -> None:
        self.open.remove(transfer_id)


def opening(peer: Any) -> Opening:
    return Opening(
        peer,
        Leases(),
        [(0, HASHES)],
        PARTS,
        fingerprint="",
        contents=False,
        checksums=False,
        seconds_left=lambda: 1.0,
    )


@pytest.mark.parametrize("blocks", [2, 1], ids=["whole parts", "halves"])
@pytest.mark.parametrize("room", [1, 2, 3])
def test_every_part_is_opened_in_order(room: int, blocks: int) -> None:
    peer = FakePeer(room, blocks)
    with closing(opening(peer).opened()) as parts:
        for _, lease in parts:
            lease.close(1.0)
    assert peer.opened == list(range(8))
    assert not peer.open


def test_a_peer_without_room_for_the_part_that_is_next() -> None:
    peer = FakePeer(1, 2)
    with closing(opening(peer).opened()) as parts:
        next(parts)  # stays open
        with pytest.raises(ResourceExhausted) as caught:
            next(parts)
    assert caught.value.reason == "TOO_MANY_TRANSFERS" and caught.value.retryable
    # Ahead, and once more: not for ever.
    assert peer.num_refused == 2
