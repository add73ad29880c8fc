"""Imports, as the node sees them: jobs of a process that is killed when one of them hangs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import subprocess
import time
from collections.abc import AsyncIterator
from typing import Any

from kvcore import errors
from kvcore.import_job import Ready
from kvdepot.v1 import transfer_pb2 as pb
from kvserver.data_plane import ImportJob, ImportNews, ImportPart, ImportProgress, ImportReport
from kvserver.mover.channel import Message
from kvserver.mover.child import COPYING, Child

logger = logging.getLogger(__name__)

MODULE = "kvserver.mover.importing"
# What an import gets beyond its deadline, and one that is to stop, to end by itself.
_GRACE_SECONDS = 1.0
_STOP_SECONDS = 2.0
# What the node, when it stops, waits for a process that was killed.
_END_SECONDS = 15.0
# Statuses of a part that the peer does not vouch for.
_LOST = bytes.maketrans(bytes([pb.IMPORT_STATUS_IMPORTED]), bytes([pb.IMPORT_STATUS_FAILED]))


class _Process:
    """One life of the importing process, and the imports that run in it."""

    def __init__(self, child: Child) -> None:
        self.child = child
        # Of messages by job; None: the process is gone.
        self.inboxes: dict[int, asyncio.Queue[Message | None]] = {}
        self.gone = asyncio.Event()
        # The import on whose account it was killed.
        self.killed_for: int | None = None
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            while (message := await self.child.receive()) is not None:
                if (inbox := self.inboxes.get(message.get("job", 0))) is not None:
                    inbox.put_nowait(message)
        except Exception:
            logger.exception("what the process of the imports says is not understood")
        if self.killed_for is None:
            logger.error("the process of the imports (pid %d) has ended", self.child.pid)
        while True:
            try:
                await self.child.end()
                break
            except subprocess.TimeoutExpired:  # as long as it is there, its bytes may land
                logger.error("the process of the imports (pid %d) does not end", self.child.pid)
        self.gone.set()
        for inbox in self.inboxes.values():
            inbox.put_nowait(None)

    async def kill(self, job: int) -> None:
        """End it on account of ``job``; it is gone when this returns."""
        if self.killed_for is None and not self.gone.is_set():
            self.killed_for = job
            logger.warning("import %d hangs: its process (pid %d) is killed", job, self.child.pid)
            self.child.kill()
        await self.gone.wait()

    async def end(self) -> None:
        """End it for good."""
        self.killed_for = 0
        self.child.kill()
        await asyncio.wait([self._reading], timeout=_END_SECONDS)


class Imports:
    """Runs imports; starts the process for the first one, and after it was killed."""

    def __init__(self, start: Message) -> None:
        self._start = start
        self._numbers = itertools.count(1)
        self._process: _Process | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    async def close(self) -> None:
        """End the process; imports that run are reported failed."""
        self._closed = True
        async with self._starting:
            if self._process is not None:
                await self._process.end()

    async def run(self, job: ImportJob) -> AsyncIterator[ImportNews]:
        """As DataPlane.import_blocks."""
        number = next(self._numbers)
        ends_at = time.monotonic() + job.deadline_seconds
        came = _Came(job)
        while True:
            process = await self._running()
            inbox: asyncio.Queue[Message | None] = asyncio.Queue()
            process.inboxes[number] = inbox
            process.child.send(**came.message(number, ends_at - time.monotonic()))
            ended = hung = False
            try:
                while (message := await _within(inbox, ends_at + _GRACE_SECONDS)) is not None:
                    ended = message["op"] in ("report", "error")
                    if message["op"] == "progress":
                        yield came.progress(message)
                    elif message["op"] == "found":
                        process.child.send(op="blocks", job=number, ids=came.take(message))
                    elif message["op"] == "part":
                        came.hear(message)
                    elif message["op"] == "vouched":
                        yield came.part(message)
                    elif message["op"] == "report":
                        yield came.report(message)
                        return
                    elif message["op"] == "error":
                        if came.has_some:  # of a process before: it counts
                            yield came.cut_short(f"{message['reason']}: {message['message']}")
                            return
                        raise _error(message)
                    else:  # stuck
                        break
                hung = True
            finally:
                if hung:
                    await _for_certain(process.kill(number))
                elif not ended:
                    await _for_certain(self._stop(process, number, inbox))
                del process.inboxes[number]
            if process.killed_for in (None, number) or self._closed or time.monotonic() > ends_at:
                yield came.cut_short("the process that copied was ended")
                return
            # It was killed on account of another: another process does the rest.
            came.begin_again()

    async def _stop(
        self, process: _Process, number: int, inbox: asyncio.Queue[Message | None]
    ) -> None:
        """No byte of the import can land any more."""
        process.child.send(op="stop", job=number)
        until = time.monotonic() + _STOP_SECONDS
        with contextlib.suppress(asyncio.TimeoutError):
            while (message := await _until(inbox, until)) is not None:
                if message["op"] in ("report", "error"):
                    return
                if message["op"] == "stuck":
                    break
        await process.kill(number)

    async def _running(self) -> _Process:
        async with self._starting:
            if self._closed:
                raise errors.Unavailable(
                    "the server is stopping", reason="DRAINING", retryable=True
                )
            if (
                self._process is None
                or self._process.killed_for is not None
                or (self._process.gone.is_set())
            ):
                child = await Child.spawn(MODULE, COPYING)
                child.send(**self._start)
                self._process = _Process(child)
            return self._process


async def _until(inbox: asyncio.Queue[Message | None], until: float) -> Message | None:
    with contextlib.suppress(asyncio.QueueEmpty):
        return inbox.get_nowait()  # wait_for without time left takes nothing
    return await asyncio.wait_for(inbox.get(), max(0.0, until - time.monotonic()))


async def _within(inbox: asyncio.Queue[Message | None], until: float) -> Message | None:
    """The next message; None as well when the time is over."""
    try:
        return await _until(inbox, until)
    except asyncio.TimeoutError:
        return None


async def _for_certain(work: Any) -> None:
    """Finish ``work``, however often this task is cancelled meanwhile."""
    doing = asyncio.ensure_future(work)
    cancelled = False
    while not doing.done():
        try:
            await asyncio.shield(doing)
        except asyncio.CancelledError:
            cancelled = True
    doing.result()
    if cancelled:
        raise asyncio.CancelledError


class _Came:
    """What has come of an import, whichever processes it ran in."""

    def __init__(self, job: ImportJob) -> None:
        self._job = job
        # Of each group, the hashes that are told of, and those that were when the process began.
        self._done = {group.group: 0 for group in job.groups}
        self._began = dict(self._done)
        # Of parts that counted; and of those of processes before.
        self._blocks = self._bytes = self._blocks_before = self._bytes_before = 0
        self._path = pb.TRANSFER_PATH_UNSPECIFIED
        self._heard: ImportPart | None = None

    @property
    def has_some(self) -> bool:
        """Whether processes before have told of some hashes."""
        return any(self._began.values())

    def begin_again(self) -> None:
        """What has come, stays."""
        self._began = dict(self._done)
        self._blocks_before, self._bytes_before = self._blocks, self._bytes

    def message(self, number: int, deadline: float) -> Message:
        """To a process: what is left to do."""
        job = self._job
        return {
            "op": "import",
            "job": number,
            "peer": job.peer,
            "fingerprint": job.fingerprint,
            "groups": [
                {
                    "group": group.group,
                    "hashes": list(group.hashes[self._began[group.group] :]),
                    "ids": list(group.block_ids[self._began[group.group] :]),
                }
                for group in job.groups
            ],
            "paths": [int(path) for path in job.paths],
            "checksums": job.checksums,
            "contents": job.contents,
            "takes": job.take is not None,
            "deadline": deadline,
        }

    def take(self, message: Message) -> dict[int, list[int]] | None:
        """The blocks for what the peer has; None: it is to end."""
        assert self._job.take is not None
        taken = self._job.take(
            {
                group: Ready(first + self._began[group], is_ready)
                for group, (first, is_ready) in message["ready"].items()
            }
        )
        if taken is None:
            return None
        return {group: list(column) for group, column in taken.items()}

    def progress(self, message: Message) -> ImportProgress:
        self._path = message["path"]
        return ImportProgress(
            message["blocks"] + self._blocks_before,
            message["bytes"] + self._bytes_before,
            message["path"],
        )

    def hear(self, message: Message) -> None:
        """A part that counts if it is vouched for, of which the next message is."""
        self._heard = ImportPart(
            {group: at + self._began[group] for group, at in message["first"].items()},
            message["statuses"],
            {
                group: pb.GroupBlocks.FromString(told).contents
                for group, told in message["contents"].items()
            },
        )

    def part(self, message: Message) -> ImportPart:
        """That one."""
        heard, self._heard = self._heard, None
        assert heard is not None
        progress = self.progress(message)
        self._blocks, self._bytes = progress.num_blocks, progress.num_bytes
        for group, told in heard.statuses.items():
            self._done[group] = heard.first[group] + len(told)
        if message["valid"]:
            return heard
        failed = {group: told.translate(_LOST) for group, told in heard.statuses.items()}
        return ImportPart(heard.first, failed, {})

    def report(self, message: Message) -> ImportReport:
        progress = self.progress(message)
        failures = [
            pb.PathFailure(path=path, reason=reason) for path, reason in message["failures"]
        ]
        return ImportReport(progress.num_blocks, progress.num_bytes, progress.path, failures)

    def cut_short(self, reason: str) -> ImportReport:
        """What had come by then, counts."""
        failures = [pb.PathFailure(path=self._path, reason=reason)]
        return ImportReport(self._blocks, self._bytes, self._path, failures)


def _error(message: Message) -> errors.KVDepotError:
    """The core's error of that name; what has none there is Unavailable."""
    text, reason, field = message["message"], message["reason"], message["field"]
    if message["kind"] == "InvalidArgument":
        return errors.InvalidArgument(text, field=field, reason=reason)
    kinds = (
        *(errors.NotFound, errors.AlreadyExists, errors.FailedPrecondition),
        *(errors.ResourceExhausted, errors.OutOfRange, errors.DataLoss),
    )
    kind = {kind.__name__: kind for kind in kinds}.get(message["kind"], errors.Unavailable)
    return kind(text, reason=reason, field=field, retryable=message["retryable"])
