"""The pool's bytes: one shared file mapping, zeroed, that other processes map too.

A page is one block in one layer: ``[2, block_size, num_kv_heads, head_size]``, K then
V. Two layouts of the same pages: "block" keeps all layers of a block together
(``[num_blocks, group_size, page]``), "layer" all blocks of a layer
(``[group_size, num_blocks, page]``). Layers at the same position of different groups
share their pages, as their blocks are never in use by both.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcore.errors import AlreadyExists, DataLoss, InvalidArgument, NotFound, ResourceExhausted
from kvcore.spec import DepotConfig

if TYPE_CHECKING:
    import torch

PREFIX = "kvdepot-"
SUFFIX = ".pool"


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Block ``b`` of the layer begins at ``offset_bytes + b * block_stride_bytes``."""

    name: str
    offset_bytes: int
    block_stride_bytes: int
    group: int


def layer_layouts(config: DepotConfig) -> list[LayerLayout]:
    """Where every layer lies, group by group."""
    cache = config.kv_cache
    page = cache.page_size_bytes
    if config.layout == "block":
        layer_stride, block_stride = page, cache.group_size * page
    else:
        layer_stride, block_stride = cache.num_blocks * page, page
    return [
        LayerLayout(name, position * layer_stride, block_stride, group_id)
        for group_id, group in enumerate(cache.groups)
        for position, name in enumerate(group.layer_names)
    ]


class PoolMemory:
    """Owns the mapping ``directory/kvdepot-NAME.pool`` until ``close``.

    The file is readable by its owner only and is reserved in full at once: a
    filesystem with too little room is ResourceExhausted here, not a SIGBUS later.
    Whoever still maps it after ``close`` keeps the bytes until unmapping them.
    """

    def __init__(self, config: DepotConfig, directory: str, *, name: str) -> None:
        for group in config.kv_cache.groups:
            if group.spec.head_size_v not in (None, group.spec.head_size):
                raise InvalidArgument(
                    "the pool's memory needs K and V heads of one size", field="head_size_v"
                )
        if not name or "/" in name:
            raise InvalidArgument(f"{name!r} cannot name a file", field="name")
        self.config = config
        self.nbytes = config.kv_cache.pool_bytes
        self.path = str(Path(directory) / (PREFIX + name + SUFFIX))
        self.layouts = {layout.name: layout for layout in layer_layouts(config)}
        self._by_group = [
            [layout for layout in self.layouts.values() if layout.group == group_id]
            for group_id in range(len(config.kv_cache.groups))
        ]
        self._fd = _create(self.path)
        try:
            _reserve(self._fd, self.path, self.nbytes)
            self._mapping = mmap.mmap(self._fd, self.nbytes)
        except BaseException:
            self.close()
            raise

    def layer(self, name: str, *, kv_first: bool = False) -> torch.Tensor:
        """A writable view ``(num_blocks, 2, block_size, num_kv_heads, head_size)``.

        ``kv_first`` swaps the first two dimensions, over the same bytes. The view is
        valid for as long as it lives, even after ``close``.
        """
        import torch

        layout = self._layout(name)
        spec = self.config.kv_cache.groups[layout.group].spec
        dtype = getattr(torch, spec.dtype)
        token = spec.num_kv_heads * spec.head_size
        view = torch.frombuffer(self._mapping, dtype=dtype).as_strided(
            (
                self.config.kv_cache.num_blocks,
                2,
                spec.block_size,
                spec.num_kv_heads,
                spec.head_size,
            ),
            (
                layout.block_stride_bytes // dtype.itemsize,
                spec.block_size * token,
                token,
                spec.head_size,
                1,
            ),
            layout.offset_bytes // dtype.itemsize,
        )
        return view.transpose(0, 1) if kv_first else view

    def block_pages(self, block_id: int, group: int = 0) -> bytes:
        """A copy of the block's pages, layer by layer of the group.

        DataLoss if somebody cut the file short: it is read as a file, because touching
        a mapping beyond its file's end would kill the process.
        """
        if not 0 <= block_id < self.config.kv_cache.num_blocks:
            raise InvalidArgument(f"there is no block {block_id}", field="block_id")
        if not 0 <= group < len(self._by_group):
            raise InvalidArgument(f"there is no group {group}", field="group")
        layers = self._by_group[group]
        page = self.config.kv_cache.groups[group].spec.page_size_bytes
        starts = [la.offset_bytes + block_id * la.block_stride_bytes for la in layers]
        if all(start == starts[0] + i * page for i, start in enumerate(starts)):
            return self._read(starts[0], page * len(starts))
        return b"".join(self._read(start, page) for start in starts)

    def _read(self, offset: int, nbytes: int) -> bytes:
        read = os.pread(self._fd, nbytes, offset)
        if len(read) != nbytes:
            raise DataLoss(
                f"the pool's file {self.path} was cut short: it ends before {offset + nbytes} of "
                f"{self.nbytes} bytes; restart the server",
                reason="MAPPING_TRUNCATED",
            )
        return read

    def close(self) -> None:
        """Removes the file. May be called again."""
        if self._fd >= 0:
            Path(self.path).unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> PoolMemory:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _layout(self, name: str) -> LayerLayout:
        layout = self.layouts.get(name)
        if layout is None:
            raise NotFound(f"there is no layer {name!r}", reason="UNKNOWN_LAYER", field="name")
        return layout


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
