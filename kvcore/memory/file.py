"""Bytes in a file that other processes map too: the CPU's."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcore.errors import AlreadyExists, DataLoss, InvalidArgument, ResourceExhausted
from kvcore.memory.device import POISON, DeviceMemory
from kvcore.memory.layout import TensorView

if TYPE_CHECKING:
    import torch

PREFIX = "kvdepot-"
SUFFIX = ".pool"

_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap names it from Python 3.14 on
_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class FileMapping:
    """A file of ``nbytes`` to map; ``huge_pages``: it lies in huge pages, or most of it."""

    path: str
    nbytes: int
    huge_pages: bool = False


class FileMemory(DeviceMemory[FileMapping]):
    """Owns the mapping ``directory/kvdepot-NAME.pool`` until ``close``.

    The file is readable by its owner only and is reserved in full at once: a
    filesystem with too little room is ResourceExhausted here, not a SIGBUS later.
    ``huge_pages``: take them where the filesystem gives them (a tmpfs mounted with
    ``huge=``, or hugetlbfs); ``huge_bytes`` is what was obtained. Whoever still maps the
    file after ``close`` keeps the bytes until unmapping them.
    """

    def __init__(self, nbytes: int, directory: str, *, name: str, huge_pages: bool = True) -> None:
        if not name or "/" in name:
            raise InvalidArgument(f"{name!r} cannot name a file", field="name")
        # Absolute: whoever maps it may run elsewhere.
        self.path = str(Path(directory).absolute() / (PREFIX + name + SUFFIX))
        self.huge_bytes = 0
        self._fd = _create(self.path)
        try:
            # hugetlbfs takes whole pages only, and gives no others.
            unit = os.fstatvfs(self._fd).f_bsize
            self.nbytes = -(-nbytes // unit) * unit if unit >= _HUGE_PAGE_BYTES else nbytes
            if huge_pages and unit < _HUGE_PAGE_BYTES <= self.nbytes:
                self._map_huge()
            _reserve(self._fd, self.path, self.nbytes)
            if self.huge_bytes == 0:
                self._mapping = mmap.mmap(self._fd, self.nbytes)
            if unit >= _HUGE_PAGE_BYTES:
                self.huge_bytes = _huge_bytes(self._fd)
        except BaseException:
            self.close()
            raise

    @property
    def mapping(self) -> FileMapping:
        """The file, and how large it is."""
        return FileMapping(self.path, self.nbytes, self.huge_bytes > 0)

    def tensor(self, view: TensorView) -> torch.Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, view.dtype)
        count = self.nbytes // dtype.itemsize
        return torch.frombuffer(self._mapping, dtype=dtype, count=count).as_strided(
            view.shape, view.strides, view.offset_bytes // dtype.itemsize
        )

    def poison(self, ranges: list[tuple[int, int]]) -> None:
        if os.fstat(self._fd).st_size < self.nbytes:
            raise DataLoss(
                f"the pool's file {self.path} was cut short: it ends before {self.nbytes} bytes; "
                "restart the server",
                reason="MAPPING_TRUNCATED",
            )
        for offset, nbytes in ranges:
            self._mapping[offset : offset + nbytes] = bytes((POISON,)) * nbytes

    def close(self) -> None:
        """Removes the file. May be called again."""
        if self._fd >= 0:
            Path(self.path).unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _map_huge(self) -> None:
        """Fault the file in by huge pages, if the first one comes so.

        Reserving a file takes small pages, unless its mount says otherwise; faulting takes
        what the mapping was advised to. With too little room the fault fails as a call,
        and reserving then says so.
        """
        os.ftruncate(self._fd, self.nbytes)
        mapping = mmap.mmap(self._fd, self.nbytes)
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
            mapping.madvise(_MADV_POPULATE_WRITE, 0, _HUGE_PAGE_BYTES)
            if _huge_bytes(self._fd):
                mapping.madvise(_MADV_POPULATE_WRITE)
                self.huge_bytes = _huge_bytes(self._fd)
                self._mapping = mapping


def remove_abandoned(directory: str) -> list[str]:
    """Removes the files of owners that died, and answers their paths.

    A living owner holds a lock on its file, which ends with its process.
    """
    removed = []
    for path in Path(directory).glob(f"{PREFIX}*{SUFFIX}"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's, or gone meanwhile
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(str(path))
        except OSError:
            pass
        finally:
            os.close(fd)
    return removed


def _create(path: str) -> int:
    """A new, empty, locked file at ``path``; locked before the name can be seen."""
    hidden = f"{path}.{os.getpid()}"
    fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.link(hidden, path)
    except FileExistsError:
        os.close(fd)
        raise AlreadyExists(
            f"{path} exists: another server uses it", reason="MAPPING_EXISTS", field="name"
        ) from None
    finally:
        Path(hidden).unlink()
    return fd


def _reserve(fd: int, path: str, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        os.ftruncate(fd, 0)
        room = os.fstatvfs(fd)
        raise ResourceExhausted(
            f"the pool needs {nbytes} bytes, but {Path(path).parent} has room for "
            f"{room.f_bavail * room.f_frsize}: name fewer blocks or another directory",
            reason="MAPPING_TOO_LARGE",
            field="num_blocks",
        ) from None


_SMAPS_HEAD = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ (?P<device>\S+) (?P<inode>\d+)")
_SMAPS_SIZE = re.compile(r"(?P<name>\w+): +(?P<kib>\d+) kB")


def _huge_bytes(fd: int) -> int:
    """Bytes that this process maps of a file in huge pages, as the kernel has it."""
    status = os.fstat(fd)
    number = status.st_dev
    file = (f"{os.major(number):02x}:{os.minor(number):02x}", str(status.st_ino))
    sizes: dict[str, int] = {}
    ours = False
    with contextlib.suppress(OSError), Path("/proc/self/smaps").open(encoding="utf-8") as lines:
        for line in lines:
            if (head := _SMAPS_HEAD.match(line)) is not None:
                ours = (head["device"], head["inode"]) == file
            elif ours and (size := _SMAPS_SIZE.match(line)) is not None:
                sizes[size["name"]] = int(size["kib"]) * 1024
    if sizes.get("KernelPageSize", 0) >= _HUGE_PAGE_BYTES:  # hugetlbfs
        return sizes["Size"]
    return sizes.get("ShmemPmdMapped", 0) + sizes.get("FilePmdMapped", 0)
