"""The bytes of a block, as they lie in a pool."""

from __future__ import annotations

from kvcore.memory import PoolMemory, Span, TensorView, joined


def block_spans(pool: PoolMemory, group: int) -> list[Span]:
    """Where the pages of a group's blocks lie, on every rank."""
    found = pool.config.kv_cache.groups[group]
    layouts = [pool.layouts[name] for name in found.layer_names]
    return joined(
        Span(layout.offset_bytes, layout.block_stride_bytes, spec.page_size_bytes)
        for layout, spec in zip(layouts, found.layer_specs, strict=True)
    )


def block_pages(pool: PoolMemory, block_id: int, group: int = 0) -> bytes:
    """A copy of the block's pages: rank by rank, layer by layer of the group."""
    pages = []
    for memory in pool.ranks:
        everything = memory.tensor(TensorView("", "uint8", (memory.nbytes,), (1,), 0))
        for span in block_spans(pool, group):
            first = span.offset + block_id * span.stride
            pages.append(everything[first : first + span.nbytes].cpu().numpy().tobytes())
    return b"".join(pages)
