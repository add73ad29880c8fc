"""What an import has to copy, and what every way of copying needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from kvcore.memory import Span
from kvdepot.v1 import transfer_pb2 as pb
from kvdepot.v1 import types_pb2
from kvserver.mover.bucket import Bucket
from kvserver.mover.lease import Lease
from kvserver.mover.peer import Peer
from kvserver.mover.store import Store

_PROGRESS_SECONDS = 0.25


class Stopped(Exception):
    """The node wants the import no more."""


class PathFailed(Exception):
    """The bytes do not come this way; the message says why, a reason first if it has one."""


class Stuck(Exception):
    """Bytes may still land, and nothing but the end of this process prevents it."""


@dataclass(slots=True)
class Copy:
    """The ready blocks of one group: which of the peer's go into which of ours.

    ``positions``, ``source_ids``, ``destination_ids``, ``done`` and ``sums`` run in parallel;
    positions are those among the transfer's statuses, sums the peer's checksums, 0 where it
    has not said any yet.
    """

    group: int
    positions: Any
    source_ids: Any
    destination_ids: Any
    done: Any
    sums: Any
    source: Sequence[Span]
    destination: Sequence[Span]
    block_bytes: int

    def left(self) -> Any:
        """Which blocks are not done."""
        return np.flatnonzero(~self.done)


class Task:
    """A part of an import while it is copied."""

    def __init__(
        self,
        peer: Peer,
        peer_pool: types_pb2.PoolDescription,
        lease: Lease,
        copies: Sequence[Copy],
        *,
        store: Store,
        bucket: Bucket,
        num_copiers: int,
        checksums: bool,
        until: float,
        stopped: threading.Event,
        progress: Callable[[int, int], None],
    ) -> None:
        self.peer = peer
        self.peer_pool = peer_pool
        self.transfer_id = lease.opened.transfer_id
        self.reach = lease.opened.reach
        self.copies = copies
        self.store = store
        self.checksums = checksums
        self.num_copiers = num_copiers
        self.num_blocks = self.num_bytes = self.num_bad = 0
        self.until = until
        self._bucket = bucket
        self._stopped = stopped
        self.lease = lease
        self._progress = progress
        # What is over sooner is told of at its end.
        self._told_at = time.monotonic()

    def check(self, num_bytes: int = 0) -> None:
        """Before ``num_bytes`` are copied: waits if that is too fast. Raises to end the copy."""
        delay = self._bucket.delay(num_bytes)
        # Waiting for nothing takes longer than looking.
        if self._stopped.wait(delay) if delay else self._stopped.is_set():
            raise Stopped
        if self.lease.lost:
            raise PathFailed(self.lease.lost)
        if self.seconds_left() <= 0:
            raise PathFailed("DEADLINE_EXCEEDED: the import has had its time")

    def is_over(self) -> bool:
        """Whether nothing is left to copy, or what is copied counts no more."""
        return bool(self.lease.lost) or all(copy.done.all() for copy in self.copies)

    def seconds_left(self) -> float:
        """Until the deadline."""
        return self.until - time.monotonic()

    def batches(self, copy: Copy, num_bytes: int) -> Iterator[Any]:
        """What is left of ``copy``, at most so many bytes at a time; checked before each."""
        left = copy.left()
        size = max(1, copy.block_bytes)
        step = max(1, self._bucket.slice_of(num_bytes) // size)
        for begin in range(0, len(left), step):
            batch = left[begin : begin + step]
            self.check(len(batch) * size)
            yield batch

    def sums(self, copy: Copy) -> Iterator[int] | None:
        """The peer's checksums of what is left of ``copy``; None if none are asked for."""
        if not self.checksums:
            return None
        return self._sums(copy, copy.left())

    def _sums(self, copy: Copy, left: Any) -> Iterator[int]:
        """Those that the peer has not said yet are asked for, and come while others are copied."""
        known = copy.sums[left].tolist()
        unknown = left[copy.sums[left] == 0]
        asked: Iterator[int] = iter(())
        if len(unknown):
            request = self._request(copy, unknown, checksums_only=True)
            frames = self.peer.pull(self.reach.data_address, request, self.seconds_left())
            asked = (value for frame in frames for value in frame.checksums)
        for value in known:
            if value:
                yield value
            elif (told := next(asked, None)) is not None:
                yield told
            else:
                return
        next(asked, None)  # the stream's own end

    def request(self, copy: Copy, **options: bool) -> pb.PullBlocksRequest:
        """For what is left of ``copy``."""
        return self._request(copy, copy.left(), **options)

    def _request(self, copy: Copy, numbers: Any, **options: bool) -> pb.PullBlocksRequest:
        positions = copy.positions[numbers].astype("<u4").tobytes()
        return pb.PullBlocksRequest(
            transfer_id=self.transfer_id, group=copy.group, positions=positions, **options
        )

    def arrived(
        self,
        copy: Copy,
        batch: Any,
        sums: Iterator[int] | None,
        found: Sequence[int] | None = None,
    ) -> None:
        """The bytes of ``batch`` are in our blocks; those with the right checksum are done.

        ``found``: the checksums of what came, if they are known.
        """
        good = batch
        if sums is not None:
            expected = list(islice(sums, len(batch)))
            if len(expected) < len(batch):
                raise PathFailed("BAD_PEER: it sent too few checksums")
            if found is None:
                found = self.store.checksums(copy.group, copy.destination_ids[batch].tolist())
            right = np.array(found, np.uint64) == np.array(expected, np.uint64)
            good = batch[right]
            if batch[-1] == len(copy.done) - 1:
                next(sums, None)  # the stream's own end, before the transfer is closed
        self.finished(copy, good, len(batch) - len(good))

    def finished(self, copy: Copy, good: Any, num_bad: int) -> None:
        """Count blocks."""
        copy.done[good] = True
        self.num_bad += num_bad
        self.num_blocks += len(good)
        self.num_bytes += len(good) * copy.block_bytes
        now = time.monotonic()
        if now - self._told_at >= _PROGRESS_SECONDS:
            self._told_at = now
            self._progress(self.num_blocks, self.num_bytes)
