"""Leases of an import's transfers: renewed in time, as long as they are open and wanted."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from typing import Any

import pytest

from kvclient.errors import NotFound
from kvdepot.v1 import transfer_pb2 as pb
from kvserver.mover.lease import Lease, Leases
from moving import eventually

SHORT, LONG = 0.15, 300.0


class FakePeer:
    """Counts renewals; those of ``gone`` are not known, and those of ``slow`` take long."""

    def __init__(self) -> None:
        self.renewed: Counter[str] = Counter()
        self.gone: set[str] = set()
        self.slow: set[str] = set()
        self.answer = threading.Event()

    def call(self, method: str, request: Any, seconds: float) -> Any:
        assert method == "RenewTransfer"
        if request.transfer_id in self.slow:
            assert self.answer.wait(20)
        self.renewed[request.transfer_id] += 1
        if request.transfer_id in self.gone:
            raise NotFound("no such transfer", reason="UNKNOWN_TRANSFER")
        return pb.RenewTransferResponse(lease_ttl_seconds=SHORT)

    def close_transfer(self, transfer_id: str, seconds: float) -> None:
        """As Peer's."""


def keep(leases: Leases, peer: Any, name: str, ttl: float) -> Lease:
    opened = pb.OpenTransferResponse(transfer_id=name, lease_ttl_seconds=ttl)
    return leases.keep(peer, opened, time.monotonic())


@pytest.fixture
def peer() -> FakePeer:
    return FakePeer()


def test_each_is_renewed_when_it_is_due(peer: FakePeer) -> None:
    leases = Leases()
    kept = [keep(leases, peer, "long", LONG), keep(leases, peer, "short", SHORT)]
    eventually(lambda: peer.renewed["short"] >= 3)
    assert not peer.renewed["long"] and not any(lease.lost for lease in kept)
    kept[1].close(1.0)
    eventually(lambda: all(each.name != "kvdepot-lease" for each in threading.enumerate()))
    num_renewed = peer.renewed["short"]
    time.sleep(SHORT)
    assert peer.renewed["short"] == num_renewed


def test_one_that_is_slow_holds_up_no_other(peer: FakePeer) -> None:
    leases = Leases()
    peer.slow.add("slow")
    kept = [keep(leases, peer, name, SHORT) for name in ("slow", "quick")]
    try:
        eventually(lambda: peer.renewed["quick"] >= 2)
        assert not peer.renewed["slow"]
    finally:
        peer.answer.set()
        for lease in kept:
            lease.close(1.0)


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_one_that_nobody_wants_any_more_is_not_renewed(peer: FakePeer, how: str) -> None:
    leases = Leases()
    lease: Lease | None = keep(leases, peer, "a", SHORT)
    other = keep(leases, peer, "b", SHORT)
    if how == "closed":
        assert lease is not None
        lease.close(1.0)
    lease = None
    gc.collect()
    eventually(lambda: peer.renewed["b"] >= 2)
    other.close(1.0)
    assert not peer.renewed["a"]


def test_one_that_the_peer_does_not_know_is_lost(peer: FakePeer) -> None:
    peer.gone.add("a")
    lease = keep(Leases(), peer, "a", SHORT)
    eventually(lambda: bool(lease.lost))
    assert lease.lost.startswith("UNKNOWN_TRANSFER: ") and peer.renewed["a"] == 1


@pytest.mark.parametrize("ttl", [float("inf"), float("nan"), -1.0, 1e300])
def test_what_one_peer_answers_keeps_no_other_waiting(peer: FakePeer, ttl: float) -> None:
    leases = Leases()
    odd = keep(leases, peer, "odd", ttl)
    good = keep(leases, peer, "good", SHORT)
    eventually(lambda: peer.renewed["good"] > 2)
    assert not good.lost
    for lease in (odd, good):
        lease.close(1.0)
