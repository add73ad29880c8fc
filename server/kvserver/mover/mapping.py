"""Both servers on one host: the peer's bytes are mapped, and copied from."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import closing
from typing import Any

import numpy as np

from kvdepot.v1 import types_pb2
from kvserver.mover.copying import Copy, PathFailed, Task
from kvserver.mover.devices import PoolDevices, on_devices, open_devices
from kvserver.mover.host import host_id
from kvserver.mover.pages import PoolFile, checksum, file_of, pieces_of
from kvserver.mover.store import Store, copy_blocks

# What a thread copies at once, without Python.
BATCH_BYTES = 16 << 20
# Less is copied without waking a thread.
_SMALL_BYTES = 1 << 20
# Batches that are being copied while the one before them is looked at.
_AHEAD = 1
# Rows at least so long are copied one by one; shorter ones by way of a buffer, many at once.
_LONG_ROW_BYTES = 32 << 10
_BUFFER_BYTES = 512 << 10
# Unless so many lie together in our pool, on average.
_FEW_RUNS = 8
_KEPT_SECONDS = 60.0
# Between two looks whether a peer whose file is kept has ended.
_LOOK_SECONDS = 5.0


def lacks(task: Task) -> str:
    """Why the peer's bytes cannot be mapped; empty: they may be."""
    host, pool = host_id(), task.peer_pool
    if not host or task.reach.host_id != host:
        return "the peer is on another host"
    if on_devices(pool) or file_of(pool) is not None:
        return ""
    return "the peer's bytes are in no file, and on no device"


def run(task: Task, files: PeerFiles, copiers: Executor) -> None:
    """Copy what is left, by ``copiers``. PathFailed when the bytes cannot be had, or are another's.

    Nothing is copied any more when this returns or raises.
    """
    if isinstance(task.store, PoolDevices) or on_devices(task.peer_pool):
        _copy_on_devices(task, files)
        return
    assert isinstance(task.store, PoolFile)
    ours = task.store
    with files.mapped(task.peer_pool) as file:
        for copy in task.copies:
            arrays = [
                (file.array(piece.source, piece.dtype), ours.array(piece.destination, piece.dtype))
                for piece in pieces_of(copy.source, copy.destination)
            ]
            if not len(copy.left()):
                continue
            sums = task.sums(copy)
            with closing(_copied(task, copy, arrays, (file, ours), copiers)) as copied:
                for batch, found in copied:
                    task.arrived(copy, batch, sums, found)


def _copied(
    task: Task,
    copy: Copy,
    arrays: Sequence[tuple[Any, Any]],
    files: tuple[PoolFile, PoolFile],
    copiers: Executor,
) -> Generator[tuple[Any, list[int]], None, None]:
    """The batches of ``copy``, each once it is copied; when closed, none is being copied.

    With the checksums of what it was copied from, if there are to be any.
    """

    def copy_batch(batch: Any) -> list[int]:
        for file in files:
            file.check()
        sources, destinations = copy.source_ids[batch], copy.destination_ids[batch]
        if task.checksums and len(arrays) == 1:
            return copy_and_sum(arrays[0][0], sources, arrays[0][1], destinations)
        for source, destination in arrays:
            copy_rows(source, sources, destination, destinations)
        return files[0].checksums(copy.group, sources.tolist()) if task.checksums else []

    copying: deque[tuple[Any, Future[list[int]]]] = deque()
    try:
        for batch in task.batches(copy, BATCH_BYTES):
            if len(batch) * copy.block_bytes <= _SMALL_BYTES and not copying:
                yield batch, copy_batch(batch)
                continue
            copying.append((batch, copiers.submit(copy_batch, batch)))
            if len(copying) > task.num_copiers + _AHEAD:
                first, done = copying[0]
                found = done.result()
                copying.popleft()
                yield first, found
        while copying:
            first, done = copying[0]
            found = done.result()
            copying.popleft()
            yield first, found
    finally:
        wait([done for _, done in copying if not done.cancel()])


def _copy_on_devices(task: Task, files: PeerFiles) -> None:
    """Of one side or both. The peer's are mapped by CUDA IPC for as long as this takes."""
    pool = task.peer_pool
    if len(pool.mappings) != (task.store.num_ranks if isinstance(task.store, PoolDevices) else 1):
        raise PathFailed("the peer's pool has another number of ranks than ours")
    try:
        with contextlib.ExitStack() as stack:
            theirs: Store
            if on_devices(pool):
                theirs = PoolDevices(pool, open_devices(pool))
            else:
                theirs = stack.enter_context(files.mapped(pool))
            for copy in task.copies:
                if not len(copy.left()):
                    continue
                sums = task.sums(copy)
                for batch in task.batches(copy, BATCH_BYTES):
                    theirs.check()
                    task.store.check()
                    sources, destinations = copy.source_ids[batch], copy.destination_ids[batch]
                    copy_blocks(
                        theirs, task.store, copy.group, sources.tolist(), destinations.tolist()
                    )
                    task.arrived(copy, batch, sums)
    except RuntimeError as error:  # whatever CUDA refuses; torch.OutOfMemoryError is one
        first = (str(error).splitlines() or [""])[0]
        raise PathFailed(f"the device: {type(error).__name__}: {first}") from error


def copy_and_sum(source: Any, sources: Any, destination: Any, destinations: Any) -> list[int]:
    """As copy_rows, row by row; the checksum of each row of ``source``, read once more.

    Right after it was copied a row lies in the cache, which what was written goes past. A source
    that changed before it was copied shows: what it says afterwards is what was copied.
    """
    sums = []
    for theirs, ours in zip(sources.tolist(), destinations.tolist(), strict=True):
        row = source[theirs]
        destination[ours] = row
        sums.append(checksum((row,)))
    return sums


def copy_rows(source: Any, sources: Any, destination: Any, destinations: Any) -> None:
    """``destination[destinations] = source[sources]``, with little memory in between."""
    row_bytes = source.shape[1] * source.itemsize
    steps = np.diff(destinations) != 1
    is_whole = source.flags.c_contiguous and destination.flags.c_contiguous
    if not is_whole:
        steps |= np.diff(sources) != 1
    edges = [0, *(np.flatnonzero(steps) + 1).tolist(), len(sources)]
    if row_bytes >= _LONG_ROW_BYTES or (is_whole and _FEW_RUNS * len(edges) <= len(sources)):
        # Neighbours in our pool are copied at once; of pools with gaps, neighbours in both.
        for begin, end in itertools.pairwise(edges):
            ours, theirs = int(destinations[begin]), int(sources[begin])
            part = destination[ours : ours + end - begin]
            if is_whole and end - begin > 1:
                np.take(source, sources[begin:end], axis=0, out=part, mode="clip")
            else:
                part[:] = source[theirs : theirs + end - begin]
        return
    step = max(1, _BUFFER_BYTES // row_bytes)
    buffer = np.empty((step, source.shape[1]), source.dtype)
    for begin in range(0, len(sources), step):
        rows = sources[begin : begin + step]
        part = buffer[: len(rows)]
        np.take(source, rows, axis=0, out=part, mode="clip")
        destination[destinations[begin : begin + step]] = part


class PeerFiles:
    """Mappings of peers' files, kept for a while: the first touch of each page costs most.

    Not of a peer that has ended, as its memory is free only when nobody maps it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[PoolFile, float]] = {}
        self._users: Counter[str] = Counter()
        self._looking: threading.Thread | None = None

    @contextlib.contextmanager
    def mapped(self, pool: types_pb2.PoolDescription) -> Iterator[PoolFile]:
        """The peer's file. PathFailed when it cannot be had, or nobody keeps it."""
        mapping = file_of(pool)
        assert mapping is not None  # it was offered
        path = mapping.file.path
        with self._lock:
            file, _ = self._kept.get(path, (None, 0.0))
            if file is None or file.nbytes != mapping.num_bytes:
                try:
                    file = PoolFile(pool, writable=False)
                except OSError as error:
                    raise PathFailed(f"{path}: {error.strerror}") from None
            self._kept[path] = (file, time.monotonic())
            self._users[path] += 1
            if self._looking is None:
                self._looking = threading.Thread(target=self._look, daemon=True, name="kvdepot-old")
                self._looking.start()
        try:
            _require_living(file)
            yield file
        finally:
            with self._lock:
                self._users[path] -= 1
                if path in self._kept:
                    self._kept[path] = (self._kept[path][0], time.monotonic())

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            with self._lock:
                self._drop(time.monotonic() - _KEPT_SECONDS)
                if not self._kept:
                    self._looking = None
                    return

    def _drop(self, old: float) -> None:
        """What nobody used since ``old``, and what is of a peer that has ended."""
        for path, (file, used_at) in list(self._kept.items()):
            if not self._users[path] and (used_at < old or not _is_kept(file)):
                del self._kept[path], self._users[path]
                with contextlib.suppress(BufferError):  # unmapped when its last array goes
                    file.close()


def _require_living(file: PoolFile) -> None:
    """PathFailed unless it is a file that a living server of this host keeps locked.

    Another container may have a directory of the same name; its pool's name is random.
    """
    if not stat.S_ISREG(file.status().st_mode):
        raise PathFailed(f"{file.path} is no file")
    if not _is_kept(file):
        raise PathFailed(f"nobody keeps {file.path}: its server is gone, or on another host")


def _is_kept(file: PoolFile) -> bool:
    """Whether its server holds its lock."""
    try:
        fcntl.flock(file.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(file.fd, fcntl.LOCK_UN)
    return False
