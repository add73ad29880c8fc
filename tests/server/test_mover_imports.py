"""Imports by every path: bytes right or not there, and an end for certain."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import xxhash

from kvcore.errors import FailedPrecondition, Unavailable
from kvdepot.v1 import transfer_pb2 as pb
from moving import (
    FAILED,
    IMPORTED,
    MISSING,
    PENDING,
    MovingNode,
    block_hash,
    kill,
    moving,
    pairs,
)
from serving import eventually

Start = Callable[..., MovingNode]

MAPPING, NIXL, GRPC = pb.TRANSFER_PATH_MAPPING, pb.TRANSFER_PATH_NIXL, pb.TRANSFER_PATH_GRPC
needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed"
)
PATHS = [
    pytest.param(MAPPING, id="mapping"),
    pytest.param(NIXL, id="nixl", marks=needs_nixl),
    pytest.param(GRPC, id="grpc"),
]
# A block has 24 pages of 8 KiB.
LARGE = {"model": "qwen2-0.5b"}


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts nodes; they offer NIXL, which takes a second to load, to tests of that path."""
    parameters = getattr(request.node, "callspec", None)
    path = parameters.params.get("path", 0) if parameters is not None else 0
    devices = "lo" if path == NIXL else "none"
    with moving(tmp_path) as starter:
        yield lambda **options: starter(**({"nixl_devices": devices} | options))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Nodes that the module's tests share: of equal keywords the same."""
    made: dict[str, MovingNode] = {}
    with moving(tmp_path_factory.mktemp("nodes")) as starter:

        def node(number: int = 0, **options: Any) -> MovingNode:
            key = f"{number} {sorted(options.items())}"
            if key not in made:
                made[key] = starter(**options)
            made[key].reset()
            return made[key]

        yield node


def both(kept: Start, **options: Any) -> tuple[MovingNode, MovingNode]:
    """Shared nodes with random bytes."""
    source, destination = kept(1, **options), kept(2, **options)
    source.fill(1)
    destination.fill(2)
    return source, destination


def two(start: Start, **options: Any) -> tuple[MovingNode, MovingNode]:
    """Nodes with random bytes."""
    source, destination = start(**options), start(**options)
    source.fill(1)
    destination.fill(2)
    return source, destination


def assert_imported(
    source: MovingNode, destination: MovingNode, blocks: dict[int, list[tuple[int, int]]]
) -> None:
    """The bytes are the same."""
    for group, moved in blocks.items():
        for theirs, ours in moved:
            assert destination.read(group, ours) == source.read(group, theirs)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("source_layout", "destination_layout"),
    [("block", "block"), ("layer", "layer"), ("block", "layer"), ("layer", "block")],
)
def test_bytes_are_right(
    kept: Start, path: int, source_layout: str, destination_layout: str
) -> None:
    source = kept(1, **LARGE, layout=source_layout)
    destination = kept(2, **LARGE, layout=destination_layout)
    source.fill(1)
    blocks = {0: pairs(range(1, 30), 7)}
    untouched = [destination.read(0, block_id) for block_id in (5, 6, 7)]
    for checksums in (False, True):
        destination.fill(2 + checksums)
        untouched = [destination.read(0, block_id) for block_id in (5, 6, 7)]
        job = destination.job(source, blocks, paths=[path], checksums=checksums)
        report, _ = destination.run_import(job)
        assert list(report.failures) == []
        assert (report.num_blocks, report.path) == (29, path)
        assert report.num_bytes == 29 * 24 * 8192
        assert report.statuses == {0: bytes([IMPORTED]) * 29}
        assert_imported(source, destination, blocks)
        assert [destination.read(0, block_id) for block_id in (5, 6, 7)] == untouched
    assert source.transfers == set()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", ["gemma-like", "mamba-hybrid"])
def test_groups_of_a_hybrid_model(kept: Start, path: int, model: str) -> None:
    source, destination = both(kept, model=model)
    blocks = {0: pairs([1, 2], 3), 1: pairs([7, 8, 9], 5), 2: pairs([20], 0)}
    report, _ = destination.run_import(destination.job(source, blocks, paths=[path]))
    assert list(report.failures) == []
    assert report.statuses == {
        group: bytes([IMPORTED]) * len(moved) for group, moved in blocks.items()
    }
    assert_imported(source, destination, blocks)


def test_every_hash_is_answered(kept: Start) -> None:
    source, destination = both(kept)
    blocks = {0: [(1, 1), (99, 2), (3, 3), (4, 4)]}
    job = destination.job(source, blocks, contents=True)
    source.pending.add(job.groups[0].hashes[2])
    report, _ = destination.run_import(job)
    assert report.statuses == {0: bytes([IMPORTED, MISSING, PENDING, IMPORTED])}
    assert report.path == MAPPING
    assert report.names[0] == [job.groups[0].hashes[0], job.groups[0].hashes[3]]
    assert_imported(source, destination, {0: [(1, 1), (4, 4)]})


@pytest.mark.parametrize("path", PATHS)
def test_blocks_are_taken_when_the_peer_has_said_what_it_has(kept: Start, path: int) -> None:
    """For what is ready, and as many as there are."""
    source, destination = both(kept)
    asked: list[Any] = []

    def take(ready: Any) -> Any:
        asked.append({group: (part.first, list(part.is_ready)) for group, part in ready.items()})
        return {0: [7, 0, 0, 0, 9]}

    blocks = {0: [(1, 0), (99, 0), (3, 0), (4, 0), (5, 0)]}
    job = destination.job(source, blocks, contents=True, paths=[path], take=take)
    source.pending.add(job.groups[0].hashes[2])
    report, _ = destination.run_import(job)
    assert asked == [{0: (0, [1, 0, 0, 1, 1])}]
    assert report.statuses == {0: bytes([IMPORTED, MISSING, PENDING, FAILED, IMPORTED])}
    assert report.names[0] == [job.groups[0].hashes[0], job.groups[0].hashes[4]]
    assert_imported(source, destination, {0: [(1, 7), (5, 9)]})
    assert source.transfers == set()
    # Nothing that is there: nobody is asked.
    report, _ = destination.run_import(destination.job(source, {0: [(99, 0)]}, take=take))
    assert report.statuses == {0: bytes([MISSING])} and len(asked) == 1


@pytest.mark.parametrize(
    ("host_id", "hidden", "expected"),
    [
        pytest.param(None, False, MAPPING, id="same host"),
        pytest.param("another", False, NIXL, id="another host", marks=needs_nixl),
        pytest.param(None, True, NIXL, id="another file system", marks=needs_nixl),
    ],
)
def test_the_best_path_that_works_is_taken(
    kept: Start,
    host_id: str | None,
    hidden: bool,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, destination = both(kept)
    source.host_id = host_id
    if hidden:
        monkeypatch.setattr(source, "shown_path", source.memory.path + ".elsewhere")
    blocks = {0: pairs(range(1, 9), 1)}
    report, _ = destination.run_import(destination.job(source, blocks))
    assert report.path == expected
    failures = [(failure.path, failure.reason) for failure in report.failures]
    reason = f"{source.memory.path}.elsewhere: No such file or directory"
    assert failures == ([(MAPPING, reason)] if hidden else [])
    assert_imported(source, destination, blocks)


def test_without_nixl_the_stream_is_next(start: Start) -> None:
    source, destination = start(nixl_devices="lo"), start()
    source.fill(1)
    source.host_id = "another"
    blocks = {0: pairs(range(1, 9), 1)}
    report, _ = destination.run_import(destination.job(source, blocks))
    assert report.path == GRPC and not report.failures
    assert_imported(source, destination, blocks)


@needs_nixl
def test_when_the_peers_agent_dies_the_stream_is_next(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else the kernel reads the memory of a peer that is met already, and stopped.
    monkeypatch.setenv("UCX_TLS", "tcp")
    source, destination = two(start, nixl_devices="lo")
    source.host_id = "another"
    blocks = {0: pairs(range(1, 9), 1)}
    destination.run_import(destination.job(source, blocks))  # loads NIXL
    pid = source.serving_pid
    kill(pid, signal.SIGSTOP)
    opened = len(source.opened)
    running = destination.begin_import(destination.job(source, blocks))
    eventually(lambda: len(source.opened) > opened)
    time.sleep(0.5)  # the read begins, if it is not late, and waits for an answer
    kill(pid, signal.SIGKILL)
    report, _ = running.result()
    first = report.failures[0]
    assert first.path == NIXL and re.search(r"nixl\w+Error", first.reason)
    assert report.path == GRPC  # where another process serves by now, or not yet


def test_a_file_that_no_living_server_keeps_is_not_mapped(start: Start, tmp_path: Path) -> None:
    source, destination = two(start)
    left_behind = tmp_path / "left-behind"
    left_behind.write_bytes(bytes(source.memory.nbytes))
    source.pool.mappings[0].file.path = str(left_behind)
    blocks = {0: pairs(range(1, 9), 1)}
    job = destination.job(source, blocks, paths=[MAPPING, GRPC])
    report, _ = destination.run_import(job)
    (failure,) = report.failures
    assert failure.path == MAPPING and "its server is gone" in failure.reason
    assert report.path == GRPC
    assert_imported(source, destination, blocks)


@pytest.mark.parametrize("path", PATHS)
def test_a_byte_that_changed_on_the_way_is_found(
    start: Start, path: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes come from a file that differs by a bit from the one that is hashed."""
    source, other, destination = start(**LARGE), start(**LARGE), start(**LARGE)
    for node in (source, other):
        node.fill(1)
    other.flip(0, 3)
    # The peer says that its bytes are where the other has them, but hashes its own.
    reach = source.handle.reach()
    if path == MAPPING:
        source.handle._pool = other.pool
        source.handle._pool.fingerprint = source.fingerprint
    elif path == NIXL:
        theirs = other.handle.reach()
        reach.nixl_agent = theirs.nixl_agent
        reach.nixl_regions[0].CopyFrom(theirs.nixl_regions[0])
        other.handle.open_transfer("so that it works for its peers", {})
    else:
        pytest.skip("a stream's checksums come with its bytes: test_mover_serving has it")
    blocks = {0: pairs(range(1, 9), 1)}
    report, _ = destination.run_import(destination.job(source, blocks, paths=[path]))
    assert report.statuses == {0: bytes([IMPORTED] * 2 + [FAILED] + [IMPORTED] * 5)}
    assert report.num_blocks == 7
    (failure,) = report.failures
    assert failure.path == path and "of 1 blocks" in failure.reason
    # Another path may have it right.
    job = destination.job(source, blocks, paths=[path, GRPC])
    report, _ = destination.run_import(job)
    assert report.statuses == {0: bytes([IMPORTED]) * 8}
    assert report.path == GRPC and len(report.failures) == 1
    assert_imported(source, destination, blocks)


@pytest.mark.parametrize("path", [MAPPING, pytest.param(NIXL, marks=needs_nixl)])
def test_checksums_that_the_peer_knows_are_not_computed_again(kept: Start, path: int) -> None:
    source, destination = both(kept)
    blocks = {0: pairs(range(1, 9), 1)}
    job = destination.job(source, blocks, paths=[path])
    sums = {
        theirs: xxhash.xxh3_64_intdigest(source.read(0, theirs))
        for theirs, _ in pairs(range(1, 9), 1)
    }
    known = {block_hash(0, theirs): sums[theirs] for theirs in (1, 2, 5)}
    source.sums = dict(known)
    report, _ = destination.run_import(job)
    assert report.statuses == {0: bytes([IMPORTED]) * 8} and not report.failures
    eventually(lambda: len(source.summed) == 5)
    assert source.summed == {theirs: sums[theirs] for theirs in (3, 4, 6, 7, 8)}
    # They prove as much: other bytes come now.
    source.flip(0, 2)
    report, _ = destination.run_import(job)
    assert report.statuses == {0: bytes([IMPORTED, FAILED]) + bytes([IMPORTED]) * 6}
    # All known: the process that serves PullBlocks is not asked at all.
    source.summed.clear()
    source.sums = {block_hash(0, theirs): value for theirs, value in sums.items()}
    report, _ = destination.run_import(job)
    assert report.num_blocks == 7 and not source.summed
    # Nor does a stream bring them, whose own sums are of what it sends.
    report, _ = destination.run_import(destination.job(source, blocks, paths=[GRPC]))
    assert report.statuses == {0: bytes([IMPORTED, FAILED]) + bytes([IMPORTED]) * 6}


def test_a_peer_that_answers_too_many_checksums(kept: Start) -> None:
    source, destination = both(kept)
    source.sums, source.sums_tail = {}, b"\1"
    with pytest.raises(FailedPrecondition) as caught:
        destination.run_import(destination.job(source, {0: pairs(range(1, 9), 1)}))
    assert caught.value.reason == "BAD_PEER" and "checksums are 65 bytes" in caught.value.message


def test_nothing_counts_when_the_lease_ran_out_meanwhile(kept: Start) -> None:
    source, destination = both(kept)
    source.on_close = source.transfers.clear
    blocks = {0: pairs(range(1, 9), 1)}
    report, _ = destination.run_import(destination.job(source, blocks))
    assert report.statuses == {0: bytes([FAILED]) * 8}
    assert (report.num_blocks, report.num_bytes) == (0, 0)
    (failure,) = report.failures
    assert "CloseTransfer: NOT_FOUND" in failure.reason


def test_a_peer_that_stands_still_when_it_should_vouch_is_asked_again(kept: Start) -> None:
    source, destination = both(kept)
    asked: list[str] = []

    def stand_still_at_first() -> None:
        asked.append("")
        if len(asked) == 1:
            time.sleep(2.0)

    source.on_close = stand_still_at_first
    blocks = {0: pairs(range(1, 9), 1)}
    report, _ = destination.run_import(destination.job(source, blocks))
    assert report.statuses == {0: bytes([IMPORTED]) * 8}
    assert not report.failures and len(asked) > 1
    assert_imported(source, destination, blocks)


SLOW = {**LARGE, "import_bandwidth_bytes": 4 << 20}


@pytest.mark.parametrize("path", PATHS)
def test_a_long_copy_renews_the_lease_and_tells_how_far_it_is(kept: Start, path: int) -> None:
    source, destination = kept(1, **LARGE, layout="block"), kept(2, **SLOW)
    source.lease_ttl_seconds = 3.0
    began = time.monotonic()
    job = destination.job(source, {0: pairs(range(1, 31), 1)}, paths=[path])
    # In parts, as 30 blocks are one batch for some of the paths.
    for _ in range(2):
        report, progress = destination.run_import(job)
        assert report.statuses == {0: bytes([IMPORTED]) * 30}
        assert progress and progress[-1].path == path
    # 6 MB each, at 4 MiB a second; what is booked is waited for by the next.
    assert time.monotonic() - began > 1.0
    assert source.num_renewals >= 1


def test_a_lease_lost_during_the_copy_ends_it(kept: Start) -> None:
    source = kept(1, **LARGE, layout="block")
    # All of it would take 48 s.
    destination = kept(**LARGE, import_bandwidth_bytes=1 << 17)
    destination.run_import(destination.job(source, {0: pairs([1], 0)}))  # its process is there
    source.lease_ttl_seconds = 3.0
    running = destination.begin_import(
        destination.job(source, {0: pairs(range(1, 33), 0)}, paths=[GRPC], deadline_seconds=60.0)
    )
    eventually(lambda: bool(source.transfers))
    for transfer_id in list(source.transfers):
        source.transfers.discard(transfer_id)
    report, _ = running.result()
    assert report.statuses == {0: bytes([FAILED]) * 32}
    assert any("the lease could not be renewed" in failure.reason for failure in report.failures)
    assert running.seconds < 40


def test_a_transfer_that_the_peer_closes_midway_ends_the_stream(start: Start) -> None:
    # All of it would take 12 s.
    source, destination = start(**LARGE, pull_bandwidth_bytes=1 << 19), start(**LARGE)
    blocks = {0: pairs(range(1, 33), 0)}
    running = destination.begin_import(destination.job(source, blocks, paths=[GRPC]))
    eventually(lambda: bool(source.transfers))
    for transfer_id in list(source.transfers):
        source.expire(transfer_id)
    report, _ = running.result()
    assert report.statuses == {0: bytes([FAILED]) * 32}
    assert any("UNKNOWN_TRANSFER" in failure.reason for failure in report.failures)


def test_connections_to_the_data_address_are_bounded(start: Start) -> None:
    source, destination = start(max_data_connections=2), start()
    job = destination.job(source, {0: pairs(range(1, 9), 1)}, paths=[GRPC], deadline_seconds=5.0)
    port = source.handle._port
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            held = socket.create_connection(("127.0.0.1", port))
            stack.callback(held.close)
            assert held.recv(1)  # it is one of those that are served
        report, _ = destination.run_import(job)
        assert report.statuses == {0: bytes([FAILED]) * 8}
        (failure,) = report.failures
        assert "--max-data-connections" in failure.reason

    def has_room() -> bool:
        report, _ = destination.run_import(job)
        return report.statuses == {0: bytes([IMPORTED]) * 8}

    eventually(has_room)


def test_a_connection_that_says_nothing_keeps_its_place_for_a_short_time(start: Start) -> None:
    """So that what a peer must be asked for there, as checksums that it does not know, comes."""
    source, destination = start(max_data_connections=1, data_connection_idle_seconds=1.0), start()
    job = destination.job(source, {0: pairs(range(1, 9), 1)}, paths=[MAPPING], deadline_seconds=5.0)
    with socket.create_connection(("127.0.0.1", source.handle._port)) as held:
        held.settimeout(60.0)
        assert held.recv(1)
        while held.recv(1 << 16):
            pass  # until it is closed

    def has_room() -> bool:
        report, _ = destination.run_import(job)
        return report.statuses == {0: bytes([IMPORTED]) * 8}

    eventually(has_room)


def test_another_pool_is_refused(start: Start) -> None:
    source, destination = start(), start(block_size=8)
    with pytest.raises(FailedPrecondition) as caught:
        destination.run_import(destination.job(source, {0: [(1, 1)]}))
    assert (caught.value.reason, caught.value.field) == ("FINGERPRINT_MISMATCH", "peer")


def test_a_peer_that_is_not_there_is_told(start: Start) -> None:
    source, destination = two(start)
    job = destination.job(source, {0: [(1, 1)]})
    source.server.stop(0).wait()
    with pytest.raises(Unavailable) as caught:
        destination.run_import(job)
    assert source.target in caught.value.message


@pytest.mark.parametrize("path", PATHS)
def test_a_peer_cut_short_is_told(start: Start, path: int) -> None:
    if path == NIXL:
        pytest.skip("the peer's agent reads its mapping, which nobody can guard")
    source, destination = two(start)
    os.truncate(source.memory.path, 4096)
    report, _ = destination.run_import(destination.job(source, {0: [(32, 1)]}, paths=[path]))
    assert report.statuses == {0: bytes([FAILED])}
    (failure,) = report.failures
    assert "MAPPING_TRUNCATED" in failure.reason
    # Both go on.
    os.truncate(source.memory.path, source.memory.nbytes)
    report, _ = destination.run_import(destination.job(source, {0: [(32, 1)]}, paths=[path]))
    assert report.statuses == {0: bytes([IMPORTED])}


# --- parts --------------------------------------------------------------------------------

PARTS = {**LARGE, "import_part_blocks": 8}
FIVE = bytes([IMPORTED]) * 5


@pytest.mark.parametrize("path", PATHS)
def test_an_import_in_parts(kept: Start, path: int) -> None:
    source, destination = kept(1, **LARGE, layout="block"), kept(3, **PARTS)
    source.fill(1)
    destination.fill(2)
    asked: list[tuple[int, list[int]]] = []

    def take(ready: Any) -> Any:
        first, is_ready = ready[0]
        asked.append((first, list(is_ready)))
        return {0: [first + number + 3 for number in range(len(is_ready))]}

    blocks = {0: [(block_id, 0) for block_id in range(1, 28)]}
    job = destination.job(source, blocks, contents=True, paths=[path], take=take)
    report, progress = destination.run_import(job)
    assert source.num_asked == [6, 7, 7, 7]
    assert [(first, len(is_ready)) for first, is_ready in asked] == [
        (0, 6),
        (6, 7),
        (13, 7),
        (20, 7),
    ]
    assert (list(report.failures), report.statuses) == ([], {0: bytes([IMPORTED]) * 27})
    assert (report.num_blocks, report.num_bytes) == (27, 27 * 24 * 8192)
    assert report.names[0] == job.groups[0].hashes
    assert_imported(source, destination, {0: [(i, i + 2) for i in range(1, 28)]})
    assert source.transfers == set()
    told = [item.num_blocks for item in progress]
    assert told == sorted(told)


def test_groups_come_side_by_side(kept: Start) -> None:
    options = {"model": "gemma-like", "import_part_blocks": 3}
    source, destination = kept(1, **options), kept(2, **options)
    source.fill(1)
    blocks = {0: pairs(range(1, 7), 3), 1: pairs([7, 8], 5), 2: pairs([20], 0)}
    report, _ = destination.run_import(destination.job(source, blocks))
    assert source.num_asked == [2, 3, 4]
    assert report.statuses == {0: bytes([IMPORTED]) * 6, 1: bytes([IMPORTED]) * 2, 2: FIVE[:1]}
    assert_imported(source, destination, blocks)


def of_parts(kept: Start) -> tuple[MovingNode, MovingNode, Any]:
    """An import of ten blocks in two parts."""
    options = {**LARGE, "import_part_blocks": 5}
    source, destination = kept(1, **LARGE, layout="block"), kept(4, **options)
    return source, destination, destination.job(source, {0: pairs(range(1, 11), 1)}, contents=True)


def test_what_the_peer_evicts_between_parts_is_missing(kept: Start) -> None:
    source, destination, job = of_parts(kept)

    def evict(number: int, _: Any) -> None:
        # The first part's bytes are kept for it, the second's are not needed before it is open.
        source.hidden.update(job.groups[0].hashes[6:8] if number == 2 else ())

    source.on_open = evict
    report, _ = destination.run_import(job)
    assert report.statuses == {0: FIVE + bytes([IMPORTED, MISSING, MISSING, IMPORTED, IMPORTED])}
    assert not report.failures
    assert report.names[0] == [*job.groups[0].hashes[:6], *job.groups[0].hashes[8:]]


def test_a_later_part_that_is_refused_leaves_the_others(kept: Start) -> None:
    source, destination, job = of_parts(kept)

    def refuse(number: int, context: Any) -> None:
        if number == 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "going away")

    source.on_open = refuse
    report, _ = destination.run_import(job)
    assert report.statuses == {0: FIVE + bytes([FAILED]) * 5}
    assert (report.num_blocks, len(report.names[0])) == (5, 5)
    (failure,) = report.failures
    assert "going away" in failure.reason
    assert source.transfers == set()


def test_a_part_whose_lease_ran_out_is_lost_alone(kept: Start) -> None:
    source, destination, job = of_parts(kept)
    closed: list[str] = []

    def lose_the_first() -> None:
        closed.append("")
        if len(closed) == 1:
            source.transfers.discard(source.opened[0])

    source.on_close = lose_the_first
    report, _ = destination.run_import(job)
    assert report.statuses == {0: bytes([FAILED]) * 5 + FIVE}
    assert (report.num_blocks, len(report.names[0])) == (5, 5)
    assert len(report.failures) == 1


@pytest.mark.parametrize("how", ["done", "cancelled"])
def test_the_next_part_is_open_and_kept_while_one_is_copied(kept: Start, how: str) -> None:
    source = kept(1, **LARGE, layout="block")
    destination = kept(5, **LARGE, import_bandwidth_bytes=2 << 20, import_part_blocks=16)
    source.lease_ttl_seconds = 3.0
    num_kept: list[int] = []
    source.on_open = lambda number, _: num_kept.append(len(source.transfers))
    job = destination.job(source, {0: pairs(range(1, 33), 1)}, paths=[GRPC])
    running = destination.begin_import(job)
    eventually(lambda: len(source.opened) == 2)
    assert num_kept == [0, 1]
    if how == "cancelled":
        running.cancel()
        eventually(lambda: running.seconds > 0)
    else:
        report, _ = running.result()
        assert report.statuses == {0: bytes([IMPORTED]) * 32}
        assert source.num_renewals >= 2
    eventually(lambda: not source.transfers)
    assert source.num_asked == [16, 16]


def test_no_part_is_asked_for_that_nobody_wants(kept: Start) -> None:
    source, destination, job = of_parts(kept)
    wanted = iter([{0: [2, 3, 4, 5, 6]}, None])
    report, _ = destination.run_import(replace(job, take=lambda _: next(wanted)))
    assert report.statuses[0][:5] == FIVE and report.num_blocks == 5
    assert IMPORTED not in report.statuses[0][5:] and not report.failures
    assert source.num_asked == [5, 5]
    eventually(lambda: not source.transfers)


def test_a_path_that_failed_is_not_tried_for_the_next_part(
    kept: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination, job = of_parts(kept)
    monkeypatch.setattr(source, "shown_path", source.memory.path + ".elsewhere")
    report, _ = destination.run_import(replace(job, paths=[MAPPING, GRPC]))
    assert report.statuses == {0: FIVE + FIVE}
    (failure,) = report.failures
    assert (failure.path, report.path) == (MAPPING, GRPC)


# --- ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_hung_peer_ends_by_the_deadline(start: Start, path: int) -> None:
    source, destination = two(start, **LARGE)
    blocks = {0: pairs(range(1, 33), 0)}
    kill(source.serving_pid, signal.SIGSTOP)
    try:
        job = destination.job(source, blocks, paths=[path], deadline_seconds=2.0)
        running = destination.begin_import(job)
        report, _ = running.result()
        assert running.seconds < 20.0  # it would hang for ever
        assert report.statuses == {0: bytes([FAILED]) * 32}
        assert report.failures
    finally:
        kill(source.serving_pid, signal.SIGCONT)
    # No byte comes late, and the next import works.
    destination.fill(3)
    before = [destination.read(0, block_id) for block_id in range(1, 33)]
    time.sleep(0.3)
    assert [destination.read(0, block_id) for block_id in range(1, 33)] == before
    report, _ = destination.run_import(destination.job(source, blocks, paths=[path]))
    assert report.statuses == {0: bytes([IMPORTED]) * 32}


def test_a_killed_importer_fails_its_imports_and_is_replaced(start: Start) -> None:
    # All of it would take 12 s.
    source, destination = start(**LARGE), start(**LARGE, import_bandwidth_bytes=1 << 19)
    job = destination.job(source, {0: pairs(range(1, 33), 0)}, paths=[GRPC])
    running = destination.begin_import(job)
    assert running.begun.wait(60)
    kill(destination.importing_pid, signal.SIGKILL)
    report, _ = running.result()
    assert report.statuses == {0: bytes([FAILED]) * 32}
    job = destination.job(source, {0: pairs(range(1, 5), 0)}, paths=[GRPC])
    report, _ = destination.run_import(job)
    assert report.statuses == {0: bytes([IMPORTED]) * 4}


def test_what_came_before_the_importer_was_killed_counts(start: Start) -> None:
    source, destination = start(**LARGE), start(**SLOW, import_part_blocks=8)
    blocks = {0: pairs(range(1, 33), 0)}
    job = destination.job(source, blocks, paths=[GRPC], contents=True)
    running = destination.begin_import(job)
    eventually(lambda: len(running.parts) == 2)
    kill(destination.importing_pid, signal.SIGKILL)
    report, _ = running.result()
    assert report.statuses == {0: bytes([IMPORTED] * 16 + [FAILED] * 16)}
    assert report.names[0] == job.groups[0].hashes[:16]
    assert (report.num_blocks, report.path) == (16, GRPC)
    (failure,) = report.failures
    assert (failure.path, failure.reason) == (GRPC, "the process that copied was ended")
    assert_imported(source, destination, {0: blocks[0][:16]})


def test_an_import_that_another_took_down_goes_on_where_it_was(start: Start) -> None:
    """What its first process had brought is not written again: it may be in use by now."""
    source, destination = start(**LARGE), start(**SLOW, import_part_blocks=8)
    moved = pairs(range(1, 33), 0)
    told: list[tuple[int, list[int]]] = []

    def take(ready: Any) -> dict[int, list[int]]:
        first, is_ready = ready[0]
        told.append((first, list(is_ready)))
        return {0: [ours for _, ours in moved[first : first + len(is_ready)]]}

    job = destination.job(source, {0: moved}, paths=[GRPC], contents=True, take=take)
    running = destination.begin_import(job)
    eventually(lambda: len(running.parts) == 1)
    process = destination.handle._imports._process
    assert process is not None
    destination.loop.run(process.kill(0))
    report, progress = running.result()
    assert report.statuses == {0: bytes([IMPORTED]) * 32} and not report.failures
    assert report.names[0] == job.groups[0].hashes
    assert report.num_blocks == 32
    firsts = [first for first, _ in told]
    assert firsts[0] == 0 and 0 not in firsts[1:] and firsts[-1] == 24
    counts = [each.num_blocks for each in progress]
    assert counts == sorted(counts)
    assert_imported(source, destination, {0: moved})


def test_an_import_that_another_took_down_is_run_again(start: Start) -> None:
    source, hung, destination = start(**LARGE), start(**LARGE), start(**SLOW)
    blocks = {0: pairs(range(1, 17), 0)}
    other = {0: pairs(range(17, 33), 0)}
    running = destination.begin_import(destination.job(source, blocks, paths=[GRPC]))
    assert running.begun.wait(60)
    process = destination.handle._imports._process
    assert process is not None
    number = max(process.inboxes) + 1
    destination.loop.run(process.kill(number))  # as for an import that hangs
    report, _ = running.result()
    assert report.statuses == {0: bytes([IMPORTED]) * 16}
    source.fill(1)
    report, _ = destination.run_import(destination.job(hung, other, paths=[GRPC]))
    assert report.statuses == {0: bytes([IMPORTED]) * 16}


@pytest.mark.parametrize("path", PATHS)
def test_a_cancelled_import_writes_nothing_any_more(kept: Start, path: int) -> None:
    source, destination = kept(1, **LARGE, layout="block"), kept(2, **SLOW)
    source.fill(1)
    blocks = {0: pairs(range(1, 33), 0)}
    # Fills the bucket, so that the next is slow from the start.
    destination.run_import(destination.job(source, blocks, paths=[GRPC]))
    pid = destination.importing_pid
    opened = len(source.opened)
    running = destination.begin_import(destination.job(source, blocks, paths=[path]))
    eventually(lambda: len(source.opened) > opened)
    running.cancel()
    eventually(lambda: running.seconds > 0)
    destination.fill(3)
    before = [destination.read(0, block_id) for block_id in range(1, 33)]
    time.sleep(0.5)
    assert [destination.read(0, block_id) for block_id in range(1, 33)] == before
    eventually(lambda: not source.transfers)
    assert destination.importing_pid == pid  # it ended by itself


def test_an_importer_that_hears_nothing_is_killed_when_its_import_is_cancelled(
    start: Start,
) -> None:
    source, destination = start(**LARGE), start(**SLOW)
    running = destination.begin_import(
        destination.job(source, {0: pairs(range(1, 33), 0)}, paths=[GRPC])
    )
    assert running.begun.wait(60)
    pid = destination.importing_pid
    kill(pid, signal.SIGSTOP)
    running.cancel()
    eventually(lambda: running.seconds > 0)
    with pytest.raises(ProcessLookupError):
        kill(pid, 0)
