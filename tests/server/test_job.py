"""An import alone, without the process that runs it and the node that asked for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvdepot.v1 import transfer_pb2 as pb
from kvdepot.v1 import types_pb2
from kvserver.mover import copying, mapping, stream
from kvserver.mover.importer import Importer
from kvserver.mover.job import GRPC, MAPPING, NIXL, Job
from kvserver.mover.store import open_store
from moving import FAILED, IMPORTED, MovingNode, block_hash, moving, pairs
from serving import eventually

# Ten blocks are two parts.
IMPORTER = {
    "copy_threads": 2,
    "bandwidth_bytes": 0,
    "nixl_devices": "none",
    "part_blocks": 5,
    "part_bytes": 1 << 20,
}
FIVE, NONE = bytes([IMPORTED]) * 5, bytes([FAILED]) * 5
Say = Callable[[Job, dict[str, Any]], None]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MovingNode, MovingNode]]:
    with moving(tmp_path_factory.mktemp("nodes")) as start:
        source, here = start(nixl_devices="none"), start(nixl_devices="none")
        source.fill(1)
        yield source, here


class Alone:
    """Ten blocks; ``heard`` is called with all that is said."""

    def __init__(
        self,
        nodes: tuple[MovingNode, MovingNode],
        heard: Say,
        *,
        takes: bool,
        path: pb.TransferPath = GRPC,
    ) -> None:
        self.source, self.here = nodes
        self.source.reset()
        self.here.fill(2)
        self.said: list[dict[str, Any]] = []
        self._heard = heard
        message = {
            "job": 1,
            "peer": self.source.target,
            "fingerprint": "",
            "groups": [
                {
                    "group": 0,
                    "hashes": [block_hash(0, theirs) for theirs, _ in pairs(range(1, 11), 1)],
                    "ids": [0 if takes else ours for _, ours in pairs(range(1, 11), 1)],
                }
            ],
            "paths": [path],
            "checksums": False,
            "contents": False,
            "takes": takes,
            "deadline": 20.0,
        }
        importer = Importer(IMPORTER, self.here.pool, open_store(self.here.pool))
        self.job = Job(importer, message, self._say)

    def _say(self, **told: Any) -> None:
        self.said.append(told)
        self._heard(self.job, told)

    def run(self) -> dict[str, Any]:
        """Its last word."""
        self.job.run()
        return self.said[-1]

    @property
    def statuses(self) -> bytes:
        """What its parts have said of the ten."""
        told = bytearray(NONE + NONE)
        for each in self.said:
            if each["op"] == "part":
                first, part = each["first"][0], each["statuses"][0]
            elif each["op"] == "vouched" and each["valid"]:
                told[first : first + len(part)] = part
        return bytes(told)


@pytest.mark.parametrize("late", [1, 2])
def test_blocks_that_are_taken_too_late(nodes: tuple[MovingNode, MovingNode], late: int) -> None:
    """What came before counts; if nothing did, the error says what it was."""
    found: list[Any] = []
    source, _ = nodes

    def take(job: Job, told: dict[str, Any]) -> None:
        if told["op"] != "found":
            return
        found.append(told)
        if len(found) == late:
            # What came before has been vouched for.
            eventually(lambda: late == 1 or source.opened[0] not in source.transfers)
            job._ends_at = time.monotonic() + 0.1
        else:
            job.give({0: [2, 3, 4, 5, 6]})

    alone = Alone(nodes, take, takes=True)
    last = alone.run()
    if late == 1:
        assert (last["op"], last["kind"]) == ("error", "Unavailable")
        assert (last["reason"], last["retryable"]) == ("DEADLINE_EXCEEDED", True)
        return
    assert last["op"] == "report"
    assert (alone.statuses, last["blocks"]) == (FIVE + NONE, 5)
    assert any(reason.startswith("DEADLINE_EXCEEDED: ") for _, reason in last["failures"])
    assert alone.here.read(0, 2) == alone.source.read(0, 1)


def _cut_ids(answer: pb.OpenTransferResponse) -> None:
    answer.groups[0].block_ids = answer.groups[0].block_ids[:-1]


def _add_group(answer: pb.OpenTransferResponse) -> None:
    answer.groups.add(group=7, statuses=b"\1", block_ids=bytes(4))


def _name_null_blocks(answer: pb.OpenTransferResponse) -> None:
    answer.groups[0].block_ids = bytes(len(answer.groups[0].block_ids))


@pytest.mark.parametrize("mangle", [_cut_ids, _add_group, _name_null_blocks])
def test_a_peer_that_answers_what_cannot_be(
    nodes: tuple[MovingNode, MovingNode],
    mangle: Callable[[pb.OpenTransferResponse], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = Alone(nodes, lambda job, told: None, takes=False)
    monkeypatch.setattr(alone.source, "mangle", mangle)
    last = alone.run()
    assert (last["op"], last["kind"], last["reason"]) == ("error", "FailedPrecondition", "BAD_PEER")
    assert alone.statuses == NONE + NONE


def _no_group(pool: types_pb2.PoolDescription) -> None:
    pool.layers[0].group = 7


def _beyond_its_bytes(pool: types_pb2.PoolDescription) -> None:
    pool.num_blocks += 1


@pytest.mark.parametrize("mangle", [_no_group, _beyond_its_bytes])
def test_a_peer_whose_pool_cannot_be(
    nodes: tuple[MovingNode, MovingNode],
    mangle: Callable[[types_pb2.PoolDescription], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the peer's fault, not that of who asked for the import."""
    alone = Alone(nodes, lambda job, told: None, takes=False)
    pool = types_pb2.PoolDescription.FromString(alone.source.pool.SerializeToString())
    mangle(pool)
    monkeypatch.setattr(alone.source.handle, "_pool", pool)
    last = alone.run()
    assert (last["op"], last["kind"], last["reason"]) == ("error", "FailedPrecondition", "BAD_PEER")
    assert last["field"] == "peer"
    assert alone.statuses == NONE + NONE
    eventually(lambda: not alone.source.transfers)  # that of the next part, too


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (MAPPING, "the peer is on another host"),
        (NIXL, "the peer has no NIXL agent now"),
        (GRPC, "the peer has no data address"),
    ],
)
def test_a_path_that_is_not_offered_is_told(
    nodes: tuple[MovingNode, MovingNode],
    path: pb.TransferPath,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by a peer whose process that serves its bytes has just died."""
    alone = Alone(nodes, lambda *_: None, takes=False, path=path)
    alone.source.host_id = "another"
    monkeypatch.setattr(alone.source, "mangle", lambda answer: answer.ClearField("reach"))
    last = alone.run()
    assert (last["op"], last["blocks"]) == ("report", 0)
    assert last["failures"] == [[path, f"NOT_OFFERED: {why}"]]
    assert alone.statuses == NONE + NONE


def test_a_lease_that_was_lost_is_no_fault_of_the_path(
    nodes: tuple[MovingNode, MovingNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stream.run
    tasks: list[Any] = []

    def lose_the_first(task: Any) -> None:
        tasks.append(task)
        if len(tasks) == 1:
            task.lease.lost = "NOT_FOUND: the lease could not be renewed"
        run(task)

    monkeypatch.setattr(stream, "run", lose_the_first)
    alone = Alone(nodes, lambda *_: None, takes=False)
    last = alone.run()
    assert alone.statuses == NONE + FIVE
    assert last["failures"] == [[GRPC, "NOT_FOUND: the lease could not be renewed"]]


def test_progress_never_goes_back(
    nodes: tuple[MovingNode, MovingNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not if the peer does not vouch for the first part; the report has what counts."""
    monkeypatch.setattr(copying, "_PROGRESS_SECONDS", -1.0)  # all is told
    monkeypatch.setattr(mapping, "BATCH_BYTES", 1)  # block by block
    source, _ = nodes
    alone = Alone(nodes, lambda *_: None, takes=False, path=MAPPING)
    closed: list[str] = []

    def lose_the_first() -> None:
        closed.append("")
        if len(closed) == 1:
            source.transfers.discard(source.opened[0])

    source.on_close = lose_the_first
    last = alone.run()
    assert (alone.statuses, last["blocks"]) == (NONE + FIVE, 5)
    told = [(each["blocks"], each["bytes"]) for each in alone.said if each["op"] == "progress"]
    assert told == sorted(told)
    assert told[-1] == (5, last["bytes"])
