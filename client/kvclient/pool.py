"""A server's pool, mapped into this process: the same bytes, on the same host.

torch is imported when a tensor is asked for, numpy when an array is.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvclient.errors import FailedPrecondition, InvalidArgument, NotFound
from kvclient.values import KVCacheGroup, LayerLayout, PoolDescription

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from kvclient.attachment import Attachment


def map_pool(description: PoolDescription, attachment: Attachment | None = None) -> Pool:
    """Maps the pool for reading and writing.

    A worker that writes under a session hands its ``attachment`` over: it is closed when
    the mapping is gone, that is, when nobody refers to the pool or a view of it any more.

    FailedPrecondition when the server keeps no bytes, its file is not on this host
    or not of the described size.
    """
    if not description.mapping_path:
        raise FailedPrecondition("the server keeps no bytes", reason="NO_MAPPING")
    try:
        fd = os.open(description.mapping_path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise FailedPrecondition(
            f"cannot open the pool's mapping: {error}", reason="MAPPING_UNREACHABLE"
        ) from error
    try:
        size = os.fstat(fd).st_size
        if size != description.mapping_bytes:
            raise FailedPrecondition(
                f"{description.mapping_path} has {size} bytes, "
                f"the server says {description.mapping_bytes}",
                reason="MAPPING_MISMATCH",
            )
        mapping = mmap.mmap(fd, size)
    finally:
        os.close(fd)
    if attachment is not None:
        # Not at the process's end, which closes the stream after the last write.
        weakref.finalize(mapping, attachment.close).atexit = False
    return Pool(description, mapping)


class Pool:
    """Views of the mapping. Each keeps it alive; nothing has to be closed."""

    def __init__(self, description: PoolDescription, mapping: mmap.mmap) -> None:
        self.description = description
        self.num_blocks = description.num_blocks
        self.layer_names = [layout.name for layout in description.layers]
        self._mapping = mapping
        self._layouts = {layout.name: layout for layout in description.layers}

    @property
    def block_size(self) -> int:
        """Tokens a block, of the first group."""
        return self.description.groups[0].block_size

    def layer(self, layer: str | int, *, kv_first: bool = False) -> torch.Tensor:
        """A view ``(num_blocks, 2, block_size, num_kv_heads, head_size)`` of a layer.

        ``layer`` is a name, or a position in ``layer_names``. ``kv_first`` swaps the
        first two dimensions. In block layout no flat view of all slots exists: index
        ``(slot // block_size, 0 or 1, slot % block_size)``, as ``write_slots`` does.
        """
        import torch

        layout, group = self._find(layer)
        dtype = getattr(torch, group.dtype)
        token = group.num_kv_heads * group.head_size
        view = torch.frombuffer(self._mapping, dtype=dtype).as_strided(
            (self.num_blocks, 2, group.block_size, group.num_kv_heads, group.head_size),
            (
                layout.block_stride_bytes // dtype.itemsize,
                group.block_size * token,
                token,
                group.head_size,
                1,
            ),
            layout.offset_bytes // dtype.itemsize,
        )
        return view.transpose(0, 1) if kv_first else view

    def layer_bytes(self, layer: str | int) -> npt.NDArray[np.uint8]:
        """A view ``(num_blocks, 2, block_size, bytes)`` of a layer; needs no torch."""
        import numpy as np

        layout, group = self._find(layer)
        token = group.page_size_bytes // (2 * group.block_size)
        return np.ndarray(
            (self.num_blocks, 2, group.block_size, token),
            np.uint8,
            buffer=self._mapping,
            offset=layout.offset_bytes,
            strides=(layout.block_stride_bytes, group.block_size * token, token, 1),
        )

    def write_slots(
        self,
        layer: str | int,
        slots: Sequence[int] | torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Stores one K and one V a slot, each ``(num_slots, num_kv_heads, head_size)``.

        Slots of -1 are padding: their rows are skipped.
        """
        import torch

        view = self.layer(layer)
        index = torch.as_tensor(slots, dtype=torch.int64)
        real = index >= 0
        blocks, offsets = self._split(index[real], view.shape[2])
        view[blocks, 0, offsets] = key[real]
        view[blocks, 1, offsets] = value[real]

    def read_slots(
        self, layer: str | int, slots: Sequence[int] | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V at the slots, each ``(num_slots, num_kv_heads, head_size)``."""
        import torch

        view = self.layer(layer)
        blocks, offsets = self._split(torch.as_tensor(slots, dtype=torch.int64), view.shape[2])
        return view[blocks, 0, offsets], view[blocks, 1, offsets]

    def block_table(
        self, tables: Sequence[Sequence[int]], width: int | None = None
    ) -> torch.Tensor:
        """``slots.block_table`` as an int32 tensor."""
        import torch

        from kvclient.slots import block_table

        return torch.tensor(block_table(tables, width), dtype=torch.int32)

    def _split(self, slots: torch.Tensor, block_size: int) -> tuple[Any, Any]:
        if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < (
            self.num_blocks * block_size
        ):
            raise InvalidArgument("a slot is outside the pool", field="slots")
        return slots // block_size, slots % block_size

    def _find(self, layer: str | int) -> tuple[LayerLayout, KVCacheGroup]:
        name = layer
        if isinstance(layer, int) and 0 <= layer < len(self.layer_names):
            name = self.layer_names[layer]
        layout = self._layouts.get(name) if isinstance(name, str) else None
        if layout is None:
            raise NotFound(f"there is no layer {layer!r}", reason="UNKNOWN_LAYER", field="layer")
        return layout, self.description.groups[layout.group]
