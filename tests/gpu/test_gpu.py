"""A pool on CUDA devices: mapped by CUDA IPC, attended over, timed.

``python -m pytest -m gpu tests/gpu`` on a machine with a GPU and a CUDA build of torch; about a
minute. Each server is a process of its own, because CUDA does not open in a process the
handle that it gave out itself.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvclient import Client
from kvclient.events import BlockStored
from kvclient.imports import TransferPath
from kvclient.pool import map_pool
from kvclient.values import Content, SlotRequest
from own_process import environment

torch = pytest.importorskip("torch")

from paged_model import (  # noqa: E402  (needs torch)
    FULL,
    HYBRID,
    Engine,
    Model,
    PagedKeeper,
    assert_same,
    dense_logits,
    random_tokens,
)

NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not NUM_DEVICES, reason="there is no CUDA device here"),
]

BLOCK_SIZE = 4
TIMEOUT_S = 120.0
ENVIRONMENT = environment()

Serve = Callable[..., str]


@contextmanager
def _serving(*flags: str, log: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "kvserver", "--listen", "127.0.0.1:0", "--no-metrics"]
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [*command, "--drain-grace-seconds", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=ENVIRONMENT,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            ready = re.search(r"\bgrpc=(\S+)", process.stdout.readline())
            assert ready is not None, log.read_text()
            yield ready[1]
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
    assert process.returncode == 0, log.read_text()


WRITE = """
import sys
import torch
from kvclient import Client
from kvclient.pool import map_pool
with Client(sys.argv[1]) as client, map_pool(client.describe_pool(), rank=int(sys.argv[2])) as pool:
    assert pool.device.startswith("cuda:"), pool.device
    for number, name in enumerate(pool.layer_names):
        view = pool.layer(name)
        assert view.is_cuda and not view[int(sys.argv[3])].any()
        view[int(sys.argv[3])].fill_(10 * int(sys.argv[2]) + number + 1)
    torch.cuda.synchronize()
    del view
"""


def _write_elsewhere(target: str, rank: int, block_id: int) -> None:
    arguments = [target, str(rank), str(block_id)]
    subprocess.run(
        [sys.executable, "-c", WRITE, *arguments], check=True, timeout=TIMEOUT_S, env=ENVIRONMENT
    )


@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize(
    "num_ranks",
    [
        1,
        pytest.param(
            2, marks=pytest.mark.skipif(NUM_DEVICES < 2, reason="there is one CUDA device only")
        ),
    ],
)
def test_another_process_writes_and_peers_pull(tmp_path: Path, layout: str, num_ranks: int) -> None:
    device = "cuda:" + ",".join(map(str, range(num_ranks)))
    shape = ("--num-layers", "2", "--num-kv-heads", "1", "--head-size", "16")
    options = (*shape, "--dtype", "bfloat16", "--block-size", "4", "--num-blocks", "9")
    log = tmp_path / "log"
    with (
        _serving("--device", device, "--layout", layout, *options, log=log) as target,
        Client(target, timeout_s=TIMEOUT_S) as client,
        client.open_session() as session,
    ):
        description = session.pool
        assert len(description.mappings) == num_ranks
        assert description.tensor_parallel_size == num_ranks
        result = session.allocate_slots(SlotRequest("a", Content(range(4)), lookup=True))
        ((block_id,),) = result.new_blocks
        for rank in range(num_ranks):
            _write_elsewhere(target, rank, block_id)
        session.cache_blocks("a", 4)
        # This process sees what the other one wrote, ...
        for rank in range(num_ranks):
            with map_pool(description, rank=rank) as pool:
                for number in (0, 1):
                    view = pool.layer(number)
                    assert bool((view[block_id] == 10 * rank + number + 1).all())
                    assert not view[block_id - 1].any()
                del view
        # ... and so does a peer: of each rank its layers' pages.
        (block,) = client.pull_blocks(_hashes(client))
        page = len(block.data) // (2 * num_ranks)
        elements = torch.frombuffer(bytearray(block.data), dtype=torch.bfloat16)
        pages = elements.view(num_ranks, 2, page // 2)
        for rank in range(num_ranks):
            for number in (0, 1):
                assert bool((pages[rank, number] == 10 * rank + number + 1).all())
    assert f"bytes on each of {device[:6]}" in log.read_text()


def _hashes(client: Client) -> list[bytes]:
    """What a server caches."""
    with client.stream_events(snapshot=True) as batches:
        return [
            block_hash
            for event in next(batches).events
            if isinstance(event, BlockStored)
            for block_hash in event.block_hashes
        ]


def _offers_nixl(client: Client) -> bool:
    """A server loads it while it serves already."""
    for _ in range(600):
        if client.open_transfer({0: []}).reach.nixl_agent:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    "path",
    [
        TransferPath.MAPPING,
        pytest.param(
            TransferPath.NIXL,
            marks=pytest.mark.skipif(
                importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed"
            ),
        ),
        TransferPath.GRPC,
    ],
)
@pytest.mark.parametrize(
    ("source_device", "device"),
    [
        ("cuda:0", "cuda:0"),
        ("cuda:0", "cpu"),
        ("cpu", "cuda:0"),
        pytest.param(
            *("cuda:0", "cuda:1"),
            marks=pytest.mark.skipif(NUM_DEVICES < 2, reason="there is one CUDA device only"),
        ),
    ],
)
def test_bytes_move_between_servers(
    tmp_path: Path, source_device: str, device: str, path: TransferPath
) -> None:
    shape = ("--num-layers", "2", "--num-kv-heads", "2", "--head-size", "64")
    options = (*shape, "--dtype", "bfloat16", "--block-size", "16", "--num-blocks", "129")
    tokens = range(16 * 100 + 1)
    with (
        _serving("--device", source_device, *options, log=tmp_path / "source") as source_target,
        _serving("--device", device, "--layout", "layer", *options, log=tmp_path / "log") as target,
        Client(source_target, timeout_s=TIMEOUT_S) as source,
        Client(target, timeout_s=TIMEOUT_S) as client,
        source.open_session() as prefill,
        client.open_session() as decode,
    ):
        slots = prefill.allocate_slots(SlotRequest("a", Content(tokens), lookup=True))
        theirs = map_pool(prefill.pool)
        generator = torch.Generator(device=theirs.device).manual_seed(1)
        for name in theirs.layer_names:
            theirs.layer(name).normal_(generator=generator)
        if theirs.device != "cpu":
            torch.cuda.synchronize()
        prefill.cache_blocks("a", len(tokens))
        assert path is not TransferPath.NIXL or _offers_nixl(source)
        result = client.import_blocks(
            _hashes(source), source_target, paths=[path], checksums=True, deadline_s=60.0
        ).result()
        assert result.is_complete and not result.failures
        hit = decode.get_computed_blocks("b", list(tokens))
        assert hit.num_computed_tokens == 1600
        ours = map_pool(decode.pool)
        for name in ours.layer_names:
            expected = theirs.layer(name)[slots.new_blocks[0][:100]].cpu()
            assert bool((ours.layer(name)[hit.blocks[0]].cpu() == expected).all())


@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("shape", [FULL, HYBRID], ids=["full", "hybrid"])
def test_paged_attention_is_attention(tmp_path: Path, shape: Any, layout: str) -> None:
    flags = ("--model", "mine", "--groups", shape.groups(BLOCK_SIZE), "--num-blocks", "65")
    model = Model(shape, device="cuda:0")
    prompt = random_tokens(30, seed=1)
    with (
        _serving(
            *flags, "--device", "cuda:0", "--layout", layout, "--poison", log=tmp_path / "log"
        ) as target,
        Client(target, timeout_s=TIMEOUT_S) as client,
    ):
        for request_id, chunk, num_hit in (("first", None, 0), ("second", 5, 28)):
            with client.open_session() as session:
                engine = Engine(session, map_pool(session.pool), model)
                logits = engine.prefill(request_id, prompt, chunk)
                assert engine.hits[request_id] == num_hit
                assert_same(logits, dense_logits(model, prompt)[num_hit:])
                rows = [logits[-1], *engine.generate(request_id, logits[-1], 12)]
                expected = dense_logits(model, engine.tokens(request_id))
                assert_same(torch.stack(rows), expected[29:])
                # Block tables and slots are where the kernel wants them.
                assert engine.pool.block_table(engine.tables(request_id)[:1]).is_cuda
                key, _ = PagedKeeper(engine.pool, engine.tables(request_id)).read(1, 44)
                assert bool(key[42:].isnan().all())  # nobody wrote there
        assert client.audit().violations == ()


def test_blocks_are_zeroed(tmp_path: Path) -> None:
    flags = ("--model", "mamba-hybrid", "--num-blocks", "33", "--poison", "--device", "cuda:0")
    with (
        _serving(*flags, log=tmp_path / "log") as target,
        Client(target, timeout_s=TIMEOUT_S) as client,
        client.open_session() as session,
    ):
        pool = map_pool(session.pool)
        result = session.allocate_slots(SlotRequest("a", Content(range(20)), lookup=True))
        (group,) = [n for n, group in enumerate(session.pool.groups) if group.needs_zeroing]
        block_ids = result.new_blocks[group]
        names = session.pool.groups[group].layer_names
        for name in names:
            assert bool(pool.layer(name)[block_ids].isnan().all())
        pool.zero_blocks(group, block_ids)
        for name in names:
            assert not pool.layer(name)[block_ids].any()


def test_bandwidth_against_a_copy_within_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints; judges only that a mapping of another process's memory is the device's own."""
    flags = ("--device", "cuda:0", "--memory-bytes", str(1 << 30))
    with (
        _serving(*flags, log=tmp_path / "log") as target,
        Client(target, timeout_s=TIMEOUT_S) as client,
    ):
        pool = map_pool(client.describe_pool())
        layer = pool.layer(0)
        assert isinstance(layer, torch.Tensor)
        count = layer.shape[0]
        order = torch.randperm(count - 1, device=layer.device) + 1
        own = torch.empty_like(layer)
        gathered = torch.empty((count - 1, *layer.shape[1:]), dtype=layer.dtype, device="cuda:0")
        nbytes = 2 * gathered.numel() * gathered.element_size()  # read and written
        timed = {
            "copy within the device": lambda: gathered.copy_(own[1:]),
            "gather from the device": lambda: torch.index_select(own, 0, order, out=gathered),
            "gather from the pool": lambda: torch.index_select(layer, 0, order, out=gathered),
        }
        figures = {}
        for name, run in timed.items():
            run()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(20):
                run()
            stop.record()
            torch.cuda.synchronize()
            figures[name] = 20 * nbytes / start.elapsed_time(stop) / 1e6
    with capsys.disabled():
        for name, gigabytes in figures.items():
            print(f"\n{name}: {gigabytes:.0f} GB/s", end="")
    assert figures["gather from the pool"] > figures["gather from the device"] / 4
