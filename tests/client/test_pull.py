"""Pulling blocks with either client: open, pull at the data address, close."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvclient.aio
from kvclient import Client
from kvclient import transfer as transfers
from kvclient.channel import data_target
from kvclient.errors import Cancelled, DataLoss, InternalError, KVDepotError, NotFound, Unavailable
from kvclient.values import BlockStatus, PulledBlock
from kvserver.mover.frame import frame
from moving import MovingNode, block_hash, kill, moving
from serving import eventually

Start = Callable[..., MovingNode]
Pull = Callable[..., list[PulledBlock]]

LARGE = {"model": "qwen2-0.5b", "layout": "layer", "nixl_devices": "none"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts nodes."""
    with moving(tmp_path) as starter:
        yield starter


def sync_pull(node: MovingNode, hashes: list[bytes], **options: Any) -> list[PulledBlock]:
    """All blocks of one pull."""
    with Client(node.target, timeout_s=20) as client:
        return list(client.pull_blocks(hashes, **options))


def aio_pull(node: MovingNode, hashes: list[bytes], **options: Any) -> list[PulledBlock]:
    """The same by the asyncio client, on the loop that the node uses as well."""

    async def pull() -> list[PulledBlock]:
        async with kvclient.aio.Client(node.target, timeout_s=20) as client:
            return [block async for block in client.pull_blocks(hashes, **options)]

    future = asyncio.run_coroutine_threadsafe(pull(), node.loop.loop)
    return future.result(60)


@pytest.fixture(params=["sync", "aio"])
def pull(request: pytest.FixtureRequest) -> Pull:
    """Either client's."""
    return {"sync": sync_pull, "aio": aio_pull}[request.param]


HASHES = [block_hash(0, number) for number in (1, 99, 3, 32, 5)]
STATUSES = [
    BlockStatus.READY,
    BlockStatus.MISSING,
    BlockStatus.READY,
    BlockStatus.READY,
    BlockStatus.PENDING,
]


# Held bytes above or below what is pulled: proven once, or after every message.
@pytest.mark.parametrize("held_bytes", [1, 64 << 20])
@pytest.mark.parametrize("checksums", [False, True])
def test_every_hash_is_answered_in_order(
    start: Start, pull: Pull, held_bytes: int, checksums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "HELD_BYTES_MAX", held_bytes)
    node = start(**LARGE)
    node.fill(1)
    node.pending.add(HASHES[4])
    blocks = pull(node, HASHES, checksums=checksums)
    assert [block.block_hash for block in blocks] == HASHES
    assert [block.status for block in blocks] == STATUSES
    data = [block.data for block in blocks]
    assert data == [node.read(0, 1), b"", node.read(0, 3), node.read(0, 32), b""]
    assert node.transfers == set()
    assert node.num_renewals == (held_bytes == 1)
    assert pull(node, []) == []
    assert pull(node, HASHES[1:2])[0].status is BlockStatus.MISSING


def test_bytes_of_a_lease_that_ran_out_are_not_given_out(start: Start, pull: Pull) -> None:
    node = start(**LARGE)
    node.on_close = node.transfers.clear
    with pytest.raises(NotFound):
        pull(node, HASHES)


def test_a_killed_process_is_unavailable(start: Start) -> None:
    node = start(**LARGE, pull_bandwidth_bytes=1 << 19)
    hashes = [block_hash(0, number) for number in range(1, 33)]
    caught: list[KVDepotError] = []

    def run() -> None:
        try:
            sync_pull(node, hashes)
        except KVDepotError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: bool(node.transfers))
    kill(node.serving_pid, signal.SIGKILL)
    thread.join(60)
    assert isinstance(caught[0], Unavailable)
    eventually(lambda: not node.transfers)
    eventually(lambda: node.handle._serving is not None)


def test_a_pull_that_is_closed_lets_go_of_its_blocks(start: Start) -> None:
    node = start(**LARGE, pull_bandwidth_bytes=1 << 19)
    hashes = [block_hash(0, number) for number in range(1, 33)]
    with Client(node.target, timeout_s=20) as client:
        stream = client.pull_blocks(hashes)
        caught: list[KVDepotError] = []

        def run() -> None:
            try:
                list(stream)
            except KVDepotError as error:
                caught.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        eventually(lambda: bool(node.transfers) and stream._pulling.call is not None)
        stream.close()
        thread.join(60)
        assert isinstance(caught[0], Cancelled)
        eventually(lambda: not node.transfers)


@pytest.mark.parametrize("kind", ["sync", "aio"])
def test_a_pull_that_is_let_go_of_lets_go_of_its_blocks(
    start: Start, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody closes it; its lease would run for another half minute."""
    monkeypatch.setattr(transfers, "HELD_BYTES_MAX", 1)
    node = start(**LARGE, pull_bandwidth_bytes=1 << 19)
    hashes = [block_hash(0, number) for number in range(1, 33)]
    gc.disable()  # it needs no collection
    try:
        if kind == "sync":
            with Client(node.target, timeout_s=20) as client:
                for _ in client.pull_blocks(hashes):
                    assert node.transfers
                    break
                eventually(lambda: not node.transfers, 20)
        else:

            async def abandon() -> None:
                async with kvclient.aio.Client(node.target, timeout_s=20) as client:
                    async for _ in client.pull_blocks(hashes):
                        assert node.transfers
                        break
                    while node.transfers:
                        await asyncio.sleep(0.01)

            asyncio.run_coroutine_threadsafe(abandon(), node.loop.loop).result(20)
    finally:
        gc.enable()


def test_transfers_by_hand(start: Start) -> None:
    node = start(**LARGE)
    with Client(node.target) as client:
        opened = client.open_transfer({0: HASHES[:2]}, lease_ttl_s=30, name="by hand")
        assert opened.statuses == {0: (BlockStatus.READY, BlockStatus.MISSING)}
        assert opened.block_ids == {0: (1, 0)}
        assert opened.reach.data_address.startswith(":")
        assert client.renew_transfer(opened.transfer_id) == 30
        client.close_transfer(opened.transfer_id)
        client.close_transfer(opened.transfer_id)  # answers the same again
        with pytest.raises(NotFound):
            client.renew_transfer(opened.transfer_id)
        with pytest.raises(NotFound):
            client.close_transfer("another")


@pytest.mark.parametrize(
    ("message", "error"),
    [
        pytest.param(frame(0, 1, [memoryview(b"x")], [1]), DataLoss, id="damaged"),
        pytest.param(frame(0, 1, [memoryview(b"x")], []), InternalError, id="no checksum"),
        pytest.param(frame(0, 2, [memoryview(b"xxx")], [1, 2]), InternalError, id="odd"),
        pytest.param(frame(1, 1, [memoryview(b"x")], [1]), InternalError, id="one left out"),
    ],
)
def test_what_comes_is_checked(message: bytes, error: type[KVDepotError]) -> None:
    pull = transfers.Pull([b"a", b"b"], 0, True, 0.0)
    ready = (BlockStatus.READY,) * 2
    reach = transfers.Reach("", ":1", b"")
    pull.request(transfers.Transfer("t", "e", 30, {0: ready}, {0: (1, 2)}, reach))
    with pytest.raises(error):
        pull.take(message)
    with pytest.raises(InternalError):
        list(pull.proven(last=True))  # the other block never came


@pytest.mark.parametrize(
    ("target", "address", "expected"),
    [
        ("10.0.0.1:50051", ":7", "10.0.0.1:7"),
        ("dns:///node:50051", ":7", "dns:///node:7"),
        ("[::1]:50051", ":7", "[::1]:7"),
        ("unix:/run/kvdepot", ":7", "127.0.0.1:7"),
        ("node:1", "other:7", "other:7"),
    ],
)
def test_where_the_bytes_are(target: str, address: str, expected: str) -> None:
    assert data_target(target, address) == expected
