"""A server's pool, mapped into this process: the same bytes, on the same host.

torch is imported when a tensor is asked for, numpy when an array is.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from math import prod
from typing import TYPE_CHECKING, Any

from kvclient.description import KVCacheSpec, LayerLayout, PoolDescription, TensorView
from kvclient.errors import FailedPrecondition, InvalidArgument, NotFound
from kvclient.mapping import MappedBytes, open_mapping

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from kvclient.attachment import Attachment

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}
"""Bytes of one element, by torch dtype name."""


def row_shape(layout: LayerLayout) -> tuple[int, int, int]:
    """Parts, rows a part and bytes a row of one page; see ``Pool.layer_bytes``."""
    first = layout.views[0]
    shape = first.shape[1:]
    if len(shape) == 4:
        parts, rows = shape[:2]
    else:
        parts, rows = 1, shape[0] if first.name == "kv" else 1
    own = [view for view in layout.views if view.name == first.name]
    nbytes = sum(prod(view.shape[1:]) * DTYPE_BYTES[view.dtype] for view in own)
    return parts, rows, nbytes // (parts * rows)


def map_pool(
    description: PoolDescription, attachment: Attachment | None = None, *, rank: int | None = None
) -> Pool:
    """Maps the pool for reading and writing.

    ``rank`` is the worker's in its tensor-parallel group; it may be left out where the pool
    holds one. A worker that writes under a session hands its ``attachment`` over: it is
    closed when the mapping is gone, that is, when nobody refers to the pool or a view of it
    any more.

    FailedPrecondition when the server keeps no bytes, or they cannot be reached from here: a
    file of another host or another size, a GPU that this process does not see.
    """
    mappings = description.mappings
    if not mappings:
        raise FailedPrecondition("the server keeps no bytes", reason="NO_MAPPING")
    first = description.tensor_parallel_rank
    if rank is None and len(mappings) == 1:
        rank = first
    if rank is None or not first <= rank < first + len(mappings):
        raise InvalidArgument(
            f"the pool holds the ranks {first} to {first + len(mappings) - 1} of "
            f"{description.tensor_parallel_size}, not {rank}: say which one this worker is",
            field="rank",
        )
    mapped = open_mapping(
        mappings[rank - first],
        # Not at the process's end, which closes the stream after the last write.
        None if attachment is None else attachment.close,
    )
    return Pool(description, mapped, rank)


class Pool:
    """Views of the mapping. Each keeps it alive.

    ``close`` gives the pool's own reference up, as does dropping the pool.
    """

    def __init__(self, description: PoolDescription, mapped: MappedBytes, rank: int = 0) -> None:
        self.description = description
        self.rank = rank
        self.device = mapped.device
        self.num_blocks = description.num_blocks
        self.layer_names = [layout.name for layout in description.layers]
        self._mapped: MappedBytes | None = mapped
        self._layouts = {layout.name: layout for layout in description.layers}

    def close(self) -> None:
        """No new views. The mapping goes with the last view there is."""
        self._mapped = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def block_size(self) -> int:
        """Tokens a block, of the first group."""
        return self.description.groups[0].block_size

    def layer(
        self, layer: str | int, *, kv_first: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """A view of a layer, blocks first; of Mamba a tuple, one a state.

        ``layer`` is a name, or a position in ``layer_names``. Full attention, windows,
        chunks and cross attention: ``(num_blocks, 2, block_size, num_kv_heads,
        head_size)``, of which ``kv_first`` swaps the first two dimensions. Heads of two
        sizes: ``(num_blocks, block_size, num_kv_heads, head_size + head_size_v)``. MLA:
        ``(num_blocks, block_size, head_size)``. In block layout no flat view of all slots
        exists: index ``(slot // block_size, 0 or 1, slot % block_size)``, as
        ``write_slots`` does.
        """
        layout = self._find(layer)
        first = layout.views[0]
        if kv_first and (first.name != "kv" or len(first.shape) != 5):
            raise InvalidArgument(f"layer {layout.name!r} keeps no K and V apart", field="kv_first")
        if first.name == "state":
            return tuple([self._tensor(view) for view in layout.views])
        tensor = self._tensor(first)
        return tensor.transpose(0, 1) if kv_first else tensor

    def parts(self, layer: str | int) -> dict[str, torch.Tensor]:
        """Views of what quantised K and V consist of.

        ``k_scale`` and ``v_scale``, and of nvfp4 also ``k_data`` and ``v_data``, blocks first.
        Empty for a layer that is not quantised.
        """
        views = self._find(layer).views
        return {view.name: self._tensor(view) for view in views if view.name[1:2] == "_"}

    def layer_bytes(self, layer: str | int) -> npt.NDArray[np.uint8]:
        """A view ``(num_blocks, parts, rows, bytes)`` of a layer; needs no torch.

        Parts are K and V, or 1 where they lie together. A row is a token, or the tokens
        that the layer compresses together; of Mamba all the state is one row.
        """
        layout = self._find(layer)
        parts, rows, row = row_shape(layout)
        return self._bytes.array(
            (self.num_blocks, parts, rows, row),
            layout.offset_bytes,
            (layout.block_stride_bytes, rows * row, row, 1),
        )

    def write_slots(
        self,
        layer: str | int,
        slots: Sequence[int] | torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None = None,
    ) -> None:
        """Stores one K and one V a slot, each ``(num_slots, num_kv_heads, head_size)``.

        Of MLA, ``key`` is the one vector, ``(num_slots, head_size)``. Slots of -1 are
        padding: their rows are skipped.
        """
        import torch

        view = self._slotted(layer)
        index = torch.as_tensor(slots, dtype=torch.int64)
        real = index >= 0
        blocks, offsets = self._split(index[real], view.shape[-3 if view.dim() > 3 else 1])
        if view.dim() == 5:
            if value is None:
                raise InvalidArgument("the layer keeps K and V apart: give both", field="value")
            view[blocks, 0, offsets] = key[real]
            view[blocks, 1, offsets] = value[real]
        else:
            row = key if value is None else torch.cat((key, value), dim=-1)
            view[blocks, offsets] = row[real]

    def read_slots(
        self, layer: str | int, slots: Sequence[int] | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V at the slots, each ``(num_slots, num_kv_heads, head_size)``.

        Of MLA both are the one vector, ``(num_slots, head_size)``.
        """
        import torch

        view = self._slotted(layer)
        blocks, offsets = self._split(
            torch.as_tensor(slots, dtype=torch.int64), view.shape[-3 if view.dim() > 3 else 1]
        )
        if view.dim() == 5:
            return view[blocks, 0, offsets], view[blocks, 1, offsets]
        rows = view[blocks, offsets]
        spec = self._spec(layer)
        if not spec.head_size_v:
            return rows, rows
        head_size = spec.head_size
        return rows[..., :head_size], rows[..., head_size:]

    def block_table(
        self, tables: Sequence[Sequence[int]], width: int | None = None
    ) -> torch.Tensor:
        """``slots.block_table`` of one group as an int32 tensor on the pool's device.

        ``(len(tables), width)``, one row a request; 0, the null block, where there is none.
        InvalidArgument for tables of another shape, or a row wider than ``width``.
        """
        import torch

        from kvclient.slots import block_table, checked_tables

        rows = checked_tables(tables, self.num_blocks)
        if width is not None and (wider := [i for i, row in enumerate(rows) if len(row) > width]):
            raise InvalidArgument(
                f"width is {width}, and tables[{wider[0]}] has {len(rows[wider[0]])} blocks: leave "
                "it out for the longest, or give more",
                field="width",
            )
        padded = block_table(rows, width)
        shape = (len(rows), len(padded[0]) if rows else width or 0)
        return torch.tensor(padded, dtype=torch.int32, device=self.device).reshape(shape)

    def slot_mapping(
        self,
        tables: Sequence[Sequence[int]],
        starts: Sequence[int],
        num_tokens: Sequence[int],
        *,
        group: int = 0,
        pad_to: int | None = None,
    ) -> torch.Tensor:
        """``slots.slot_mapping`` of a batch, request after request, as an int64 tensor.

        Of each request's table in ``group``, the slots of the tokens ``starts`` to ``starts +
        num_tokens``; -1 where the table has the null block, and as padding to ``pad_to`` in
        all. InvalidArgument where the three differ in length or a table is too short, and
        where the group's slots are none of tokens: of a Mamba group, or with context
        parallelism.
        """
        import torch

        from kvclient.slots import SLOT_PADDING, checked_counts, checked_tables, slot_mapping

        self._require_group(group)
        spec = self.description.groups[group].spec
        block_size = self.description.table_block_sizes[group]
        if spec.kind == "mamba" or block_size != spec.block_size:
            raise InvalidArgument(
                f"group {group} ({spec.kind}) keeps no slot a token on this rank", field="group"
            )
        rows = checked_tables(tables, self.num_blocks)
        starts = checked_counts(starts, len(rows), "starts")
        num_tokens = checked_counts(num_tokens, len(rows), "num_tokens")
        slots: list[int] = []
        for i, (row, start, count) in enumerate(zip(rows, starts, num_tokens, strict=True)):
            if start + count > len(row) * block_size:
                raise InvalidArgument(
                    f"tables[{i}] has {len(row)} blocks of {block_size} tokens, too few for tokens "
                    f"up to {start + count}: give the request's whole table in group {group}",
                    field=f"tables[{i}]",
                )
            slots += slot_mapping(row, block_size, start, count)
        if pad_to is not None:
            if pad_to < len(slots):
                raise InvalidArgument(f"{len(slots)} slots exceed {pad_to}", field="pad_to")
            slots += [SLOT_PADDING] * (pad_to - len(slots))
        return torch.tensor(slots, dtype=torch.int64, device=self.device)

    def zero_blocks(self, group: int, block_ids: Sequence[int]) -> None:
        """Zero new blocks in all layers of the group.

        For a group with ``needs_zeroing``, before the step that writes them first, in the
        order of steps: a block may come from a request whose last step still reads it.
        """
        self._require_group(group)
        for block_id in block_ids:
            if not 0 < block_id < self.num_blocks:
                raise InvalidArgument(
                    f"block {block_id} is not one of 1 to {self.num_blocks - 1}", field="block_ids"
                )
        for layout in self.description.layers:
            if layout.group == group:
                nbytes = self._spec(layout.name).page_size_bytes
                self._bytes.zero(layout.offset_bytes, layout.block_stride_bytes, nbytes, block_ids)

    def _require_group(self, group: int) -> None:
        if not 0 <= group < len(self.description.groups):
            last = len(self.description.groups) - 1
            raise InvalidArgument(
                f"there is no group {group}: the pool's are 0 to {last}", field="group"
            )

    @property
    def _bytes(self) -> MappedBytes:
        if self._mapped is None:
            raise FailedPrecondition("the pool is closed", reason="POOL_CLOSED")
        return self._mapped

    def _split(self, slots: torch.Tensor, block_size: int) -> tuple[Any, Any]:
        if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < (
            self.num_blocks * block_size
        ):
            raise InvalidArgument("a slot is outside the pool", field="slots")
        return slots // block_size, slots % block_size

    def _slotted(self, layer: str | int) -> torch.Tensor:
        view = self.layer(layer)
        if isinstance(view, tuple):
            raise InvalidArgument("a Mamba layer keeps states, no slots", field="layer")
        return view

    def _tensor(self, view: TensorView) -> torch.Tensor:
        return self._bytes.tensor(view)

    def _spec(self, layer: str | int) -> KVCacheSpec:
        layout = self._find(layer)
        group = self.description.groups[layout.group]
        if not group.layer_specs:
            return group.spec
        return group.layer_specs[group.layer_names.index(layout.name)]

    def _find(self, layer: str | int) -> LayerLayout:
        name = layer
        if isinstance(layer, int) and 0 <= layer < len(self.layer_names):
            name = self.layer_names[layer]
        layout = self._layouts.get(name) if isinstance(name, str) else None
        if layout is None:
            close = get_close_matches(str(layer), self.layer_names, n=1)
            raise NotFound(
                f"there is no layer {layer!r}; "
                + (f"did you mean {close[0]!r}? " if close else "")
                + f"The pool has {len(self.layer_names)}, in layer_names",
                reason="UNKNOWN_LAYER",
                field="layer",
            )
        return layout
