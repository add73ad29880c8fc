"""Where every layer lies in the pool's bytes: the same on every device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcore.errors import InvalidArgument
from kvcore.page import page_parts
from kvcore.spec import DTYPE_BYTES, DepotConfig, KVCacheSpec


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


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of every block that lie together: block ``b``'s at ``offset + b * stride``."""

    offset: int
    stride: int
    nbytes: int


def joined(pages: Iterable[Span]) -> list[Span]:
    """The pages of a block, in order, as few spans: those that follow each other are one."""
    spans: list[Span] = []
    for page in pages:
        last = spans[-1] if spans else None
        if last and last.stride == page.stride and last.offset + last.nbytes == page.offset:
            spans[-1] = Span(last.offset, last.stride, last.nbytes + page.nbytes)
        else:
            spans.append(page)
    return spans


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
