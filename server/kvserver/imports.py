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
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvcore.content_run import ContentRun
from kvcore.errors import InvalidArgument, KVDepotError, Unavailable
from kvcore.import_job import Filled, Import, ImportResult, ImportStatus, Ready
from kvcore.transfer import ID_SHOWN
from kvdepot.v1 import transfer_pb2 as pb
from kvserver.contents import content_run
from kvserver.data_plane import (
    ImportGroup,
    ImportJob,
    ImportPart,
    ImportProgress,
    ImportReport,
)
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
        *("STALLED", "BAD_PEER", "MAPPING_TRUNCATED", "NO_MEMORY", "STOPPED", "NOT_OFFERED"),
    )
)
# What an import that is over its deadline gets beyond what the data plane allows it.
_SLACK_SECONDS = 10.0
# Of a part, before others have their turn: a millisecond or two.
_TURN_BLOCKS = 1024
_IMPORTED = bytes([ImportStatus.IMPORTED])


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
        self._stopped = self._cut_short = False
        self._news = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether no byte can land any more."""
        return self.result is not None or self.error is not None

    @property
    def is_stopped(self) -> bool:
        """Whether it was told to stop."""
        return self._stopped

    @property
    def is_cut_short(self) -> bool:
        """Whether it was told to stop, and to answer with what had come."""
        return self._cut_short

    def run(self, work: asyncio.Task[None]) -> None:
        """``work`` is what runs it."""
        self._task = work

    def stop(self) -> None:
        """Have it end soon; whoever waits for it is told when it has."""
        # Once: a second time would cut short the ending itself.
        if not self._stopped and self._task is not None:
            self._stopped = True
            self._task.cancel()

    def cut_short(self) -> None:
        """Have it end soon, with what has come."""
        self._cut_short = self._cut_short or not self._stopped
        self.stop()

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

    async def begin(self, beginning: Generator[Import, None, Import]) -> Import:
        """What ``beginning`` returns; others between its parts.

        Nothing is left of it if it fails, the call is cancelled, or the server has meanwhile
        waited long enough for what there was to end.
        """
        found: Import | None = None
        try:
            while True:
                try:
                    found = next(beginning)
                except StopIteration as done:
                    begun: Import = done.value
                    return begun
                await asyncio.sleep(0)
                self._node.require_streams()
        except BaseException:
            if found is not None:
                self._node.depot.imports.finish(found)
                self._node.publish()
            raise

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

    def cut_void_short(self) -> None:
        """There may have been a reset: of what it was for, nothing more is brought."""
        generation = self._node.depot.generation
        for running in self._running:
            found = running.found
            if found.request is None and found.generation != generation:
                running.cut_short()

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
                    if isinstance(item, ImportPart):
                        await self._fill(running.found, item)
                    elif isinstance(item, ImportReport):
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
        await _turns(self._node.depot.imports.release(running.found))
        self._finish(running, job, report, error)

    def _take(
        self, found: Import, ready: Mapping[int, Ready]
    ) -> Mapping[int, Sequence[int]] | None:
        """The peer has said what it has."""
        imports = self._node.depot.imports
        try:
            taken = imports.take(found, ready)
            return None if imports.is_void(found) else taken
        finally:
            self._node.publish()

    async def _fill(self, found: Import, part: ImportPart) -> None:
        """A part has come. Others have their turn meanwhile, as its blocks are registered."""
        imports = self._node.depot.imports
        for group, statuses in part.statuses.items():
            first = part.first[group]
            for some, contents in _slices(statuses, part.contents.get(group, ())):
                try:
                    imports.fill(found, {group: Filled(first, some, contents)})
                finally:
                    self._node.publish()
                first += len(some)
                await _turn()

    def _never_ran(self, running: RunningImport, job: ImportJob) -> None:
        """It was stopped before its first step."""
        if running in self._running:
            for _ in self._node.depot.imports.release(running.found):
                pass
            self._finish(running, job, None, None)

    def _finish(
        self,
        running: RunningImport,
        job: ImportJob,
        report: ImportReport | None,
        error: Exception | None,
    ) -> None:
        """The iterator has ended: no byte can land any more."""
        node = self._node
        del self._running[running]
        try:
            result = node.depot.imports.end(running.found)
        finally:
            node.publish()
        self._count(running, result, report, error)
        if report is not None:
            running.progress = ImportProgress(report.num_blocks, report.num_bytes, report.path)
            running.failures = report.failures
        if error is not None:
            running.error = error
        elif report is None and job.groups and running.is_stopped and not running.is_cut_short:
            running.error = Unavailable(
                "the import was stopped",
                reason="DRAINING" if node.draining_streams else "IMPORT_STOPPED",
                retryable=True,
            )
        else:
            running.result = result
            if running.is_cut_short:
                reason = "RESET: this server's cache was reset meanwhile"
                running.failures = [*running.failures, pb.PathFailure(reason=reason)]
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


def _slices(
    statuses: bytes, contents: Sequence[pb.ContentRun]
) -> Iterator[tuple[bytes, list[ContentRun]]]:
    """A part cut in slices that do not take long, each with what is known of its blocks."""
    at, runs, num_blocks = 0, iter(contents), 0
    slice_runs: list[ContentRun] = []
    for message in runs:
        slice_runs.append(content_run(message))
        num_blocks += message.num_blocks
        if num_blocks >= _TURN_BLOCKS:
            end = _end_of(statuses, at, num_blocks)
            yield statuses[at:end], slice_runs
            at, num_blocks, slice_runs = end, 0, []
    if at < len(statuses):
        yield statuses[at:], slice_runs


def _end_of(statuses: bytes, at: int, num_imported: int) -> int:
    """Behind the so manieth imported one from ``at`` on."""
    if statuses.count(_IMPORTED, at, at + num_imported) == num_imported:
        return at + num_imported
    for _ in range(num_imported):
        at = statuses.index(_IMPORTED, at) + 1
    return at


async def _turns(work: Iterator[None]) -> None:
    """Do ``work``, others between its parts."""
    for _ in work:
        await _turn()


async def _turn() -> None:
    """Let others have their turn; a cancellation that comes meanwhile has been seen already."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


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
