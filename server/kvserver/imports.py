"""The imports of one node: each a task that outlives the call that asked for it.

The call may be cancelled, or its client may stop reading, at any moment. The blocks that
are filled stay pinned until the data plane says that no byte can land in them any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvcore.errors import InvalidArgument, KVDepotError, Unavailable
from kvcore.import_job import Filled, Import, ImportResult, ImportStatus, Ready
from kvcore.transfer import ID_SHOWN
from kvdepot.v1 import transfer_pb2 as pb
from kvserver.contents import imported_content
from kvserver.data_plane import ImportGroup, ImportJob, ImportProgress, ImportReport
from kvserver.transfers import ListedTransfer

if TYPE_CHECKING:
    from kvserver.node import Node

logger = logging.getLogger(__name__)

PATHS = ("mapping", "nixl", "grpc", "unknown")
OUTCOMES = ("complete", "partial", "nothing", "refused", "cancelled")
# Reasons that are counted apart; all others are "other".
FAILURE_REASONS = frozenset(
    (
        *("DEADLINE_EXCEEDED", "UNAVAILABLE", "DRAINING", "FINGERPRINT_MISMATCH"),
        *("TRANSFER_EXPIRED", "UNKNOWN_TRANSFER", "CONTENT_DROPPED", "CHECKSUM_MISMATCH"),
        *("TOO_MANY_TRANSFERS", "TOO_MANY_BLOCKS", "TOO_MANY_PULLS", "TOO_MANY_STREAMS"),
        *("STALLED", "BAD_PEER", "MAPPING_TRUNCATED", "NO_MEMORY", "STOPPED"),
    )
)
# What an import that is over its deadline gets beyond what the data plane allows it.
_SLACK_SECONDS = 10.0
# Of a report, before others have their turn: some milliseconds.
_TURN_BLOCKS = 1024
_FAILED = Filled(ImportStatus.FAILED)
_FROM_THE_PEER: dict[int, Filled] = {
    pb.IMPORT_STATUS_IMPORTED: Filled(ImportStatus.IMPORTED),
    pb.IMPORT_STATUS_PENDING: Filled(ImportStatus.PENDING),
    pb.IMPORT_STATUS_MISSING: Filled(ImportStatus.MISSING),
}


class RunningImport:
    """One import: how far it is, and how it ended."""

    def __init__(self, found: Import, deadline_seconds: float) -> None:
        self.found = found
        self.deadline_seconds = deadline_seconds
        self.began_at = time.monotonic()
        self.progress = ImportProgress(0, 0, pb.TRANSFER_PATH_UNSPECIFIED)
        self.failures: Sequence[pb.PathFailure] = ()
        # Once it has ended, one of the two.
        self.result: ImportResult | None = None
        self.error: Exception | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self._news = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether no byte can land any more."""
        return self.result is not None or self.error is not None

    @property
    def is_stopped(self) -> bool:
        """Whether it was told to stop."""
        return self._stopped

    def run(self, work: asyncio.Task[None]) -> None:
        """``work`` is what runs it."""
        self._task = work

    def stop(self) -> None:
        """Have it end soon; whoever waits for it is told when it has."""
        # Once: a second time would cut short the ending itself.
        if not self._stopped and self._task is not None:
            self._stopped = True
            self._task.cancel()

    def tell(self) -> None:
        """There is news."""
        self._news.set()

    async def news(self) -> None:
        """Wait for more progress, or the end."""
        if not self.has_ended:
            await self._news.wait()
            self._news.clear()


class Imports:
    """Those that run, and what became of the others."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._running: dict[RunningImport, asyncio.Task[None]] = {}
        self.outcomes: Counter[str] = Counter()
        # By path: bytes and blocks that came, whether they counted or not.
        self.num_bytes: Counter[str] = Counter()
        self.num_blocks: Counter[str] = Counter()
        # By path and reason.
        self.failures: Counter[tuple[str, str]] = Counter()

    def __len__(self) -> int:
        return len(self._running)

    def deadline_seconds(self, asked: float | None) -> float:
        """What an import gets that asked for so long. InvalidArgument if it is too long."""
        limit = self._node.transfer_policy.import_seconds_max
        if asked is None:
            return limit
        if not 0.0 < asked <= limit:
            raise InvalidArgument(
                f"an import has above 0 and at most {limit:g} seconds, not {asked:g}",
                field="deadline_seconds",
            )
        return asked

    def start(
        self,
        found: Import,
        *,
        paths: Sequence[pb.TransferPath],
        checksums: bool,
        deadline_seconds: float,
    ) -> RunningImport:
        """Run an import that has begun in the books."""
        running = RunningImport(found, deadline_seconds)
        job = ImportJob(
            peer=found.peer,
            fingerprint=self._node.pool.fingerprint,
            groups=[
                ImportGroup(group.group, *group.wanted()) for group in found.groups if group.asked
            ],
            paths=paths,
            checksums=checksums,
            contents=found.request is None,
            deadline_seconds=deadline_seconds,
            take=None if found.request is not None else partial(self._take, found),
        )
        task = asyncio.ensure_future(self._run(running, job))
        running.run(task)
        self._running[running] = task
        task.add_done_callback(lambda _: self._never_ran(running, job))
        return running

    async def close(self, seconds: float) -> None:
        """Stop all, and wait for their ends, at most so long."""
        for running in self._running:
            running.stop()
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=seconds)

    def stop_all(self) -> None:
        """Have all end soon."""
        for running in self._running:
            running.stop()

    def listed(self) -> list[ListedTransfer]:
        """Every one that runs, oldest first."""
        now = time.monotonic()
        config = self._node.depot.config
        group_bytes = [config.num_ranks * group.block_bytes for group in config.kv_cache.groups]
        return [
            ListedTransfer(
                running.found.import_id[:ID_SHOWN],
                running.found.peer,
                is_import=True,
                age_seconds=now - running.began_at,
                lease_remaining_seconds=max(0.0, running.began_at + running.deadline_seconds - now),
                num_blocks=sum(len(group.running) for group in running.found.groups),
                num_bytes=sum(
                    group_bytes[group.group] * len(group.running) for group in running.found.groups
                ),
                num_blocks_done=running.progress.num_blocks,
                num_bytes_done=running.progress.num_bytes,
            )
            for running in self._running
        ]

    # --- one import -------------------------------------------------------------------

    async def _run(self, running: RunningImport, job: ImportJob) -> None:
        report: ImportReport | None = None
        error: Exception | None = None
        if job.groups:
            watchdog = asyncio.get_running_loop().call_later(
                job.deadline_seconds + _SLACK_SECONDS, running.stop
            )
            iterator = self._node.require_data_plane().import_blocks(job)
            try:
                async for item in iterator:
                    if isinstance(item, ImportReport):
                        report = item
                    else:
                        running.progress = item
                        running.tell()
                    if running.is_stopped:
                        break  # asyncio.wait_for loses a cancellation that comes with an item
            except asyncio.CancelledError:
                pass  # told to stop; it has, once the iterator has ended
            except Exception as caught:
                error = caught
            finally:
                watchdog.cancel()
                await _ended(iterator)
        filled = None if report is None else await _filled(job, report)
        self._finish(running, job, report, error, filled)

    def _take(self, found: Import, ready: Mapping[int, Ready]) -> Mapping[int, Sequence[int]]:
        """The peer has said what it has."""
        try:
            return self._node.depot.imports.take(found, ready)
        finally:
            self._node.publish()

    def _never_ran(self, running: RunningImport, job: ImportJob) -> None:
        """It was stopped before its first step."""
        if running in self._running:
            self._finish(running, job, None, None, None)

    def _finish(
        self,
        running: RunningImport,
        job: ImportJob,
        report: ImportReport | None,
        error: Exception | None,
        filled: Mapping[int, Sequence[Filled]] | None,
    ) -> None:
        """The iterator has ended: no byte can land any more."""
        node = self._node
        del self._running[running]
        try:
            result = node.depot.imports.finish(running.found, filled)
        finally:
            node.publish()
        self._count(running, result, report, error)
        if report is not None:
            running.progress = ImportProgress(report.num_blocks, report.num_bytes, report.path)
            running.failures = report.failures
        if error is not None:
            running.error = error
        elif report is None and job.groups and running.is_stopped:
            running.error = Unavailable(
                "the import was stopped",
                reason="DRAINING" if node.draining_streams else "IMPORT_STOPPED",
                retryable=True,
            )
        else:
            running.result = result
        running.tell()

    def _count(
        self,
        running: RunningImport,
        result: ImportResult,
        report: ImportReport | None,
        error: Exception | None,
    ) -> None:
        statuses = Counter[int]()
        for column in result.statuses.values():
            statuses.update(column)
        here = statuses[ImportStatus.IMPORTED] + statuses[ImportStatus.PRESENT]
        if error is not None:
            outcome = "refused"
            reason = error.reason if isinstance(error, KVDepotError) else "INTERNAL"
            self.failures["unknown", _counted(reason)] += 1
        elif here == statuses.total():
            outcome = "complete"
        elif running.is_stopped:
            outcome = "cancelled"
        else:
            outcome = "partial" if here else "nothing"
        self.outcomes[outcome] += 1
        if report is not None:
            path = path_name(report.path)
            self.num_bytes[path] += report.num_bytes
            self.num_blocks[path] += report.num_blocks
            for failure in report.failures:
                self.failures[path_name(failure.path), _counted(failure.reason)] += 1


def path_name(path: int) -> str:
    """A path as a label: mapping, nixl, grpc, or unknown."""
    if path not in (pb.TRANSFER_PATH_MAPPING, pb.TRANSFER_PATH_NIXL, pb.TRANSFER_PATH_GRPC):
        return "unknown"
    return pb.TransferPath.Name(path).removeprefix("TRANSFER_PATH_").lower()


def _counted(reason: str) -> str:
    """The first known reason that a text names, or "other": labels are few."""
    for word in re.findall(r"[A-Z][A-Z_]+", reason):
        if word in FAILURE_REASONS:
            return str(word).lower()
    return "other"


async def _filled(job: ImportJob, report: ImportReport) -> Mapping[int, Sequence[Filled]]:
    """The report, as the core takes it. What it does not say has failed.

    Others have their turn meanwhile; it is not cut short by a cancellation.
    """
    filled: dict[int, Sequence[Filled]] = {}
    for group in job.groups:
        told = report.statuses.get(group.group, b"").ljust(len(group.hashes), b"\0")
        contents = iter(report.contents.get(group.group, ()))
        entries: list[Filled] = []
        for status, block_hash in zip(told, group.hashes, strict=False):
            if status == pb.IMPORT_STATUS_IMPORTED and job.contents:
                content = imported_content(next(contents, pb.BlockContent()), block_hash)
                entries.append(Filled(ImportStatus.IMPORTED, content))
            else:
                entries.append(_FROM_THE_PEER.get(status, _FAILED))
            if len(entries) % _TURN_BLOCKS == 0:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
        filled[group.group] = entries
    return filled


async def _ended(iterator: AsyncIterator[object]) -> None:
    """Wait until an iterator has ended, however often this task is cancelled meanwhile."""
    close = getattr(iterator, "aclose", None)
    if close is None:
        return
    closing = asyncio.ensure_future(close())
    while not closing.done():
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            continue
        except Exception:
            logger.exception("an import did not end well")
