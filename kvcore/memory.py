"""The pool's bytes: one shared file mapping, zeroed, that other processes map too.

A page is one block in one layer; what it holds is in page.py. Two layouts of the same
pages: "block" keeps all layers of a block together (``[num_blocks, group_size, page]``),
"layer" all blocks of a layer (``[group_size, num_blocks, page]``). Layers of different
groups share a place, as vLLM's KVCacheTensor.shared_by says: a block is never in use by
two groups. Which place is whose says KVCacheConfig.places.
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
from kvcore.page import page_parts
from kvcore.spec import (
    DTYPE_BYTES,
    DepotConfig,
    KVCacheSpec,
)

if TYPE_CHECKING:
    import torch

PREFIX = "kvdepot-"
SUFFIX = ".pool"


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor over the mapping, all blocks in its first dimension; strides in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Block ``b`` of the layer begins at ``offset_bytes + b * block_stride_bytes``.

    ``views`` are those of page.page_parts, over all blocks.
    """

    name: str
    offset_bytes: int
    block_stride_bytes: int
    group: int
    views: tuple[TensorView, ...]


def layer_layouts(config: DepotConfig) -> list[LayerLayout]:
    """Where every layer that keeps something lies, group by group.

    InvalidArgument for pages that no tensor can lie over.
    """
    cache = config.kv_cache
    num_blocks = cache.num_blocks
    sizes, places = cache.places
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    layouts = []
    for group_id, group in enumerate(cache.groups):
        if not group.holds_blocks:
            continue
        for name, spec in zip(group.layer_names, group.layer_specs, strict=True):
            place = places[name]
            offset, stride = starts[place], sum(sizes)
            if config.layout == "layer":
                offset, stride = offset * num_blocks, sizes[place]
            views = _views(spec, num_blocks, offset, stride)
            layouts.append(LayerLayout(name, offset, stride, group_id, views))
    return layouts


def _views(
    spec: KVCacheSpec, num_blocks: int, offset_bytes: int, block_stride_bytes: int
) -> tuple[TensorView, ...]:
    views = []
    for part in page_parts(spec):
        itemsize = DTYPE_BYTES[part.dtype]
        first = offset_bytes + part.offset_bytes
        if first % itemsize or block_stride_bytes % itemsize:
            raise InvalidArgument(
                f"{part.dtype} cannot lie {first} bytes into the pool with {block_stride_bytes} "
                f"from block to block: pad every page to a multiple of {itemsize} bytes",
                field="page_size_padded",
            )
        strides = (block_stride_bytes // itemsize, *part.strides)
        views.append(TensorView(part.name, part.dtype, (num_blocks, *part.shape), strides, first))
    return tuple(views)


class PoolMemory:
    """Owns the mapping ``directory/kvdepot-NAME.pool`` until ``close``.

    The file is readable by its owner only and is reserved in full at once: a
    filesystem with too little room is ResourceExhausted here, not a SIGBUS later.
    Whoever still maps it after ``close`` keeps the bytes until unmapping them.
    """

    def __init__(self, config: DepotConfig, directory: str, *, name: str) -> None:
        if not name or "/" in name:
            raise InvalidArgument(f"{name!r} cannot name a file", field="name")
        self.config = config
        self.nbytes = config.kv_cache.pool_bytes
        self.path = str(Path(directory) / (PREFIX + name + SUFFIX))
        self.layouts = {layout.name: layout for layout in layer_layouts(config)}
        # Where each layer's page of block 0 begins, from block to block, and its bytes.
        self._pages = [
            [
                (layout.offset_bytes, layout.block_stride_bytes, spec.page_size_bytes)
                for layout, spec in zip(
                    (self.layouts[name] for name in group.layer_names),
                    group.layer_specs,
                    strict=True,
                )
            ]
            if group.holds_blocks
            else []
            for group in config.kv_cache.groups
        ]
        self._fd = _create(self.path)
        try:
            _reserve(self._fd, self.path, self.nbytes)
            self._mapping = mmap.mmap(self._fd, self.nbytes)
        except BaseException:
            self.close()
            raise

    def layer(
        self, name: str, *, kv_first: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """A writable view of a layer, blocks first; of Mamba a tuple, one a state.

        K and V apart: ``(num_blocks, 2, block_size, num_kv_heads, head_size)``, of which
        ``kv_first`` swaps the first two dimensions over the same bytes. K and V heads of
        two sizes: ``(num_blocks, block_size, num_kv_heads, head_size + head_size_v)``.
        MLA: ``(num_blocks, block_size, head_size)``. Quantised heads carry their scale.
        A view is valid for as long as it lives, even after ``close``.
        """
        views = self._layout(name).views
        if kv_first and (views[0].name != "kv" or len(views[0].shape) != 5):
            raise InvalidArgument(f"layer {name!r} keeps no K and V apart", field="kv_first")
        if views[0].name == "state":
            return tuple([self._tensor(view) for view in views])
        tensor = self._tensor(views[0])
        return tensor.transpose(0, 1) if kv_first else tensor

    def parts(self, name: str) -> dict[str, torch.Tensor]:
        """Views of what quantised K and V consist of: data and scales, by name."""
        views = self._layout(name).views
        return {view.name: self._tensor(view) for view in views if view.name[1:2] == "_"}

    def block_pages(self, block_id: int, group: int = 0) -> bytes:
        """A copy of the block's pages, layer by layer of the group.

        DataLoss if somebody cut the file short: it is read as a file, because touching
        a mapping beyond its file's end would kill the process.
        """
        if not 0 <= block_id < self.config.kv_cache.num_blocks:
            raise InvalidArgument(f"there is no block {block_id}", field="block_id")
        if not 0 <= group < len(self._pages):
            raise InvalidArgument(f"there is no group {group}", field="group")
        pages = [(first + block_id * stride, n) for first, stride, n in self._pages[group]]
        end = start = pages[0][0] if pages else 0
        for page, nbytes in pages:
            if page != end:
                return b"".join(self._read(page, n) for page, n in pages)
            end += nbytes
        return self._read(start, end - start)

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

    def _tensor(self, view: TensorView) -> torch.Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, view.dtype)
        count = self.nbytes // dtype.itemsize
        return torch.frombuffer(self._mapping, dtype=dtype, count=count).as_strided(
            view.shape, view.strides, view.offset_bytes // dtype.itemsize
        )

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
