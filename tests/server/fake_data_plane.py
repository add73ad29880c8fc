"""A data plane in the node's own process, that does what a test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from block_pages import block_pages, block_spans
from kvcore.errors import InvalidArgument, KVDepotError, Unavailable
from kvcore.import_job import Ready
from kvcore.memory import PoolMemory
from kvcore.transfer import BlockStatus, GroupHashes
from kvdepot.v1 import transfer_pb2 as pb
from kvserver.config import ServerConfig
from kvserver.contents import add_contents, chosen
from kvserver.data_plane import ImportJob, ImportNews, ImportPart, ImportProgress, ImportReport
from kvserver.serve import Server

_REPORTED = {
    BlockStatus.READY: pb.IMPORT_STATUS_IMPORTED,
    BlockStatus.PENDING: pb.IMPORT_STATUS_PENDING,
    BlockStatus.MISSING: pb.IMPORT_STATUS_MISSING,
}
_IMPORTED = pb.IMPORT_STATUS_IMPORTED


class FakeDataPlane:
    """Copies from ``peers``, which are servers of this process, by their names.

    ``mode``: "copy", and after it the import "hang"s, the process "die"s, the peer
    "refuse"s, or progress is told without end ("chatter"), also when a cancellation was lost
    ("deaf").
    """

    def __init__(self, config: ServerConfig, memory: PoolMemory) -> None:
        self.pulled_bytes = 0
        self.on_summed: Callable[[str, Sequence[int], Sequence[int]], None] = lambda *_: None
        self.memory = memory
        self.peers: dict[str, Server] = {}
        self.mode = "copy"
        # So many hashes of each group are told of before what ``mode`` says.
        self.first_part = 0
        self.opened: dict[str, dict[int, list[int]]] = {}
        self.jobs: list[ImportJob] = []
        # Imports that were told to end, and those that have.
        self.num_ending = self.num_ended = 0
        self.is_running = False
        # Not set: bytes may still land, so that no import can end.
        self.settled = asyncio.Event()
        self.settled.set()

    async def start(self) -> None:
        """As DataPlane's."""
        self.is_running = True

    async def close(self) -> None:
        """As DataPlane's."""
        self.is_running = False
        self.settled.set()

    def reach(self) -> pb.Reach:
        """As DataPlane's."""
        return pb.Reach(host_id="host", data_address=":1")

    def open_transfer(self, transfer_id: str, blocks: Mapping[int, Sequence[int]]) -> None:
        """As DataPlane's."""
        self.opened[transfer_id] = {group: list(ids) for group, ids in blocks.items()}

    def close_transfer(self, transfer_id: str) -> None:
        """As DataPlane's."""
        self.opened.pop(transfer_id, None)  # unless it was never whole

    async def import_blocks(self, job: ImportJob) -> AsyncIterator[ImportNews]:
        """As DataPlane's."""
        self.jobs.append(job)
        try:
            if self.mode == "refuse":
                raise Unavailable(f"{job.peer} does not answer", reason="UNAVAILABLE")
            if job.peer not in self.peers:
                raise InvalidArgument(f"there is no peer {job.peer!r}", field="peer")
            part, report = self._copy(job)
            yield ImportProgress(report.num_blocks, report.num_bytes, report.path)
            if self.first_part:
                first, part = _cut(job, part, self.first_part)
                yield first
            if self.mode == "die":
                raise RuntimeError("the process that copies died")
            if self.mode == "hang":
                await asyncio.Event().wait()
            while self.mode == "chatter":
                yield ImportProgress(1, 1, pb.TRANSFER_PATH_GRPC)
                await asyncio.sleep(0)
            while self.mode == "deaf":
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)
                yield ImportProgress(1, 1, pb.TRANSFER_PATH_GRPC)
            yield part
            yield report
        finally:
            self.num_ending += 1
            await self.settled.wait()
            self.num_ended += 1

    def _copy(self, job: ImportJob) -> tuple[ImportPart, ImportReport]:
        """All at once. What the peer does not vouch for at the end has failed."""
        source = self.peers[job.peer].node
        assert source.data_plane is not None
        assert isinstance(source.data_plane, FakeDataPlane)
        transfer = source.depot.transfers.open_hashes(
            "", [GroupHashes(group.group, group.hashes) for group in job.groups]
        )
        taken = {group.group: group.block_ids for group in job.groups}
        if job.take is not None:
            ready = {
                group.group: Ready(0, [s == BlockStatus.READY for s in group.statuses])
                for group in transfer.groups
            }
            taken.update(job.take(ready) or {})
        statuses: dict[int, bytes] = {}
        contents: dict[int, list[pb.ContentRun]] = {}
        num_blocks = num_bytes = 0
        for wanted, group in zip(job.groups, transfer.groups, strict=True):
            ids = taken[wanted.group]
            statuses[group.group] = bytes(
                _REPORTED[BlockStatus(s)]
                if block_id or s != BlockStatus.READY
                else pb.IMPORT_STATUS_FAILED
                for s, block_id in zip(group.statuses, ids, strict=True)
            )
            there = [at for at, block in enumerate(group.blocks) if block is not None]
            told = pb.GroupBlocks()
            add_contents(told, source.depot.pool, group, max_bytes=1 << 20)
            contents[group.group] = chosen(
                told.contents, [group.hashes[at] for at in there], [ids[at] != 0 for at in there]
            )
            for block, block_id in zip(group.blocks, ids, strict=True):
                if block is not None and block_id:
                    pages = block_pages(source.data_plane.memory, block.block_id, group.group)
                    write_pages(self.memory, block_id, group.group, pages)
                    num_blocks += 1
                    num_bytes += len(pages)
        failures = []
        try:
            source.depot.transfers.close(transfer.transfer_id)
        except KVDepotError as error:
            failures = [pb.PathFailure(path=pb.TRANSFER_PATH_GRPC, reason=error.reason)]
            statuses = {
                group: bytes([pb.IMPORT_STATUS_FAILED] * len(column))
                for group, column in statuses.items()
            }
        part = ImportPart(dict.fromkeys(statuses, 0), statuses, contents if job.contents else {})
        return part, ImportReport(num_blocks, num_bytes, pb.TRANSFER_PATH_GRPC, failures)


def _cut(job: ImportJob, part: ImportPart, num_hashes: int) -> tuple[ImportPart, ImportPart]:
    """A part of all hashes in two."""
    halves = []
    for begin, end in ((0, num_hashes), (num_hashes, None)):
        contents = {}
        for group in job.groups:
            came = [at for at, s in enumerate(part.statuses[group.group]) if s == _IMPORTED]
            is_chosen = [begin <= at < (end or at + 1) for at in came]
            hashes = [group.hashes[at] for at in came]
            contents[group.group] = chosen(part.contents.get(group.group, ()), hashes, is_chosen)
        statuses = {group: column[begin:end] for group, column in part.statuses.items()}
        halves.append(ImportPart(dict.fromkeys(statuses, begin), statuses, contents))
    return halves[0], halves[1]


def write_pages(memory: PoolMemory, block_id: int, group: int, pages: bytes) -> None:
    """What ``block_pages`` answers is there afterwards."""
    with Path(memory.path).open("r+b") as file:
        for span in block_spans(memory, group):
            file.seek(span.offset + block_id * span.stride)
            file.write(pages[: span.nbytes])
            pages = pages[span.nbytes :]
