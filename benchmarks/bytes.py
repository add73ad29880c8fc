"""Blocks from server to server, by every path, against the same bytes without kvdepot.

The source's blocks lie apart, in no order; what memcpy moves is one piece of the same memory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, sleep

from benchmarks.pairs import Row, Samples, Settings, compare, percentile
from benchmarks.workloads import BLOCK_SIZE, VOCABULARY
from kvclient import Client
from kvclient.imports import TransferPath
from kvclient.replay.server import own_server
from kvclient.session import Session
from kvclient.values import Content, Free, OperationKind, SlotRequest, Step
from kvcore.hashing import ExtraKeys, make_scheme
from kvserver.mover.child import MALLOC

ROOT = Path(__file__).resolve().parents[1]
# Bytes of a block, and the model that has them.
SHAPES = {
    1 << 20: "--model qwen2-0.5b --num-layers 16 --num-kv-heads 8 --head-size 128",
    24 * 8192: "--model qwen2-0.5b",
}
LARGE, SMALL = SHAPES
TOTAL_BYTES = 256 << 20
# Moved while Steps are measured: as often as it takes.
BESIDE_STEPS_BYTES = 2 << 30
MAPPING, NIXL, GRPC = TransferPath.MAPPING, TransferPath.NIXL, TransferPath.GRPC
# Ours in seconds over theirs: 0.8 of memcpy is 1.25.
MAPPING_TARGET, WIRE_TARGET, CHECKSUMS_TARGET, STEP_TARGET = 1.25, 1.11, 1.15, 1.25


class Pair:
    """A server that has ``num_blocks`` blocks of a prompt, and one that imports them."""

    def __init__(self, source: Client, destination: Client, num_blocks: int) -> None:
        self.source, self.destination = source, destination
        num_tokens = num_blocks * BLOCK_SIZE
        tokens = array("I", Random(0).choices(range(VOCABULARY), k=num_tokens)).tobytes()
        chain = make_scheme("kvd_sha256", "0").chain(BLOCK_SIZE, ExtraKeys())
        chain.extend(tokens, num_tokens)
        self.hashes: Sequence[bytes] = list(chain.hashes)
        with source.open_session() as session:
            scatter(session, num_blocks)
            session.get_computed_blocks("r", tokens)
            session.allocate_slots(SlotRequest("r", num_new_tokens=num_tokens))
            session.cache_blocks("r", num_tokens)
            session.free("r")
        self.session = destination.open_session()

    def run(
        self, path: TransferPath, *, checksums: bool = False, num_blocks: int | None = None
    ) -> float:
        """Seconds of one import of all, or the first blocks."""
        self.session.reset_prefix_cache()
        hashes = self.hashes[:num_blocks]
        began = perf_counter()
        result = self.destination.import_blocks(
            hashes, self.source.target, paths=[path], checksums=checksums
        ).result()
        seconds = perf_counter() - began
        assert result.is_complete and not result.failures, result
        return seconds


def scatter(session: Session, num_blocks: int) -> None:
    """The blocks that are given next lie in no order, as in a pool that has been in use."""
    stream = session.step_stream()
    admissions = [
        SlotRequest(str(number), Content([number]), lookup=True) for number in range(num_blocks)
    ]
    reply = stream.call(Step([(OperationKind.ADMIT, num_blocks)], admissions=admissions))
    handles = [admission.handle for admission in reply.admissions]
    Random(1).shuffle(handles)
    stream.call(Step([(OperationKind.FREE, num_blocks)], free=Free(handles)))
    stream.close()


@contextmanager
def pair(num_bytes: int, block_bytes: int, layout: str = "block") -> Iterator[Pair]:
    """Two servers. NIXL is told to use TCP, as between hosts."""
    num_blocks = num_bytes // block_bytes
    options = [*SHAPES[block_bytes].split(), "--block-size", str(BLOCK_SIZE), "--layout", layout]
    options += ["--num-blocks", str(num_blocks + 64)]
    with ExitStack() as stack:
        clients = [
            stack.enter_context(Client(stack.enter_context(own_server(options)), timeout_s=120))
            for _ in range(2)
        ]
        made = Pair(*clients, num_blocks)
        if has_nixl():
            # It is loaded while the server serves already.
            with clients[0].open_session():
                while not clients[0].open_transfer({0: []}).reach.nixl_agent:
                    sleep(0.05)
        yield made


class Bare:
    """The same without kvdepot, between two processes of their own."""

    def __init__(self, kind: str, num_bytes: int, block_bytes: int) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        where = json.dumps({"num_bytes": num_bytes})
        if kind != "memcpy":
            where = self._start(kind, "source", str(num_bytes), str(block_bytes))
        self._start(kind, "sink", where)

    def _start(self, *arguments: str) -> str:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bare", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | MALLOC | NIXL_ENVIRONMENT,
        )
        self._processes.append(process)
        assert process.stdout is not None
        return process.stdout.readline()

    def run(self) -> float:
        """Seconds of moving all once."""
        sink = self._processes[-1]
        assert sink.stdin is not None and sink.stdout is not None
        sink.stdin.write("\n")
        sink.stdin.flush()
        return float(sink.stdout.readline())

    def close(self) -> None:
        """End both."""
        for process in reversed(self._processes):
            process.kill()
            process.communicate()


@contextmanager
def bare(kind: str, num_bytes: int, block_bytes: int = LARGE) -> Iterator[Bare]:
    """Runs them."""
    made = Bare(kind, num_bytes, block_bytes)
    try:
        yield made
    finally:
        made.close()


NIXL_ENVIRONMENT = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "ERROR"}


def has_nixl() -> bool:
    """Whether it is installed."""
    return importlib.util.find_spec("nixl_cu12") is not None


def once(run: Callable[[], float]) -> Callable[[], list[Samples]]:
    """A burst of one sample."""
    return lambda: [[run()]]


def rows(settings: Settings) -> Iterator[Row]:
    """The rows, as they are measured."""
    os.environ |= NIXL_ENVIRONMENT
    num_bytes = max(16, int((TOTAL_BYTES >> 20) * settings.scale)) << 20
    shown = f"{num_bytes >> 20} MiB"
    beside = num_bytes if settings.is_quick else BESIDE_STEPS_BYTES
    paths = [MAPPING, *([NIXL] if has_nixl() else []), GRPC]
    theirs = {
        MAPPING: ("memcpy", "memcpy", MAPPING_TARGET),
        NIXL: ("nixl", "NIXL's own loop, TCP", WIRE_TARGET),
        GRPC: ("stream", "a bare stream", WIRE_TARGET),
    }

    def by(path: TransferPath) -> str:
        return path.name.lower()

    def against_bare(blocks: Pair, block_bytes: int) -> Iterator[Row]:
        moved = block_bytes * len(blocks.hashes)
        for path in paths:
            kind, name, target = theirs[path]
            with bare(kind, moved, block_bytes) as other:
                yield from compare(
                    [f"bytes: {shown} in {block_bytes >> 10} KiB blocks by {by(path)} ({name})"],
                    once(lambda path=path: blocks.run(path)),
                    once(other.run),
                    settings,
                    target=target,
                    unit="ms",
                )

    with pair(num_bytes, SMALL) as blocks:
        yield from against_bare(blocks, SMALL)
        blocks.session.close()
    with pair(num_bytes, LARGE) as blocks, pair(num_bytes, LARGE, "layer") as layers:
        yield from against_bare(blocks, LARGE)
        for path in paths:
            yield from compare(
                [f"bytes: {shown} by {by(path)} with checksums (without)"],
                once(lambda path=path: blocks.run(path, checksums=True)),
                once(lambda path=path: blocks.run(path)),
                settings,
                target=CHECKSUMS_TARGET,
                unit="ms",
            )
        for path in paths:
            yield from compare(
                [f"bytes: {shown} by {by(path)}, layer layout (block layout)"],
                once(lambda path=path: layers.run(path)),
                once(lambda path=path: blocks.run(path)),
                settings,
                unit="ms",
            )
        for path in paths:
            yield from compare(
                [f"bytes: import of one block by {by(path)} (pulled by a client)"],
                once(lambda path=path: blocks.run(path, num_blocks=1)),
                once(lambda: pull_one(blocks)),
                settings,
                unit="ms",
            )
        for path in (GRPC, MAPPING):
            kind, name, _ = theirs[path]
            with bare(kind, num_bytes) as other:
                yield from step_rows(
                    f"bytes: StepStream while {beside >> 20} MiB go by {by(path)} "
                    f"(as many by {name})",
                    blocks.source,
                    lambda path=path: blocks.run(path),
                    other.run,
                    settings,
                    num_moves=beside // num_bytes,
                )
        blocks.session.close()
        layers.session.close()


def pull_one(blocks: Pair) -> float:
    """Seconds of a client's pull of one block."""
    began = perf_counter()
    (block,) = blocks.source.pull_blocks(blocks.hashes[:1])
    seconds = perf_counter() - began
    assert block.data
    return seconds


def step_rows(
    name: str,
    client: Client,
    ours: Callable[[], float],
    theirs: Callable[[], float],
    settings: Settings,
    num_moves: int,
) -> list[Row]:
    """Steps while either moves the same bytes at the same pace, that of the slower.

    At its own pace the faster would move more in the time of the Steps, and disturb more.
    """
    seconds = []
    for move in (ours, theirs):
        for _ in range(4):
            began = perf_counter()
            move()
            seconds.append(perf_counter() - began)
    period = max(median(seconds[1:4]), median(seconds[5:]))
    return compare(
        [f"{name}, p50", f"{name}, p99"],
        lambda: steps_while(client, num_moves, ours, period),
        lambda: steps_while(client, num_moves, theirs, period),
        settings,
        target=STEP_TARGET,
    )


def steps_while(
    client: Client, num_moves: int, move: Callable[[], float], period: float
) -> list[Samples]:
    """Empty Steps of one session while bytes move once a period: their seconds, and their p99."""

    def keep_moving() -> None:
        for _ in range(num_moves):
            began = perf_counter()
            move()
            sleep(max(0.0, began + period - perf_counter()))

    moving = threading.Thread(target=keep_moving)
    samples = []
    with client.open_session() as session:
        stream = session.step_stream()
        moving.start()
        try:
            while moving.is_alive() or not samples:
                began = perf_counter()
                stream.call(Step(runs=[]))
                samples.append(perf_counter() - began)
                sleep(0.001)
        finally:
            moving.join()
            stream.close()
    print(f"  {num_moves} moves in {len(samples)} Steps", file=sys.stderr)
    return [samples, [percentile(samples, 0.99)]]
