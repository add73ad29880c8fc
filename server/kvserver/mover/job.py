"""One import: asks the peer, copies by the first way that works, and says what came."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from queue import Empty, SimpleQueue

import numpy as np

import kvclient.errors
import kvcore.errors
from kvcore.memory import Span
from kvdepot.v1 import transfer_pb2 as pb
from kvdepot.v1 import types_pb2
from kvserver.contents import chosen, misfit, num_told
from kvserver.mover import mapping, reading, stream
from kvserver.mover.channel import Message
from kvserver.mover.copying import Copy, PathFailed, Stopped, Stuck, Task
from kvserver.mover.importer import Importer
from kvserver.mover.lease import Lease
from kvserver.mover.opening import Opening
from kvserver.mover.parts import Part
from kvserver.mover.peer import Peer

logger = logging.getLogger(__name__)

MAPPING, NIXL, GRPC = (
    pb.TRANSFER_PATH_MAPPING,
    pb.TRANSFER_PATH_NIXL,
    pb.TRANSFER_PATH_GRPC,
)
BEST_FIRST = (MAPPING, NIXL, GRPC)
# Of the deadline, for closing the transfer.
_CLOSE_SHARE, _CLOSE_SECONDS_MAX = 0.1, 1.0
_ID_BYTES, _SUM_BYTES = 4, 8
# Before a peer that did not vouch is asked again.
_PAUSE_SECONDS = 0.05
# What the node is told of a block by its BlockStatus, if its bytes have not come.
_TOLD = np.full(max(pb.BlockStatus.values()) + 2, pb.IMPORT_STATUS_FAILED, np.uint8)
_TOLD[pb.BLOCK_STATUS_PENDING] = pb.IMPORT_STATUS_PENDING
_TOLD[pb.BLOCK_STATUS_MISSING] = pb.IMPORT_STATUS_MISSING
_REFUSED = (kvclient.errors.KVDepotError, kvcore.errors.KVDepotError)


class Job:
    """Runs in a thread of its own; ``stop`` comes from another."""

    def __init__(self, importer: Importer, message: Message, send: Callable[..., None]) -> None:
        self._importer = importer
        self._send = send
        self._job: int = message["job"]
        self._groups = [
            (group["group"], group["hashes"], array("I", group["ids"]))
            for group in message["groups"]
        ]
        # Those that are allowed and have not failed, in order.
        self._paths = [path for path in message["paths"] or BEST_FIRST if path in BEST_FIRST]
        self._fingerprint: str = message["fingerprint"]
        self._checksums: bool = message["checksums"]
        self._contents: bool = message["contents"]
        self._takes: bool = message["takes"]
        # Block ids by group, once the node has taken them; None: stop.
        self._given: SimpleQueue[dict[int, list[int]] | None] = SimpleQueue()
        self._ends_at: float = time.monotonic() + message["deadline"]
        self._copy_until = self._ends_at - min(
            _CLOSE_SECONDS_MAX, _CLOSE_SHARE * message["deadline"]
        )
        self._stopped = threading.Event()
        self._path = pb.TRANSFER_PATH_UNSPECIFIED
        self._peer = Peer(message["peer"], importer.channels)
        self._opening = Opening(
            self._peer,
            importer.leases,
            [(group, hashes) for group, hashes, _ in self._groups],
            importer.parts(
                {group: len(hashes) for group, hashes, _ in self._groups}, contents=self._contents
            ),
            fingerprint=self._fingerprint,
            contents=self._contents,
            checksums=self._checksums,
            seconds_left=self._seconds_left,
        )
        # The node wants nothing more of it, but what has come.
        self._enough = False
        self._num_blocks = self._num_bytes = self._num_parts = 0
        # Of the blocks and bytes so far: a part may turn out not to count, but nobody is told less.
        self._told_blocks = self._told_bytes = 0
        # By path and why, each once.
        self._failures: dict[tuple[int, str], None] = {}
        self._num_bad: Counter[int] = Counter()

    def stop(self) -> None:
        """End it soon."""
        self._stopped.set()
        self._given.put(None)
        self._peer.stop()

    def give(self, ids: dict[int, list[int]] | None) -> None:
        """The blocks to fill with what the peer has; None: that is enough."""
        self._enough = ids is None
        self._given.put(ids or {})

    def run(self) -> None:
        """The import; its last word is its report, or why there is none."""
        try:
            with self._peer:
                self._send(op="report", job=self._job, **self._run())
        except Stuck:
            self._send(op="stuck", job=self._job)
        except Exception as error:
            self._send(op="error", job=self._job, **self._told(error))

    def _told(self, error: Exception) -> Message:
        if self._stopped.is_set():
            error = kvcore.errors.Unavailable("the import was stopped", reason="STOPPED")
        if isinstance(error, kvclient.errors.KVDepotError | kvcore.errors.KVDepotError):
            return {
                "kind": type(error).__name__,
                "message": f"the peer {self._peer.target}: {error.message}",
                "reason": error.reason,
                "field": error.field,
                "retryable": error.retryable,
            }
        logger.error("an import from %s failed", self._peer.target, exc_info=error)
        message = f"the import from {self._peer.target} failed; the log says why"
        fields = {"reason": "INTERNAL", "field": "", "retryable": False}
        return {"kind": "Unavailable", "message": message, **fields}

    def _run(self) -> Message:
        try:
            with closing(self._opening.opened()) as opened:
                for part, lease in opened:
                    self._fill(part, lease)
                    if not self._paths or self._enough:
                        break
        except _REFUSED as error:
            # What came before, counts.
            if self._stopped.is_set() or not self._num_parts:
                raise
            self._fail(pb.TRANSFER_PATH_UNSPECIFIED, f"{error.reason}: {error.message}")
        return self._report()

    def _fail(self, path: int, reason: str) -> None:
        self._failures[path, reason] = None

    # --- parts ------------------------------------------------------------------------

    def _fill(self, part: Part, lease: Lease) -> None:
        """Copy a part by the first way that works, and close its transfer."""
        opened = lease.opened
        valid = False
        try:
            described = self._importer.pool_of(self._peer, opened.epoch, self._seconds_left())
            pool = described.pool
            if self._fingerprint not in ("", pool.fingerprint):
                raise kvcore.errors.FailedPrecondition(
                    "its pool has another fingerprint than ours",
                    reason="FINGERPRINT_MISMATCH",
                    field="peer",
                )
            try:
                spans = described.spans
            except kvcore.errors.InvalidArgument as error:
                raise _bad_peer(error.message) from None
            copies = self._copies(part, opened, pool, spans)
            task = self._task(pool, lease, copies)
            self._try_all(task)
            # Before the peer vouches for it, so that the node reads it meanwhile.
            self._say(part, task, opened)
        finally:
            try:
                self._close(lease)
                valid = True
            except kvclient.errors.KVDepotError as error:
                self._fail(self._path, f"CloseTransfer: {error.reason}: {error.message}")
        if valid:
            self._num_blocks += task.num_blocks
            self._num_bytes += task.num_bytes
        self._send(
            op="vouched",
            job=self._job,
            valid=valid,
            blocks=self._num_blocks,
            bytes=self._num_bytes,
            path=self._path,
        )
        self._num_parts += 1

    def _close(self, lease: Lease) -> None:
        """Asked again while there is time: else a peer that stood still for a second loses all."""
        while True:
            seconds = max(0.2, self._ends_at - time.monotonic())
            try:
                lease.close(min(_CLOSE_SECONDS_MAX, seconds))
            except kvclient.errors.DeadlineExceeded:
                if self._stopped.wait(_PAUSE_SECONDS) or time.monotonic() >= self._ends_at:
                    raise
            else:
                return

    def _say(self, part: Part, task: Task, opened: pb.OpenTransferResponse) -> None:
        """What has come of a part, if the peer vouches for it."""
        statuses, contents = {}, {}
        for copy, answer, (_, hashes, _), (begin, _) in zip(
            task.copies, opened.groups, self._groups, part.ranges, strict=True
        ):
            found = np.frombuffer(answer.statuses, np.uint8)
            told = _TOLD[np.minimum(found, len(_TOLD) - 1)]
            came = copy.positions[copy.done]
            told[came] = pb.IMPORT_STATUS_IMPORTED
            runs: Sequence[pb.ContentRun] = answer.contents
            if self._contents and len(came) < num_told(runs):
                ready = np.flatnonzero(found == pb.BLOCK_STATUS_READY)
                is_done = np.isin(ready, came).tolist()
                runs = chosen(runs, [hashes[begin + at] for at in ready], is_done)
            contents[copy.group] = pb.GroupBlocks(contents=runs).SerializeToString()
            statuses[copy.group] = told.tobytes()
        self._send(
            op="part",
            job=self._job,
            first={
                group: begin
                for (group, *_), (begin, _) in zip(self._groups, part.ranges, strict=True)
            },
            statuses=statuses,
            contents=contents if self._contents else {},
        )

    def _seconds_left(self) -> float:
        left = self._ends_at - time.monotonic()
        if self._stopped.is_set():
            raise Stopped
        if left <= 0:
            raise _too_late("did not answer within the import's deadline")
        return left

    # --- what to copy, and how --------------------------------------------------------

    def _copies(
        self,
        part: Part,
        opened: pb.OpenTransferResponse,
        peer_pool: types_pb2.PoolDescription,
        spans: Sequence[Sequence[Span]],
    ) -> list[Copy]:
        """One a group. FailedPrecondition when the peer answers what cannot be."""
        found = []
        if len(opened.groups) != len(self._groups):
            raise _bad_peer(f"it is of {len(opened.groups)} groups")
        for (group, _, ids), (begin, end), answer in zip(
            self._groups, part.ranges, opened.groups, strict=True
        ):
            if len(answer.block_ids) != _ID_BYTES * len(answer.statuses):
                break
            statuses = np.frombuffer(answer.statuses, np.uint8)
            sources = np.frombuffer(answer.block_ids, "<u4").astype(np.int64)
            positions = np.flatnonzero(statuses == pb.BLOCK_STATUS_READY)
            if (
                answer.group != group
                or not len(statuses) == len(sources) == end - begin
                or group >= len(spans)
                or (len(sources) and sources.max() >= peer_pool.num_blocks)
                or not sources[positions].all()
            ):
                break
            if self._contents and (
                why := misfit(answer.contents, len(positions), self._importer.token_bytes(group))
            ):
                raise _bad_peer(why)
            if len(answer.checksums) not in (0, _SUM_BYTES * len(positions)):
                raise _bad_peer(f"checksums are {len(answer.checksums)} bytes")
            # What is not known, is 0.
            sums = np.zeros(len(statuses), np.uint64)
            if answer.checksums:
                sums[positions] = np.frombuffer(answer.checksums, "<u8")
            found.append((group, positions, sources, ids[begin:end], statuses, sums))
        if len(found) != len(self._groups):
            raise _bad_peer("statuses or block_ids are of other blocks")
        taken: dict[int, list[int]] = {}
        if self._takes and any(len(positions) for _, positions, *_ in found):
            taken = self._take(
                {
                    group: (begin, (statuses == pb.BLOCK_STATUS_READY).tobytes())
                    for (group, *_, statuses, _), (begin, _) in zip(found, part.ranges, strict=True)
                }
            )
        copies = []
        for group, positions, sources, ids, _, sums in found:
            destinations = np.array(taken.get(group, ids), np.int64)
            if self._enough:
                destinations[:] = 0
            positions = positions[destinations[positions] != 0]
            copies.append(
                Copy(
                    group,
                    positions,
                    sources[positions],
                    destinations[positions],
                    np.zeros(len(positions), bool),
                    sums[positions],
                    spans[group],
                    self._importer.store.spans[group],
                    self._importer.store.block_bytes[group],
                )
            )
        return copies

    def _take(self, ready: dict[int, tuple[int, bytes]]) -> dict[int, list[int]]:
        """Has the node take blocks for what is ready, of each group from some hash on."""
        self._send(op="found", job=self._job, ready=ready)
        try:
            taken = self._given.get(timeout=self._seconds_left())
        except Empty:
            why = "no blocks were taken for what it has within the import's deadline"
            raise _too_late(why) from None
        if taken is None:
            raise Stopped
        return taken

    def _task(
        self,
        peer_pool: types_pb2.PoolDescription,
        lease: Lease,
        copies: Sequence[Copy],
    ) -> Task:
        def progress(num_blocks: int, num_bytes: int) -> None:
            self._told_blocks = max(self._told_blocks, self._num_blocks + num_blocks)
            self._told_bytes = max(self._told_bytes, self._num_bytes + num_bytes)
            self._send(
                op="progress",
                job=self._job,
                blocks=self._told_blocks,
                bytes=self._told_bytes,
                path=self._path,
            )

        return Task(
            self._peer,
            peer_pool,
            lease,
            copies,
            store=self._importer.store,
            bucket=self._importer.bucket,
            num_copiers=self._importer.num_copiers,
            checksums=self._checksums,
            until=self._copy_until,
            stopped=self._stopped,
            progress=progress,
        )

    def _try_all(self, task: Task) -> None:
        """Copy by one path after the other, until all is here."""
        lacking = {}
        for path, lacks, run in self._ways(task):
            if task.is_over():
                return
            if why := lacks():
                lacking[path] = why
            else:
                self._try(path, run, task)
        if not task.is_over():
            for path, why in lacking.items():
                self._fail(path, f"NOT_OFFERED: {why}")

    def _ways(
        self, task: Task
    ) -> Iterator[tuple[pb.TransferPath, Callable[[], str], Callable[[], None]]]:
        """The paths left, in order: what one of the sides lacks for it, if any, and its copy."""
        importer, reach = self._importer, task.reach

        def nixl_lacks() -> str:
            if not (reach.nixl_agent and reach.nixl_regions):
                return "the peer has no NIXL agent now"
            return "" if importer.agent().offered else "NIXL is not to be had here"

        ways: dict[int, tuple[Callable[[], str], Callable[[], None]]] = {
            MAPPING: (
                lambda: mapping.lacks(task),
                lambda: mapping.run(task, importer.peer_files, importer.copiers),
            ),
            NIXL: (nixl_lacks, lambda: reading.run(task, importer.agent())),
            GRPC: (
                lambda: "" if reach.data_address else "the peer has no data address",
                lambda: stream.run(task),
            ),
        }
        for path in list(self._paths):
            yield (path, *ways[path])

    def _try(self, path: pb.TransferPath, run: Callable[[], None], task: Task) -> None:
        """Copy by one path. One that fails is not tried again, unless the part's lease did."""
        self._path = path
        task.num_bad = 0
        failure: str | None = None
        try:
            run()
        except PathFailed as failed:
            failure = str(failed)
        except _REFUSED as error:
            if self._stopped.is_set():
                raise Stopped from None
            failure = f"{error.reason}: {error.message}"
        if failure is not None:
            self._fail(path, failure)
            if not task.lease.lost:
                self._paths.remove(path)
        self._num_bad[path] += task.num_bad

    def _report(self) -> Message:
        for path, num_bad in self._num_bad.items():
            if num_bad:
                self._fail(path, f"CHECKSUM_MISMATCH: of {num_bad} blocks, other bytes came")
        return {
            "blocks": self._num_blocks,
            "bytes": self._num_bytes,
            "path": self._path,
            "failures": [list(failure) for failure in self._failures],
        }


def _bad_peer(why: str) -> kvcore.errors.FailedPrecondition:
    return kvcore.errors.FailedPrecondition(
        f"its answer does not fit what was asked for: {why}", reason="BAD_PEER", field="peer"
    )


def _too_late(message: str) -> kvcore.errors.Unavailable:
    return kvcore.errors.Unavailable(message, reason="DEADLINE_EXCEEDED", retryable=True)
