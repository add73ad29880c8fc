"""One import: asks the peer, copies by the first way that works, and says what came."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue

import numpy as np

import kvclient.errors
import kvcore.errors
from kvdepot.v1 import transfer_pb2 as pb
from kvdepot.v1 import types_pb2
from kvserver.mover import mapping, reading, stream
from kvserver.mover.bucket import Bucket
from kvserver.mover.channel import Message
from kvserver.mover.copying import Copy, PathFailed, Stopped, Stuck, Task
from kvserver.mover.nixl import ReadingAgent
from kvserver.mover.pages import PoolFile, Span, spans_of
from kvserver.mover.peer import Channels, Peer

logger = logging.getLogger(__name__)

MAPPING, NIXL, GRPC = (
    pb.TRANSFER_PATH_MAPPING,
    pb.TRANSFER_PATH_NIXL,
    pb.TRANSFER_PATH_GRPC,
)
BEST_FIRST = (MAPPING, NIXL, GRPC)
_DESCRIBED_MAX = 64
# Of the deadline, for closing the transfer.
_CLOSE_SHARE, _CLOSE_SECONDS_MAX = 0.1, 1.0


class Importer:
    """What all imports of this process share."""

    def __init__(self, start: Message) -> None:
        self.pool = types_pb2.PoolDescription.FromString(start["pool"])
        self.file = PoolFile(self.pool, writable=True)
        self.spans = spans_of(self.pool)
        self.bucket = Bucket(start["bandwidth_bytes"])
        self.channels = Channels()
        self.peer_files = mapping.PeerFiles()
        self._described: dict[str, pb.DescribePoolResponse] = {}
        self._devices: str = start["nixl_devices"]
        self._agent: ReadingAgent | None = None
        self._lock = threading.Lock()

    def pool_of(self, peer: Peer, epoch: str, seconds: float) -> types_pb2.PoolDescription:
        """The pool of a peer in this epoch of its; asked for once."""
        described = self._described.get(peer.target)
        if described is None or described.epoch != epoch:
            described = peer.call("DescribePool", pb.DescribePoolRequest(), seconds)
            if len(self._described) >= _DESCRIBED_MAX:
                self._described.clear()
            self._described[peer.target] = described
        return described.pool

    def agent(self) -> ReadingAgent:
        """Made when first asked for."""
        with self._lock:
            if self._agent is None:
                self._agent = ReadingAgent(self.file, self._devices)
            return self._agent


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
        self._paths: Sequence[pb.TransferPath] = message["paths"]
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

    def stop(self) -> None:
        """End it soon."""
        self._stopped.set()
        self._given.put(None)
        self._peer.stop()

    def give(self, ids: dict[int, list[int]]) -> None:
        """The blocks to fill with what the peer has."""
        self._given.put(ids)

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
        peer = self._peer
        asked_at = time.monotonic()
        opened = peer.call(
            "OpenTransfer",
            pb.OpenTransferRequest(
                fingerprint=self._fingerprint,
                groups=[
                    pb.GroupHashes(group=group, block_hashes=hashes)
                    for group, hashes, _ in self._groups
                ],
                name="import",
                contents=self._contents,
            ),
            self._seconds_left(),
            linger=True,
        )
        failures: list[tuple[int, str]] = []
        valid = False
        try:
            pool = self._importer.pool_of(peer, opened.epoch, self._seconds_left())
            if self._fingerprint not in ("", pool.fingerprint):
                raise kvcore.errors.FailedPrecondition(
                    "its pool has another fingerprint than ours",
                    reason="FINGERPRINT_MISMATCH",
                    field="peer",
                )
            copies = self._copies(opened, pool, spans_of(pool))
            task = self._task(pool, opened, copies)
            with _Lease(peer, opened, task, asked_at):
                for path, offered, run in self._ways(task):
                    if all(copy.done.all() for copy in copies):
                        break
                    if offered():
                        failures += self._try(path, run, task)
        finally:
            seconds = max(0.2, self._ends_at - time.monotonic())
            try:
                peer.close_transfer(opened.transfer_id, min(_CLOSE_SECONDS_MAX, seconds))
                valid = True
            except kvclient.errors.KVDepotError as error:
                failures.append((self._path, f"CloseTransfer: {error.reason}: {error.message}"))
        return self._report(task, opened, failures, valid=valid)

    def _seconds_left(self) -> float:
        left = self._ends_at - time.monotonic()
        if self._stopped.is_set():
            raise Stopped
        if left <= 0:
            raise kvcore.errors.Unavailable(
                "did not answer within the import's deadline",
                reason="DEADLINE_EXCEEDED",
                retryable=True,
            )
        return left

    # --- what to copy, and how --------------------------------------------------------

    def _copies(
        self,
        opened: pb.OpenTransferResponse,
        peer_pool: types_pb2.PoolDescription,
        spans: Sequence[Sequence[Span]],
    ) -> list[Copy]:
        """One a group. FailedPrecondition when the peer answers what cannot be."""
        found = []
        for (group, hashes, ids), answer in zip(self._groups, opened.groups, strict=False):
            statuses = np.frombuffer(answer.statuses, np.uint8)
            sources = np.frombuffer(answer.block_ids, "<u4").astype(np.int64)
            positions = np.flatnonzero(statuses == pb.BLOCK_STATUS_READY)
            if (
                answer.group != group
                or not len(statuses) == len(sources) == len(hashes)
                or group >= len(spans)
                or (len(sources) and sources.max() >= peer_pool.num_blocks)
            ):
                break
            found.append((group, positions, sources, ids, statuses))
        if len(found) != len(self._groups):
            raise kvcore.errors.FailedPrecondition(
                "its answer does not fit what was asked for", reason="BAD_PEER", field="peer"
            )
        taken: dict[int, list[int]] = {}
        if self._takes and any(len(positions) for _, positions, *_ in found):
            taken = self._take(
                {
                    group: (statuses == pb.BLOCK_STATUS_READY).tobytes()
                    for group, _, _, _, statuses in found
                }
            )
        copies = []
        for group, positions, sources, ids, _ in found:
            destinations = np.array(taken.get(group, ids), np.int64)
            positions = positions[destinations[positions] != 0]
            copies.append(
                Copy(
                    group,
                    positions,
                    sources[positions],
                    destinations[positions],
                    np.zeros(len(positions), bool),
                    spans[group],
                    self._importer.spans[group],
                )
            )
        return copies

    def _take(self, ready: dict[int, bytes]) -> dict[int, list[int]]:
        """Has the node take blocks for what is ready."""
        self._send(op="found", job=self._job, ready=ready)
        try:
            taken = self._given.get(timeout=self._seconds_left())
        except Empty:
            taken = None
        if taken is None:
            raise Stopped
        return taken

    def _task(
        self,
        peer_pool: types_pb2.PoolDescription,
        opened: pb.OpenTransferResponse,
        copies: Sequence[Copy],
    ) -> Task:
        def progress(num_blocks: int, num_bytes: int) -> None:
            self._send(
                op="progress", job=self._job, blocks=num_blocks, bytes=num_bytes, path=self._path
            )

        return Task(
            self._peer,
            peer_pool,
            opened,
            copies,
            file=self._importer.file,
            bucket=self._importer.bucket,
            checksums=self._checksums,
            until=self._copy_until,
            stopped=self._stopped,
            progress=progress,
        )

    def _ways(
        self, task: Task
    ) -> Iterator[tuple[pb.TransferPath, Callable[[], bool], Callable[[], None]]]:
        """The paths allowed, in order: whether both sides have it, and its copy."""
        importer, reach = self._importer, task.reach
        ways: dict[int, tuple[Callable[[], bool], Callable[[], None]]] = {
            MAPPING: (
                lambda: mapping.offered(task),
                lambda: mapping.run(task, importer.peer_files),
            ),
            NIXL: (
                lambda: bool(reach.nixl_agent and reach.nixl_regions and importer.agent().offered),
                lambda: reading.run(task, importer.agent()),
            ),
            GRPC: (lambda: bool(reach.data_address), lambda: stream.run(task)),
        }
        for path in self._paths or BEST_FIRST:
            if path in ways:
                yield (path, *ways[path])

    def _try(
        self, path: pb.TransferPath, run: Callable[[], None], task: Task
    ) -> list[tuple[int, str]]:
        """Copy by one path; why it did not do all, if so."""
        self._path = path
        task.num_bad = 0
        try:
            run()
        except PathFailed as failed:
            return [(path, str(failed))]
        except (kvclient.errors.KVDepotError, kvcore.errors.KVDepotError) as error:
            if self._stopped.is_set():
                raise Stopped from None
            return [(path, f"{error.reason}: {error.message}")]
        if task.num_bad:
            return [(path, f"CHECKSUM_MISMATCH: of {task.num_bad} blocks, other bytes came")]
        return []

    def _report(
        self,
        task: Task,
        opened: pb.OpenTransferResponse,
        failures: Sequence[tuple[int, str]],
        *,
        valid: bool,
    ) -> Message:
        statuses: dict[int, bytes] = {}
        contents: dict[int, list[bytes]] = {}
        for copy, answer in zip(task.copies, opened.groups, strict=True):
            told = np.full(len(answer.statuses), pb.IMPORT_STATUS_FAILED, np.uint8)
            found = np.frombuffer(answer.statuses, np.uint8)
            told[found == pb.BLOCK_STATUS_PENDING] = pb.IMPORT_STATUS_PENDING
            told[found == pb.BLOCK_STATUS_MISSING] = pb.IMPORT_STATUS_MISSING
            contents[copy.group] = []
            if valid:
                came = copy.positions[copy.done]
                told[came] = pb.IMPORT_STATUS_IMPORTED
                # One a ready block, whether it is copied or not.
                is_done = np.isin(np.flatnonzero(found == pb.BLOCK_STATUS_READY), came)
                contents[copy.group] = [
                    content.SerializeToString()
                    for content, done in zip(answer.contents, is_done, strict=False)
                    if done
                ]
            statuses[copy.group] = told.tobytes()
        return {
            "blocks": task.num_blocks if valid else 0,
            "bytes": task.num_bytes if valid else 0,
            "path": self._path,
            "statuses": statuses,
            "contents": contents,
            "failures": [list(failure) for failure in failures],
        }


class _Lease:
    """Renews a transfer's lease for as long as it is entered."""

    def __init__(
        self, peer: Peer, opened: pb.OpenTransferResponse, task: Task, asked_at: float
    ) -> None:
        self._peer, self._task = peer, task
        self._request = pb.RenewTransferRequest(transfer_id=opened.transfer_id)
        self._ttl = opened.lease_ttl_seconds
        self._lasts_until = asked_at + self._ttl
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True, name="kvdepot-lease")

    def _keep(self) -> None:
        while not self._over.wait(self._ttl / 3):
            asked_at = time.monotonic()
            try:
                answer = self._peer.call("RenewTransfer", self._request, self._ttl / 3)
                self._lasts_until = asked_at + answer.lease_ttl_seconds
            except kvclient.errors.KVDepotError as error:
                told = isinstance(
                    error, kvclient.errors.NotFound | kvclient.errors.FailedPrecondition
                )
                if told or time.monotonic() > self._lasts_until:
                    self._task.lose(
                        f"{error.reason}: the lease could not be renewed: {error.message}"
                    )
                    return

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
