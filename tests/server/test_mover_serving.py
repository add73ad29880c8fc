"""The process that serves PullBlocks: right bytes, bounds, and an end of its own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash

from kvclient.errors import InternalError
from kvclient.frame import parse
from kvcore.memory import Span
from kvdepot.v1 import transfer_pb2 as pb
from kvserver.config import ConfigError
from kvserver.mover import child
from kvserver.mover.bucket import Bucket
from kvserver.mover.frame import frame
from kvserver.mover.mapping import copy_and_sum, copy_rows
from kvserver.mover.pages import pieces_of
from moving import MovingNode, kill, moving
from serving import eventually, refused

Start = Callable[..., MovingNode]

METHOD = "/kvdepot.v1.KVTransferService/PullBlocks"
LARGE = {"model": "qwen2-0.5b"}
BLOCK_BYTES = 24 * 8192
IDS = [3, 0, 7, 8, 31]
READY = [3, 7, 8, 31]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts nodes; none offers NIXL."""
    with moving(tmp_path) as starter:
        yield lambda **options: starter(**({"nixl_devices": "none"} | options))


class Wire:
    """A connection to a node's data address."""

    def __init__(self, node: MovingNode) -> None:
        self.address = "127.0.0.1" + node.handle.reach().data_address
        self.channel = grpc.insecure_channel(
            self.address,
            options=[
                ("grpc.max_receive_message_length", -1),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 100),
            ],
        )

    def call(self, raw: bytes) -> Any:
        """PullBlocks, undecoded."""
        return self.channel.unary_stream(METHOD)(raw, timeout=60)

    def pull(self, **request: Any) -> list[Any]:
        """All messages of one call."""
        raw = pb.PullBlocksRequest(**({"transfer_id": "t"} | request)).SerializeToString()
        return [pb.PullBlocksResponse.FromString(message) for message in self.call(raw)]


@pytest.fixture
def opened(start: Start) -> tuple[MovingNode, Wire]:
    """A node with a transfer of IDS, in layer layout."""
    node = start(**LARGE, layout="layer")
    node.fill(1)
    node.loop.call(lambda: node.handle.open_transfer("t", {0: IDS}))
    return node, Wire(node)


def test_ready_blocks_come_in_order(opened: tuple[MovingNode, Wire]) -> None:
    node, wire = opened
    expected = [node.read(0, block_id) for block_id in READY]
    (message,) = wire.pull()
    assert (message.first, message.num_blocks) == (0, 4)
    assert message.data == b"".join(expected) and not message.checksums
    sums = [xxhash.xxh3_64_intdigest(block) for block in expected]
    (message,) = wire.pull(checksums=True)
    assert list(message.checksums) == sums
    (message,) = wire.pull(checksums_only=True)
    assert (message.data, message.num_blocks, list(message.checksums)) == (b"", 4, sums)
    (message,) = wire.pull(positions=struct.pack("<3I", 4, 0, 0))
    assert message.data == expected[3] + expected[0] * 2
    eventually(lambda: node.handle.pulled_bytes == (4 + 4 + 3) * BLOCK_BYTES)


def test_messages_are_cut_at_one_mebibyte(start: Start) -> None:
    node = start(**LARGE)
    node.fill(1)
    node.loop.call(lambda: node.handle.open_transfer("t", {0: list(range(1, 33))}))
    messages = Wire(node).pull(checksums=True)
    assert [message.first for message in messages] == [0, 5, 10, 15, 20, 25, 30]
    assert [message.num_blocks for message in messages] == [5] * 6 + [2]
    data = b"".join(message.data for message in messages)
    assert data == b"".join(node.read(0, block_id) for block_id in range(1, 33))


@pytest.mark.parametrize(
    ("request_fields", "code", "field"),
    [
        pytest.param({"transfer_id": "x"}, "NOT_FOUND", "transfer_id", id="unknown"),
        pytest.param({"group": 1}, "INVALID_ARGUMENT", "group", id="no such group"),
        pytest.param({"positions": b"123"}, "INVALID_ARGUMENT", "positions", id="odd bytes"),
        pytest.param(
            {"positions": struct.pack("<I", 5)}, "INVALID_ARGUMENT", "positions", id="behind"
        ),
        pytest.param(
            {"positions": struct.pack("<I", 1)}, "INVALID_ARGUMENT", "positions", id="not ready"
        ),
        pytest.param({"positions": bytes(24)}, "INVALID_ARGUMENT", "positions", id="too many"),
    ],
)
def test_refused(
    opened: tuple[MovingNode, Wire], request_fields: dict[str, Any], code: str, field: str
) -> None:
    _, wire = opened
    detail = refused(lambda: wire.pull(**request_fields), grpc.StatusCode[code])
    assert detail.field == field


def test_the_nodes_word_of_a_transfer_may_come_after_the_peer(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start(**LARGE)
    node.fill(1)
    with monkeypatch.context() as patched:
        patched.setattr(node.handle, "_tell", lambda **message: None)
        node.loop.call(lambda: node.handle.open_transfer("t", {0: IDS}))
    wire = Wire(node)
    (message,) = wire.pull()
    assert message.num_blocks == len(READY)
    node.loop.call(lambda: node.handle.close_transfer("t"))

    def is_closed() -> bool:
        """The node's word of that may come later still."""
        try:
            return not wire.pull()
        except grpc.RpcError:
            return True

    eventually(is_closed)
    detail = refused(wire.pull, grpc.StatusCode.NOT_FOUND)
    assert detail.reason == "UNKNOWN_TRANSFER"


def test_malformed_bytes_are_refused(opened: tuple[MovingNode, Wire]) -> None:
    _, wire = opened
    detail = refused(lambda: list(wire.call(b"\xff\xff")), grpc.StatusCode.INVALID_ARGUMENT)
    assert detail.reason == "MALFORMED_MESSAGE"


def test_a_closed_transfer_ends_its_pulls(start: Start) -> None:
    node = start(**LARGE, pull_bandwidth_bytes=1 << 20)
    node.loop.call(lambda: node.handle.open_transfer("t", {0: list(range(1, 33))}))
    wire = Wire(node)
    call = wire.call(pb.PullBlocksRequest(transfer_id="t").SerializeToString())
    next(call)
    node.loop.call(lambda: node.handle.close_transfer("t"))
    assert refused(lambda: list(call), grpc.StatusCode.NOT_FOUND).reason == "UNKNOWN_TRANSFER"
    refused(lambda: wire.pull(), grpc.StatusCode.NOT_FOUND)


def pull_and_read_nothing(node: MovingNode) -> tuple[Wire, Any]:
    """A pull of more than anybody buffers."""
    node.loop.call(lambda: node.handle.open_transfer("t", {0: [1] * 2000}))
    wire = Wire(node)
    slow = wire.call(pb.PullBlocksRequest(transfer_id="t").SerializeToString())
    next(slow)
    return wire, slow


FEW = struct.pack("<I", 0)


def test_pulls_are_few(start: Start) -> None:
    wire, slow = pull_and_read_nothing(start(**LARGE, max_pulls=1, pull_stall_seconds=600.0))
    detail = refused(lambda: wire.pull(positions=FEW), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert detail.reason == "TOO_MANY_PULLS" and detail.retryable
    slow.cancel()


def test_pulls_that_are_cancelled_at_once_leave_room(start: Start) -> None:
    node = start(**LARGE, max_pulls=2)
    node.fill(1)
    node.loop.call(lambda: node.handle.open_transfer("t", {0: IDS}))
    wire = Wire(node)
    raw = pb.PullBlocksRequest(transfer_id="t").SerializeToString()
    for number in range(100):
        call = wire.call(raw)
        time.sleep(0.0001 * (number % 20))
        call.cancel()

    def is_served() -> bool:
        try:
            return bool(wire.pull(positions=FEW))
        except grpc.RpcError:
            return False

    eventually(is_served)


def test_a_peer_that_reads_nothing_is_cut_off(start: Start) -> None:
    wire, slow = pull_and_read_nothing(start(**LARGE, max_pulls=1, pull_stall_seconds=0.5))

    def is_served() -> bool:
        try:
            return len(wire.pull(positions=FEW)) == 1
        except grpc.RpcError:
            return False

    # Its place is another's then, though it has not heard that yet.
    eventually(is_served)
    assert refused(lambda: list(slow), grpc.StatusCode.RESOURCE_EXHAUSTED).reason == "STALLED"


def test_bytes_a_second_are_limited(start: Start) -> None:
    node = start(**LARGE, pull_bandwidth_bytes=8 << 20)
    node.loop.call(lambda: node.handle.open_transfer("t", {0: list(range(1, 33))}))
    began = time.monotonic()
    Wire(node).pull()
    # 6 MiB, of which the last is not waited for.
    assert time.monotonic() - began > 0.5


def test_a_file_cut_short_is_told_and_the_process_goes_on(opened: tuple[MovingNode, Wire]) -> None:
    node, wire = opened
    os.truncate(node.memory.path, 100)
    detail = refused(lambda: wire.pull(), grpc.StatusCode.DATA_LOSS)
    assert detail.reason == "MAPPING_TRUNCATED"
    os.truncate(node.memory.path, node.memory.nbytes)
    assert len(wire.pull()) == 1


def test_a_killed_process_is_replaced(start: Start) -> None:
    node = start(**LARGE, pull_bandwidth_bytes=1 << 20)
    node.loop.call(lambda: node.handle.open_transfer("t", {0: list(range(1, 33))}))
    node.loop.call(lambda: node.handle.open_transfer("gone", {0: [1]}))
    wire = Wire(node)
    call = wire.call(pb.PullBlocksRequest(transfer_id="t").SerializeToString())
    next(call)
    pid = node.serving_pid
    kill(pid, signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    node.loop.call(lambda: node.handle.close_transfer("gone"))
    eventually(lambda: node.handle._serving is not None and node.serving_pid != pid)
    assert "127.0.0.1" + node.handle.reach().data_address == wire.address
    # It knows the transfers that are open, and no other.
    again = Wire(node)
    assert len(again.pull(positions=struct.pack("<I", 5))) == 1
    refused(lambda: again.pull(transfer_id="gone"), grpc.StatusCode.NOT_FOUND)


def test_a_process_that_reads_nothing_is_replaced(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is queued for it is bounded; the next one knows what is open, and only that."""
    monkeypatch.setattr(child, "QUEUED_BYTES_MAX", 1 << 20)
    node = start(**LARGE)
    node.fill(1)
    handle, pid = node.handle, node.serving_pid
    serving = handle._serving
    assert serving is not None
    kill(pid, signal.SIGSTOP)
    ids = {0: list(range(1, 33)) * 1000}
    for number in range(400):
        node.loop.call(lambda number=number: handle.open_transfer(f"t{number}", ids))
        if number % 2:
            node.loop.call(lambda number=number: handle.close_transfer(f"t{number}"))
        queued = serving._writer.transport.get_write_buffer_size()
        assert queued < (1 << 20) + 200_000
    eventually(lambda: handle._serving not in (None, serving))
    wire = Wire(node)
    for number in (0, 200, 398):
        (message,) = wire.pull(transfer_id=f"t{number}", positions=struct.pack("<I", 2))
        assert message.data == node.read(0, 3)
    refused(lambda: wire.pull(transfer_id="t399"), grpc.StatusCode.NOT_FOUND)


def test_a_process_that_says_nothing_is_replaced(start: Start) -> None:
    """Nobody pulls and nothing is opened: it is heartbeats that tell the one from the other."""
    node = start(pull_heartbeat_seconds=0.2)
    handle, pid = node.handle, node.serving_pid
    eventually(lambda: handle.num_heard > 20)
    assert node.serving_pid == pid
    node.loop.call(lambda: handle.open_transfer("t", {0: [1]}))
    kill(pid, signal.SIGSTOP)
    eventually(lambda: handle._serving is not None and node.serving_pid != pid)
    assert not Path(f"/proc/{pid}").exists()
    assert len(Wire(node).pull()) == 1


def test_a_process_that_does_not_finish_its_start_is_killed(start: Start) -> None:
    """It has said that it is ready, and then hangs in loading NIXL."""
    node = start()
    handle, killed = node.handle, Event()
    handle._config = replace(handle._config, pull_start_seconds=0.05)

    class Hung:
        pid = 0
        kill = staticmethod(killed.set)

    async def watch() -> None:
        await handle._watch(Hung(), asyncio.Event())

    node.loop.run(watch())
    assert killed.is_set()


def test_an_error_that_nobody_expected_does_not_end_the_service(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the old process, nor while another is started."""
    node = start(**LARGE)
    handle, first = node.handle, node.handle._serving
    assert first is not None
    node.loop.call(lambda: handle.open_transfer("t", {0: IDS}))
    spawn, failures = handle._spawn, []

    async def end() -> None:
        failures.append("end")
        first._writer.close()  # as the real one does before it waits
        raise subprocess.TimeoutExpired("kvdepot", 10)

    async def spawn_at_last(**options: Any) -> Any:
        if len(failures) < 3:
            failures.append("spawn")
            raise RuntimeError("nobody expected this")
        return await spawn(**options)

    monkeypatch.setattr(first, "end", end)
    monkeypatch.setattr(handle, "_spawn", spawn_at_last)
    kill(first.pid, signal.SIGKILL)
    eventually(lambda: handle._serving not in (None, first))
    assert failures == ["end", "spawn", "spawn"]
    assert Wire(node).pull()[0].num_blocks == len(READY)
    first._process.wait(60)


def test_it_ends_with_its_node(start: Start) -> None:
    node = start()
    pid = node.serving_pid
    # As if the node's process had died: its end of the channel is closed.
    node.loop.call(lambda: node.handle._supervising.cancel())
    node.loop.call(lambda: node.handle._serving._writer.transport.abort())
    serving = node.handle._serving
    assert serving is not None
    assert serving._process.wait(60) == 0
    assert serving.pid == pid


def test_a_data_address_that_is_taken_is_refused(start: Start, tmp_path: Path) -> None:
    node = start()
    other = MovingNode(tmp_path, data_listen="127.0.0.1" + node.handle.reach().data_address)
    try:
        with pytest.raises(ConfigError, match="--data-listen"):
            other.start()
    finally:
        other.stop()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, r":\d+", id="default"),
        pytest.param({"data_listen": "127.0.0.2:0"}, r"127\.0\.0\.2:\d+", id="another address"),
        pytest.param({"advertise_data_address": "node-7:900"}, "node-7:900", id="advertised"),
    ],
)
def test_the_address_that_peers_are_told(
    start: Start, options: dict[str, Any], expected: str
) -> None:
    assert re.fullmatch(expected, start(**options).handle.reach().data_address)


# --- parts --------------------------------------------------------------------------------


@pytest.mark.parametrize("checksums", [(), (1, 2**64 - 1)])
@pytest.mark.parametrize("data", [b"", b"abcd" * 100])
def test_the_frame_is_protobufs(data: bytes, checksums: tuple[int, ...]) -> None:
    view = memoryview(data)
    raw = frame(300, 2, [view[:10], view[10:]], checksums)
    message = pb.PullBlocksResponse.FromString(raw)
    assert message == pb.PullBlocksResponse(first=300, num_blocks=2, data=data, checksums=checksums)
    for written in (raw, message.SerializeToString()):
        read = parse(written)
        assert (read.first, read.num_blocks) == (300, 2)
        assert bytes(read.data) == data and tuple(read.checksums) == checksums
        assert read.block_bytes == len(data) // 2


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\x08", id="half a varint"),
        pytest.param(b"\x1a\x05abcd", id="half the data"),
        pytest.param(b"\x10\x02\x1a\x03abc", id="data of half a block"),
        pytest.param(b"\x1a\x03abc", id="data of no block"),
        pytest.param(b"\x0b", id="a kind that is gone"),
        pytest.param(b"\x08" + b"\xff" * 10, id="an endless varint"),
    ],
)
def test_a_frame_that_cannot_be_read(raw: bytes) -> None:
    with pytest.raises(InternalError, match=r"read|match"):
        parse(raw)


def test_pieces_keep_the_order_of_bytes() -> None:
    source = [Span(0, 100, 6), Span(1000, 10, 4)]
    destination = [Span(0, 50, 2), Span(500, 50, 8)]
    pieces = [
        (p.source.offset, p.destination.offset, p.source.nbytes)
        for p in pieces_of(source, destination)
    ]
    assert pieces == [(0, 0, 2), (2, 500, 4), (1000, 504, 4)]


def test_the_bucket_books_what_it_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    bucket = Bucket(1000)
    assert bucket.delay(1000) == 0
    # It may have saved a twentieth of a second.
    assert [bucket.delay(num_bytes) for num_bytes in (1000, 1)] == pytest.approx([0.95, 1.95])
    assert Bucket(0).delay(1 << 40) == 0


def test_what_goes_at_once_takes_no_long_time() -> None:
    bucket = Bucket(1000)
    assert [bucket.slice_of(num_bytes) for num_bytes in (100, 250, 1 << 20)] == [100, 250, 250]
    assert Bucket(1).slice_of(1 << 20) == 1
    assert Bucket(0).slice_of(1 << 20) == 1 << 20


# Long rows go one by one, or run by run; short ones by way of a buffer.
@pytest.mark.parametrize("row_words", [8, 4096])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    ("sources", "destinations"),
    [
        pytest.param([1, 2, 3, 9, 8, 4, 5], [5, 6, 7, 8, 9, 0, 1], id="runs"),
        pytest.param([3, 1, 2], [1, 2, 3], id="scattered"),
        pytest.param([4], [4], id="one"),
    ],
)
def test_rows_land_where_they_belong(
    row_words: int, strided: bool, sources: list[int], destinations: list[int]
) -> None:
    rng = np.random.default_rng(1)
    source, destination = rng.integers(0, 1 << 60, (2, 10, 2 * row_words))
    if strided:
        source, destination = source[:, row_words:], destination[:, :row_words]
    expected = destination.copy()
    expected[destinations] = source[sources]
    copy_rows(source, np.array(sources), destination, np.array(destinations))
    assert (destination == expected).all()


def test_what_was_copied_is_summed() -> None:
    source, destination = np.random.default_rng(1).integers(0, 1 << 60, (2, 8, 4096))
    expected = destination.copy()
    expected[[5, 0]] = source[[3, 1]]
    sums = copy_and_sum(source, np.array([3, 1]), destination, np.array([5, 0]))
    assert (destination == expected).all()
    assert sums == [xxhash.xxh3_64_intdigest(source[row].tobytes()) for row in (3, 1)]
