"""NIXL over pools of several regions: what is registered and read, and how peers are kept.

Memory of a GPU is a fake's, which records what it is told; of the CPU, NIXL's own agents read it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcore.memory import Span
from kvdepot.v1 import transfer_pb2 as pb
from kvserver.mover import nixl, reading
from kvserver.mover.copying import PathFailed
from kvserver.mover.devices import PoolDevices
from kvserver.mover.nixl import ReadingAgent, Region, ServingAgent

torch = pytest.importorskip("torch")

NBYTES = 8 * 96


class FakeAgent:
    """Every read is done at once, unless ``state`` says otherwise."""

    made: list[FakeAgent]

    def __init__(self, name: str, _: Any) -> None:
        self.name = name
        self.registered: list[tuple[str, Any]] = []
        self.peers: list[str] = []
        self.removed: list[str] = []
        self.lists: list[tuple[str, list[list[int]], str]] = []
        # Of lists and reads that were not released, by number; and which call is to fail.
        self.handles: set[int] = set()
        self.num_handles = 0
        self.fails_at = ""
        self.state = "DONE"
        self.made.append(self)

    def create_backend(self, backend: str) -> None:
        assert backend == "UCX"

    def register_memory(self, rows: list[Any], kind: str) -> None:
        if kind == "VRAM" and self.state == "NO CUDA":
            raise RuntimeError("no such memory")
        self.registered.append((kind, *rows))

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.peers.append(metadata.decode())
        return b"peer " + metadata

    def remove_remote_agent(self, name: str) -> None:
        self.removed.append(name)

    def _handle(self, call: str) -> Any:
        if self.fails_at == call:
            raise RuntimeError("backend error")
        self.num_handles += 1
        self.handles.add(number := self.num_handles)
        return SimpleNamespace(release=lambda: self.handles.remove(number))

    def prep_xfer_dlist(self, name: str, rows: Any, kind: str) -> Any:
        self.lists.append((name, rows.tolist(), kind))
        return self._handle(f"list {len(self.lists)}")

    def make_prepped_xfer(self, verb: str, _: Any, ours: Any, __: Any, theirs: Any) -> Any:
        assert verb == "READ" and list(ours) == list(theirs)
        return self._handle("read")

    def transfer(self, _: Any) -> str:
        if self.fails_at == "transfer":
            raise RuntimeError("backend error")
        return "PROC"

    def check_xfer_state(self, _: Any) -> str:
        return self.state


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeAgent]:
    """In place of NIXL."""
    package: Any = ModuleType("nixl_cu12")
    bindings: Any = ModuleType("nixl_cu12._bindings")
    package._bindings = bindings
    package.nixl_agent_config = lambda **options: options
    package.nixl_agent = FakeAgent
    bindings.nixlAgentConfig = lambda *_: SimpleNamespace()
    bindings.nixlAgent = lambda name, config: (name, config)
    monkeypatch.setitem(sys.modules, "nixl_cu12", package)
    monkeypatch.setitem(sys.modules, "nixl_cu12._bindings", bindings)
    for name in ("UCX_NET_DEVICES", "UCX_TLS", "UCX_LOG_LEVEL", "NIXL_LOG_LEVEL"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(FakeAgent, "made", [], raising=False)
    return FakeAgent


def pool_of(num_ranks: int) -> Any:
    """Eight blocks of two spans, 64 bytes that lie together and 32 that do so elsewhere."""
    mappings = [SimpleNamespace(num_bytes=NBYTES)] * num_ranks
    return SimpleNamespace(num_blocks=8, mappings=mappings, groups=[None], layers=[])


SPANS = [Span(0, 64, 64), Span(512, 32, 32)]


def store_of(tensors: Sequence[Any]) -> PoolDevices:
    """Of ``pool_of`` as many ranks."""
    store = PoolDevices.__new__(PoolDevices)
    store.tensors = tensors
    return store


def on_gpu(device: int, address: int) -> Any:
    """What is asked of a tensor that lies there."""
    return SimpleNamespace(
        device=SimpleNamespace(type="cuda", index=device),
        data_ptr=lambda: address,
        numel=lambda: NBYTES,
    )


class Task:
    """An import's part, of blocks 1, 2 and 5 into 6, 7 and 3."""

    def __init__(self, reach: dict[str, Any] | pb.Reach) -> None:
        if isinstance(reach, dict):
            reach = pb.Reach(
                nixl_agent=reach["agent"],
                nixl_regions=[
                    pb.NixlRegion(kind=kind, device=device, address=address, nbytes=nbytes)
                    for kind, device, address, nbytes in reach["regions"]
                ],
            )
        self.reach = reach
        self.peer_pool = pool_of(len(reach.nixl_regions))
        self.store = SimpleNamespace(check=lambda: None)
        left = np.arange(3)
        self.copies = [
            SimpleNamespace(
                source=SPANS,
                destination=SPANS,
                source_ids=np.array([1, 2, 5]),
                destination_ids=np.array([6, 7, 3]),
                left=lambda: left,
            )
        ]
        self.num_arrived = 0

    def check(self, num_bytes: int = 0) -> None:
        """As Task's."""

    def sums(self, copy: Any) -> None:
        """As Task's."""

    def batches(self, copy: Any, num_bytes: int) -> Iterator[Any]:
        """As Task's."""
        yield copy.left()

    def arrived(self, copy: Any, batch: Any, sums: Any) -> None:
        """As Task's."""
        self.num_arrived += len(batch)


def run(task: Task, agent: ReadingAgent) -> None:
    reading.run(task, agent)  # type: ignore[arg-type]


def test_memory_of_devices_is_registered_and_read_as_such(fake: type[FakeAgent]) -> None:
    serving = ServingAgent(store_of([on_gpu(0, 1 << 20), on_gpu(3, 2 << 20)]), "mlx5_0")
    assert fake.made[0].registered == [
        ("VRAM", (1 << 20, NBYTES, 0, "")),
        ("VRAM", (2 << 20, NBYTES, 3, "")),
    ]
    reach = serving.reach()
    assert reach is not None
    assert reach["regions"] == [["VRAM", 0, 1 << 20, NBYTES], ["VRAM", 3, 2 << 20, NBYTES]]
    agent = ReadingAgent(store_of([on_gpu(1, 3 << 20), on_gpu(2, 4 << 20)]), "mlx5_0")
    task = Task(reach)
    run(task, agent)
    assert task.num_arrived == 3
    ours, theirs = fake.made[1].lists
    assert (ours[0], ours[2], theirs[0], theirs[2]) == (
        *("NIXL_INIT_AGENT", "VRAM"),
        *("peer metadata", "VRAM"),
    )
    # Rank by rank, of each the long spans, then the short ones.
    for rows, blocks, ranks in (
        (ours[1], (6, 7, 3), ((3 << 20, 1), (4 << 20, 2))),
        (theirs[1], (1, 2, 5), ((1 << 20, 0), (2 << 20, 3))),
    ):
        assert rows == [
            [address + span.offset + block * span.stride, span.nbytes, device]
            for address, device in ranks
            for span in SPANS
            for block in blocks
        ]


@pytest.mark.parametrize(
    ("regions", "why"),
    [
        pytest.param([], "not of a kind", id="none"),
        pytest.param([("FILE", NBYTES)], "not of a kind", id="kind"),
        pytest.param([("DRAM", NBYTES - 1)], "not of a kind", id="short"),
        pytest.param([("DRAM", NBYTES), ("VRAM", NBYTES)], "not of a kind", id="of two kinds"),
        pytest.param([("DRAM", NBYTES)] * 2, "another number of ranks", id="ranks"),
    ],
)
def test_what_a_peer_offers_is_looked_at(
    fake: type[FakeAgent], regions: list[tuple[str, int]], why: str
) -> None:
    agent = ReadingAgent(store_of([on_gpu(0, 1 << 20)]), "lo")
    told = [pb.NixlRegion(kind=kind, nbytes=nbytes) for kind, nbytes in regions]
    task = Task(pb.Reach(nixl_agent=b"a", nixl_regions=told))
    if not regions:
        task.peer_pool = pool_of(1)
    with pytest.raises(PathFailed, match=why):
        run(task, agent)
    assert not fake.made[0].peers


def test_what_cannot_be_registered_is_not_offered(
    fake: type[FakeAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = dict(FakeAgent.__dict__)["register_memory"]

    def register(agent: FakeAgent, rows: list[Any], kind: str) -> None:
        agent.state = "NO CUDA"
        refuse(agent, rows, kind)

    monkeypatch.setattr(FakeAgent, "register_memory", register)
    store = store_of([on_gpu(0, 1 << 20)])
    assert ServingAgent(store, "lo").reach() is None
    assert not ReadingAgent(store, "lo").offered


def test_peers_stay_connected_until_they_fail(
    fake: type[FakeAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "_PEERS_MAX", 2)
    agent = ReadingAgent(store_of([on_gpu(0, 1 << 20)]), "lo")
    (inner,) = fake.made
    tasks = {
        name: Task({"agent": name.encode(), "regions": [("DRAM", 0, 1, NBYTES)]}) for name in "abc"
    }
    run(tasks["a"], agent)
    run(tasks["a"], agent)
    assert (inner.peers, inner.removed) == (["a"], [])
    inner.state = "ERR"
    with pytest.raises(PathFailed, match="the read failed"):
        run(tasks["a"], agent)
    assert inner.removed == ["peer a"]
    inner.state = "DONE"
    for name in "abac":
        run(tasks[name], agent)
    # The one that was used longest ago gave way.
    assert (inner.peers, inner.removed) == (["a", "a", "b", "c"], ["peer a", "peer b"])


@pytest.mark.parametrize("call", ["", "list 1", "list 2", "read", "transfer"])
def test_no_handle_is_left_of_a_read(fake: type[FakeAgent], call: str) -> None:
    agent = ReadingAgent(store_of([on_gpu(0, 1 << 20)]), "lo")
    (inner,) = fake.made
    inner.fails_at = call
    task = Task({"agent": b"a", "regions": [("DRAM", 0, 1, NBYTES)]})
    with pytest.raises(PathFailed, match="the read failed") if call else nullcontext():
        run(task, agent)
    assert inner.num_handles == {"": 3, "list 1": 0, "list 2": 1, "read": 2, "transfer": 3}[call]
    assert not inner.handles


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed")
def test_several_regions_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_NET_DEVICES", "UCX_TLS"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("UCX_TLS")
    chance = torch.Generator().manual_seed(1)
    theirs, ours = (
        [torch.randint(256, (NBYTES,), dtype=torch.uint8, generator=chance) for _ in range(2)]
        for _ in range(2)
    )
    expected = [tensor.clone() for tensor in ours]
    for rank, tensor in enumerate(expected):
        for span in SPANS:
            for source, destination in ((1, 6), (2, 7), (5, 3)):
                at, of = (span.offset + block * span.stride for block in (destination, source))
                tensor[at : at + span.nbytes] = theirs[rank][of : of + span.nbytes]
    serving = ServingAgent(store_of(theirs), "lo")
    agent = ReadingAgent(store_of(ours), "lo")
    reach = serving.reach()
    assert reach is not None and [region[0] for region in reach["regions"]] == ["DRAM", "DRAM"]
    task = Task(reach)
    run(task, agent)
    assert task.num_arrived == 3
    assert all(map(torch.equal, ours, expected))


def test_regions_of_a_file(tmp_path: Any) -> None:
    import mmap

    from kvserver.mover.pages import PoolFile

    file = PoolFile.__new__(PoolFile)
    file.mapping, file.nbytes = mmap.mmap(-1, 4096), 4096
    (region,) = nixl.regions_of(file)
    assert (region.kind, region.device, region.nbytes) == ("DRAM", 0, 4096)
    assert region == Region("DRAM", 0, region.address, 4096) and region.address % 4096 == 0
