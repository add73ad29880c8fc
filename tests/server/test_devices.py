"""Pools on devices, of which the CPU's tensors stand for those of a GPU."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import xxhash

from block_pages import block_pages
from kvclient.frame import parse
from kvcore.errors import InvalidArgument
from kvcore.memory import PoolMemory, layer_layouts
from kvdepot.v1 import transfer_pb2 as pb
from kvdepot.v1 import types_pb2
from kvserver import convert_pool
from kvserver.config import ServerConfig
from kvserver.mover import devices, mapping
from kvserver.mover.devices import PoolDevices
from kvserver.mover.importer import Importer
from kvserver.mover.job import Job
from kvserver.mover.pages import PoolFile
from kvserver.mover.serving import Serving
from kvserver.mover.store import Store
from moving import IMPORTED, MovingNode, block_hash, moving

torch = pytest.importorskip("torch")

NUM_BLOCKS = 33
MAPPING, GRPC = pb.TRANSFER_PATH_MAPPING, pb.TRANSFER_PATH_GRPC
IMPORTER = {
    "copy_threads": 2,
    "bandwidth_bytes": 0,
    "nixl_devices": "lo",
    "part_blocks": 8,
    "part_bytes": 1 << 20,
}
SERVING = {"pulls_max": 2, "stall_seconds": 5.0, "bandwidth_bytes": 0}
MODELS = ["tiny", "gemma-like", "mamba-hybrid"]


class Ranks:
    """A pool of so many ranks, the bytes of each in a file, which is read beside it."""

    def __init__(self, directory: Path, num_ranks: int = 1, seed: int = 1, **options: Any) -> None:
        config = ServerConfig(num_blocks=NUM_BLOCKS, **options).depot_config()
        self.memories = [
            PoolMemory(config, str(directory), name=uuid.uuid4().hex) for _ in range(num_ranks)
        ]
        chance = random.Random(seed)
        for memory in self.memories:
            with Path(memory.path).open("r+b") as file:
                file.write(chance.randbytes(memory.nbytes))
        self.pool = described(config)
        del self.pool.mappings[1:]
        for _ in range(num_ranks - 1):
            self.pool.mappings.add().CopyFrom(self.pool.mappings[0])
        self.tensors = [
            torch.from_file(memory.path, shared=True, size=memory.nbytes, dtype=torch.uint8)
            for memory in self.memories
        ]
        self.devices = PoolDevices(self.pool, self.tensors)

    def read(self, group: int, block_id: int) -> bytes:
        """Rank by rank."""
        return b"".join(block_pages(memory, block_id, group) for memory in self.memories)

    def close(self) -> None:
        """The files go."""
        for memory in self.memories:
            memory.close()


def described(config: Any) -> Any:
    """The pool, as one on a GPU is told to peers."""
    pool = convert_pool.pool_description(config, layer_layouts(config), [])
    pool.mappings.add(num_bytes=config.kv_cache.pool_bytes).cuda_ipc.device_uuid = "GPU"
    return pool


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    """Makes Ranks."""
    running: list[Ranks] = []

    def make(*arguments: Any, **options: Any) -> Ranks:
        running.append(Ranks(tmp_path, *arguments, **options))
        return running[-1]

    yield make
    for ranks in running:
        ranks.close()


def joined(pages: Sequence[memoryview]) -> bytes:
    return b"".join(pages)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("model", MODELS)
def test_blocks_are_read_and_written(made: Any, model: str, layout: str, num_ranks: int) -> None:
    ranks = made(num_ranks, model=model, layout=layout)
    for group in range(len(ranks.pool.groups)):
        ids = [3, 32, 1, 7]
        blocks = ranks.devices.blocks(group, ids)
        expected = [ranks.read(group, block_id) for block_id in ids]
        assert [joined(pages) for pages in blocks] == expected
        assert {len(block) for block in expected} == {ranks.devices.block_bytes[group]}
        sums = [xxhash.xxh3_64_intdigest(block) for block in expected]
        assert ranks.devices.checksums(group, ids) == sums
        # Elsewhere, in another order; what lies beside them stays.
        beside = [ranks.read(group, block_id) for block_id in (8, 12)]
        ranks.devices.write(group, [11, 10, 9, 13], [memoryview(block) for block in expected])
        assert [ranks.read(group, block_id) for block_id in (11, 10, 9, 13)] == expected
        assert [ranks.read(group, block_id) for block_id in (8, 12)] == beside


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("layouts", [("block", "block"), ("block", "layer"), ("layer", "block")])
def test_from_device_to_device(made: Any, layouts: tuple[str, str], num_ranks: int) -> None:
    source, here = (
        made(num_ranks, seed=seed, model="gemma-like", layout=layout)
        for seed, layout in enumerate(layouts)
    )
    here.devices.copy_from(source.devices, 1, [5, 31, 2], [1, 2, 3])
    for theirs, ours in ((5, 1), (31, 2), (2, 3)):
        assert here.read(1, ours) == source.read(1, theirs)
    # By way of no memory of the host, of which the pinned kind is dear.
    staging = [*source.devices._staging, *here.devices._staging]
    assert not any("here" in vars(area) for area in staging)


def test_more_than_is_staged_at_once(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "STAGING_BYTES", 1)  # a block at a time
    source, here = made(2, seed=1), made(2, seed=2)
    ids = list(range(1, 20))
    with pytest.raises(InvalidArgument):
        source.devices.blocks(0, ids)
    expected = [source.read(0, block_id) for block_id in ids]
    assert source.devices.checksums(0, ids) == [xxhash.xxh3_64_intdigest(b) for b in expected]
    here.devices.write(0, ids, [memoryview(block) for block in expected])
    assert [here.read(0, block_id) for block_id in ids] == expected
    here.devices.copy_from(source.devices, 0, [1, 2, 3], [30, 31, 32])
    assert [here.read(0, block_id) for block_id in (30, 31, 32)] == expected[:3]


class Reader:
    """A peer that reads what PullBlocks sends."""

    def __init__(self) -> None:
        self.frames: list[Any] = []

    async def send_initial_metadata(self, _: Any) -> None:
        """As grpc.aio's."""

    async def write(self, message: bytes) -> None:
        """As grpc.aio's."""
        self.frames.append(parse(message))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_pull_blocks(made: Any, num_ranks: int) -> None:
    ranks = made(num_ranks, model="qwen2-0.5b")  # several messages

    async def story() -> Reader:
        serving = Serving(SERVING, ranks.devices, lambda _: None)
        serving.tell({"op": "open", "id": "t", "blocks": {0: list(range(1, 17))}})
        reader = Reader()
        request: Any = pb.PullBlocksRequest(transfer_id="t", checksums=True)
        await serving.pull_blocks(request, reader)  # type: ignore[arg-type]
        return reader

    frames = asyncio.run(story()).frames
    assert len(frames) > 1
    expected = [ranks.read(0, block_id) for block_id in range(1, 17)]
    assert b"".join(bytes(frame.data) for frame in frames) == b"".join(expected)
    sums = [value for frame in frames for value in frame.checksums]
    assert sums == [xxhash.xxh3_64_intdigest(block) for block in expected]


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MovingNode]:
    """Another server, on the same host."""
    with moving(tmp_path_factory.mktemp("peer")) as start:
        node = start(num_blocks=NUM_BLOCKS, nixl_devices="none")
        node.fill(1)
        yield node


def run_import(
    ranks: Ranks, peer: MovingNode, store: Store | None = None, **message: Any
) -> dict[str, Any]:
    """Of the peer's first 20 blocks, in parts, into ``ranks`` or ``store``; its last word."""
    said: list[dict[str, Any]] = []
    job = {
        "job": 1,
        "peer": peer.target,
        "fingerprint": "",
        "groups": [
            {
                "group": 0,
                "hashes": [block_hash(0, block_id) for block_id in range(1, 21)],
                "ids": list(range(30, 10, -1)),
            }
        ],
        "paths": [],
        "checksums": True,
        "contents": False,
        "takes": False,
        "deadline": 20.0,
    }
    importer = Importer(IMPORTER, ranks.pool, store or ranks.devices)
    Job(importer, job | message, lambda **told: said.append(told)).run()
    assert said[-1]["op"] == "report", said[-1]
    statuses = b"".join(told["statuses"][0] for told in said if told["op"] == "part")
    return said[-1] | {"statuses": {0: statuses}}


def assert_all_came(ranks: Ranks, peer: MovingNode, report: dict[str, Any]) -> None:
    assert report["statuses"] == {0: bytes([IMPORTED]) * 20}
    for number in range(20):
        assert ranks.read(0, 30 - number) == peer.read(0, 1 + number)


@contextmanager
def on_a_gpu(peer: MovingNode) -> Iterator[Any]:
    """Where the peer says that its bytes are; gives the tensor that they are in."""
    shown = peer.pool.mappings[0]
    path = shown.file.path
    tensor = torch.from_file(path, shared=True, size=shown.num_bytes, dtype=torch.uint8)
    shown.cuda_ipc.device_uuid = "GPU"
    try:
        yield tensor
    finally:
        shown.file.path = path


@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("path", [MAPPING, GRPC])
def test_an_import_from_a_pool_in_a_file(
    made: Any, peer: MovingNode, path: int, layout: str
) -> None:
    peer.reset()
    ranks = made(seed=2, layout=layout)
    report = run_import(ranks, peer, paths=[path])
    assert (report["path"], report["failures"]) == (path, [])
    assert_all_came(ranks, peer, report)


def test_an_import_between_devices_of_one_host(
    made: Any, peer: MovingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.reset()
    ranks = made(seed=3)
    with on_a_gpu(peer) as tensor:
        monkeypatch.setattr(mapping, "open_devices", lambda _: [tensor])
        report = run_import(ranks, peer)
    assert (report["path"], report["failures"]) == (MAPPING, [])
    assert_all_came(ranks, peer, report)


@pytest.mark.parametrize("staging_bytes", [1, devices.STAGING_BYTES])
def test_an_import_into_a_pool_in_a_file(
    made: Any, peer: MovingNode, monkeypatch: pytest.MonkeyPatch, staging_bytes: int
) -> None:
    peer.reset()
    monkeypatch.setattr(devices, "STAGING_BYTES", staging_bytes)  # a block at a time
    ranks = made(seed=6, layout="layer")
    ours = types_pb2.PoolDescription.FromString(ranks.pool.SerializeToString())
    ours.mappings[0].file.path = ranks.memories[0].path
    with on_a_gpu(peer) as tensor:
        monkeypatch.setattr(mapping, "open_devices", lambda _: [tensor])
        report = run_import(ranks, peer, PoolFile(ours, writable=True))
    assert (report["path"], report["failures"]) == (MAPPING, [])
    assert_all_came(ranks, peer, report)


def test_pools_of_other_ranks_are_not_mapped(made: Any, peer: MovingNode) -> None:
    peer.reset()
    report = run_import(made(2, seed=7), peer, paths=[MAPPING])
    ((failed, reason),) = report["failures"]
    assert failed == MAPPING and "another number of ranks" in reason


@pytest.mark.parametrize(
    ("where", "num_copied"),
    [("open", 0), ("copy", 0), ("copy", 1)],
    ids=["opened", "first copy", "later copy"],
)
def test_what_torch_raises_leaves_the_stream(
    made: Any, peer: MovingNode, monkeypatch: pytest.MonkeyPatch, where: str, num_copied: int
) -> None:
    peer.reset()
    ranks = made(seed=5)
    copies: list[Any] = []

    def opened(_: Any) -> list[Any]:
        if where == "open":
            raise torch.OutOfMemoryError("CUDA out of memory\nand much more")
        return [tensor]

    def copy_from(*arguments: Any) -> None:
        if len(copies) == num_copied:
            raise torch.OutOfMemoryError("CUDA out of memory\nand much more")
        copies.append(arguments)
        PoolDevices.copy_from(ranks.devices, *arguments)

    monkeypatch.setattr(mapping, "open_devices", opened)
    monkeypatch.setattr(ranks.devices, "copy_from", copy_from)
    with on_a_gpu(peer) as tensor:
        report = run_import(ranks, peer)
    ((failed, reason),) = report["failures"]
    assert (failed, report["path"]) == (MAPPING, GRPC)
    assert reason == "the device: OutOfMemoryError: CUDA out of memory"
    assert_all_came(ranks, peer, report)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_devices_that_are_not_seen_here_leave_the_stream(made: Any, peer: MovingNode) -> None:
    peer.reset()
    ranks = made(seed=4)
    with on_a_gpu(peer):
        report = run_import(ranks, peer)
    ((failed, reason),) = report["failures"]
    assert (failed, report["path"]) == (MAPPING, GRPC)
    assert reason.startswith("NO_CUDA")
    assert report["statuses"] == {0: bytes([IMPORTED]) * 20}
