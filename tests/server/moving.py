"""Nodes that keep bytes and the books of transfers only, and move the bytes in earnest."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from block_pages import block_pages
from kvcore.memory import PoolMemory, Span
from kvdepot.v1 import transfer_pb2 as pb
from kvdepot.v1 import transfer_pb2_grpc
from kvserver.config import ServerConfig
from kvserver.data_plane import (
    ImportGroup,
    ImportJob,
    ImportPart,
    ImportProgress,
    ImportReport,
)
from kvserver.mover.handle import MoverHandle
from kvserver.mover.pages import spans_of
from serving import event_loop_thread, eventually

TIMEOUT_SECONDS = 120.0
IMPORTED, PENDING, MISSING, FAILED = (
    pb.IMPORT_STATUS_IMPORTED,
    pb.IMPORT_STATUS_PENDING,
    pb.IMPORT_STATUS_MISSING,
    pb.IMPORT_STATUS_FAILED,
)


def block_hash(group: int, block_id: int) -> bytes:
    """The hash under which a node has its block."""
    return bytes([group]) + block_id.to_bytes(31, "big")


def tokens(name: bytes) -> bytes:
    """What a node says are the 16 tokens of the block of this hash."""
    return name + name


@dataclass(frozen=True)
class Whole:
    """How an import ended, its parts put together; ``names``: of blocks of known content."""

    num_blocks: int
    num_bytes: int
    path: int
    statuses: dict[int, bytes]
    names: dict[int, list[bytes]]
    failures: Sequence[pb.PathFailure]


class MovingNode(transfer_pb2_grpc.KVTransferServiceServicer):
    """Every block is ready under ``block_hash``, unless in ``pending`` or ``hidden``."""

    def __init__(self, directory: Path, **options: Any) -> None:
        defaults: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "num_blocks": 33,
            "mapping_dir": str(directory),
        }
        self.config = ServerConfig(**(defaults | options))
        self.memory = PoolMemory(self.config.depot_config(), str(directory), name=uuid.uuid4().hex)
        self.loop = event_loop_thread()
        self.handle = self.loop.call(lambda: MoverHandle(self.config, self.memory))
        self.fingerprint = self.pool.fingerprint
        self.transfers: set[str] = set()
        self.reset()
        # Clients may ping when idle, as a server of ours lets them.
        options = [
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ]
        self.server = grpc.server(ThreadPoolExecutor(8), options=options)
        transfer_pb2_grpc.add_KVTransferServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    def reset(self) -> None:
        """As it was at first, but in another epoch."""
        # While a transfer is open, NIXL works for its peer: a thread that polls.
        for transfer_id in list(self.handle._transfers):
            self.expire(transfer_id)
        self.epoch = uuid.uuid4().hex
        self.pending: set[bytes] = set()
        self.hidden: set[bytes] = set()
        # Checksums that it knows, by hash, None: it says nothing of any; those that the process
        # which serves PullBlocks has told it, by block id; and what is behind them in an answer.
        self.sums: dict[bytes, int] | None = None
        self.summed: dict[int, int] = {}
        self.mangle: Callable[[pb.OpenTransferResponse], None] = lambda _: None
        self.sums_tail = b""
        self.handle.on_summed = lambda _, ids, sums: self.summed.update(zip(ids, sums, strict=True))
        self.lease_ttl_seconds = 30.0
        self.host_id: str | None = None
        # Of the pool's file, if not the right one.
        self.shown_path = ""
        self.num_renewals = 0
        # Of all transfers so far, in order.
        self.opened: list[str] = []
        self.closed: list[str] = []
        # Of each OpenTransfer: how many hashes it asked for.
        self.num_asked: list[int] = []
        # Called before OpenTransfer is answered, with how many have been asked for.
        self.on_open: Callable[[int, Any], None] = lambda number, context: None
        # Called before CloseTransfer is answered.
        self.on_close: Callable[[], None] = lambda: None

    @property
    def target(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    @property
    def pool(self) -> Any:
        """The pool's description."""
        return self.handle._pool

    @property
    def serving_pid(self) -> int:
        """Of the process that serves PullBlocks."""
        assert self.handle._serving is not None
        return int(self.handle._serving.pid)

    @property
    def importing_pid(self) -> int:
        """Of the process that runs imports."""
        process = self.handle._imports._process
        assert process is not None
        return int(process.child.pid)

    def start(self) -> None:
        """Until ``stop``."""
        self.loop.run(self.handle.start())
        if self.handle._nixl_devices() and importlib.util.find_spec("nixl_cu12") is not None:
            eventually(lambda: bool(self.handle.reach().nixl_agent))
        self.server.start()

    def stop(self) -> None:
        """Nothing is left."""
        self.server.stop(0)
        self.loop.run(self.handle.close())
        self.memory.close()

    # --- the bytes --------------------------------------------------------------------

    def spans(self, group: int) -> list[Span]:
        """Of a group's blocks."""
        return spans_of(self.pool)[group]

    def read(self, group: int, block_id: int) -> bytes:
        """A block's bytes."""
        return block_pages(self.memory, block_id, group)

    def fill(self, seed: int) -> None:
        """Random bytes everywhere."""
        with Path(self.memory.path).open("r+b") as file:
            file.write(random.Random(seed).randbytes(self.memory.nbytes))

    def flip(self, group: int, block_id: int) -> None:
        """One bit of a block is another."""
        span = self.spans(group)[-1]
        at = span.offset + block_id * span.stride + span.nbytes - 1
        with Path(self.memory.path).open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))

    # --- the RPCs ---------------------------------------------------------------------

    def DescribePool(self, request: Any, context: Any) -> Any:
        response = pb.DescribePoolResponse(pool=self.pool, epoch=self.epoch)
        if self.shown_path:
            response.pool.mappings[0].file.path = self.shown_path
        return response

    def OpenTransfer(self, request: Any, context: Any) -> Any:
        self.num_asked.append(sum(len(group.block_hashes) for group in request.groups))
        self.on_open(len(self.num_asked), context)
        response = pb.OpenTransferResponse(
            transfer_id=uuid.uuid4().hex,
            epoch=self.epoch,
            lease_ttl_seconds=self.lease_ttl_seconds,
            reach=self.loop.call(self.handle.reach),
        )
        if self.host_id is not None:
            response.reach.host_id = self.host_id
        blocks: dict[int, list[int]] = {}
        for asked in request.groups:
            answer = response.groups.add(group=asked.group)
            statuses, ids = [], []
            for name in asked.block_hashes:
                block_id = int.from_bytes(name[1:], "big")
                status = pb.BLOCK_STATUS_READY
                if name in self.pending:
                    status = pb.BLOCK_STATUS_PENDING
                elif name in self.hidden or not 0 < block_id < self.pool.num_blocks:
                    status = pb.BLOCK_STATUS_MISSING
                ready = status == pb.BLOCK_STATUS_READY
                statuses.append(status)
                ids.append(block_id if ready else 0)
            there = [block_hash(asked.group, i) for i in ids if i]
            if request.contents and there:
                answer.contents.add(num_blocks=len(there), token_ids=b"".join(map(tokens, there)))
            if request.checksums and self.sums is not None:
                known = [self.sums.get(block_hash(asked.group, i), 0) for i in ids if i]
                answer.checksums = struct.pack(f"<{len(known)}Q", *known) + self.sums_tail
            answer.statuses = bytes(statuses)
            answer.block_ids = b"".join(number.to_bytes(4, "little") for number in ids)
            blocks[asked.group] = ids
        self.mangle(response)
        self.transfers.add(response.transfer_id)
        self.opened.append(response.transfer_id)
        self.loop.call(lambda: self.handle.open_transfer(response.transfer_id, blocks))
        return response

    def RenewTransfer(self, request: Any, context: Any) -> Any:
        self.num_renewals += 1
        if request.transfer_id not in self.transfers:
            context.abort(grpc.StatusCode.NOT_FOUND, "the lease ran out")
        return pb.RenewTransferResponse(lease_ttl_seconds=self.lease_ttl_seconds)

    def CloseTransfer(self, request: Any, context: Any) -> Any:
        self.on_close()
        if request.transfer_id not in self.closed:
            if request.transfer_id not in self.transfers:
                context.abort(grpc.StatusCode.NOT_FOUND, "the lease ran out")
            self.expire(request.transfer_id)
            self.closed.append(request.transfer_id)
        return pb.CloseTransferResponse(epoch=self.epoch)

    def expire(self, transfer_id: str) -> None:
        """The transfer is over."""
        self.transfers.discard(transfer_id)
        self.loop.call(lambda: self.handle.close_transfer(transfer_id))

    # --- imports ----------------------------------------------------------------------

    def job(self, peer: MovingNode, blocks: dict[int, list[tuple[int, int]]], **job: Any) -> Any:
        """An import of the peer's blocks into ours: pairs of ids by group."""
        groups = [
            ImportGroup(
                group,
                [block_hash(group, theirs) for theirs, _ in pairs],
                [ours for _, ours in pairs],
            )
            for group, pairs in blocks.items()
        ]
        made = ImportJob(
            peer=peer.target,
            fingerprint=self.fingerprint,
            groups=groups,
            paths=(),
            checksums=True,
            contents=False,
            # The first import starts a process, which may take seconds.
            deadline_seconds=60.0,
        )
        return replace(made, **job)

    def run_import(self, job: ImportJob) -> tuple[Whole, list[ImportProgress]]:
        """All that the iterator gives."""
        return self.begin_import(job).result()

    def begin_import(self, job: ImportJob) -> RunningImport:
        """The import, running."""
        return RunningImport(self, job)


class RunningImport:
    """An import on the node's loop."""

    def __init__(self, node: MovingNode, job: ImportJob) -> None:
        self.progress: list[ImportProgress] = []
        self.parts: list[ImportPart] = []
        self.seconds = 0.0
        self.begun = threading.Event()
        self._future = asyncio.run_coroutine_threadsafe(self._run(node, job), node.loop.loop)

    async def _run(self, node: MovingNode, job: ImportJob) -> Whole:
        began = time.monotonic()
        reports = []
        statuses = {g.group: bytearray([FAILED] * len(g.hashes)) for g in job.groups}
        names: dict[int, list[bytes]] = {g.group: [] for g in job.groups}
        iterator: Any = node.handle.import_blocks(job)
        try:
            async with contextlib.aclosing(iterator) as items:
                async for item in items:
                    if isinstance(item, ImportReport):
                        reports.append(item)
                    elif isinstance(item, ImportPart):
                        self.parts.append(item)
                        for group, told in item.statuses.items():
                            first = item.first[group]
                            statuses[group][first : first + len(told)] = told
                            runs = item.contents.get(group, ())
                            ids = b"".join(run.token_ids for run in runs)
                            names[group] += [ids[i : i + 32] for i in range(0, len(ids), 64)]
                            assert len(names[group]) in (0, statuses[group].count(IMPORTED))
                    else:
                        self.progress.append(item)
                        self.begun.set()
        finally:
            self.seconds = time.monotonic() - began
        (report,) = reports
        assert all(len(statuses[g.group]) == len(g.hashes) for g in job.groups)
        return Whole(
            report.num_blocks,
            report.num_bytes,
            report.path,
            {group: bytes(column) for group, column in statuses.items()},
            names,
            report.failures,
        )

    def cancel(self) -> None:
        """Close the iterator; returns when that is done."""
        self._future.cancel()

    def result(self) -> tuple[Whole, list[ImportProgress]]:
        """The report, or what the import raised."""
        return self._future.result(TIMEOUT_SECONDS), self.progress


@contextlib.contextmanager
def moving(directory: Path) -> Iterator[Callable[..., MovingNode]]:
    """Starts nodes; keywords are ServerConfig's. All stop at the end."""
    running: list[MovingNode] = []

    def start(**options: Any) -> MovingNode:
        node = MovingNode(directory, **options)
        running.append(node)
        node.start()
        return node

    try:
        yield start
    finally:
        for node in running:
            node.stop()


def kill(pid: int, number: int) -> None:
    """Signal a process that a node started."""
    os.kill(pid, number)


def pairs(ids: Sequence[int], shift: int) -> list[tuple[int, int]]:
    """Each of the peer's blocks into the one of ours that lies ``shift`` behind, around."""
    return [(block_id, (block_id - 1 + shift) % 32 + 1) for block_id in ids]
