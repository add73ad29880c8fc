"""Descriptions of small pools, as a server would send them, of 16 blocks of 4 tokens."""

from __future__ import annotations

from kvclient.description import (
    KVCacheGroup,
    KVCacheSpec,
    LayerLayout,
    MambaState,
    PoolDescription,
    TensorView,
)

BLOCK_SIZE, NUM_BLOCKS = 4, 16

Group = tuple[KVCacheSpec, tuple[LayerLayout, ...]]


def _group(spec: KVCacheSpec, prefix: str, num_layers: int, *shapes: tuple[int, ...]) -> Group:
    """Layers of bfloat16; only shapes matter here, not where they lie."""
    name = "state" if spec.kind == "mamba" else "kv"
    views = tuple(TensorView(name, "bfloat16", (NUM_BLOCKS, *shape), (), 0) for shape in shapes)
    return spec, tuple(
        LayerLayout(f"{prefix}.{i}", 0, spec.page_size_bytes, 0, views) for i in range(num_layers)
    )


def full(num_layers: int) -> Group:
    """Full attention, 16 bytes of K and 16 of V a token."""
    spec = KVCacheSpec(kind="full_attention", block_size=BLOCK_SIZE, page_size_bytes=128)
    return _group(spec, "full", num_layers, (2, BLOCK_SIZE, 1, 8))


def window(num_layers: int, sliding_window: int) -> Group:
    """The same, looking at a window."""
    spec = KVCacheSpec(
        kind="sliding_window",
        block_size=BLOCK_SIZE,
        page_size_bytes=128,
        sliding_window=sliding_window,
    )
    return _group(spec, "window", num_layers, (2, BLOCK_SIZE, 1, 8))


def chunked(attention_chunk_size: int) -> Group:
    """Chunked local attention."""
    spec = KVCacheSpec(
        kind="chunked_local_attention",
        block_size=BLOCK_SIZE,
        page_size_bytes=128,
        attention_chunk_size=attention_chunk_size,
    )
    return _group(spec, "chunked", 1, (2, BLOCK_SIZE, 1, 8))


def rswa(rswa_window: int) -> Group:
    """The prompt, and a window of what is generated."""
    spec = KVCacheSpec(
        kind="full_attention", block_size=BLOCK_SIZE, page_size_bytes=128, rswa_window=rswa_window
    )
    return _group(spec, "rswa", 1, (2, BLOCK_SIZE, 1, 8))


def mamba(cache_mode: str, num_speculative_blocks: int = 0) -> Group:
    """States of 32 bytes in two tensors."""
    spec = KVCacheSpec(
        kind="mamba",
        block_size=BLOCK_SIZE,
        page_size_bytes=128,
        mamba_states=(MambaState((8,), "bfloat16"), MambaState((2, 4), "bfloat16")),
        mamba_cache_mode=cache_mode,
        num_speculative_blocks=num_speculative_blocks,
    )
    return _group(spec, "mamba", 1, (8,), (2, 4))


MAMBA_ALL, MAMBA_ALIGN = mamba("all"), mamba("align")


def describe(*groups: Group) -> PoolDescription:
    """A pool of these groups, in their order."""
    return PoolDescription(
        epoch="epoch",
        fingerprint="",
        num_blocks=NUM_BLOCKS,
        groups=tuple(
            KVCacheGroup(spec, tuple(layout.name for layout in layouts)) for spec, layouts in groups
        ),
        layout="block",
        layers=tuple(layout for _, layouts in groups for layout in layouts),
        mappings=(),
        hash_scheme="kvd_sha256",
        hash_seed="0",
        hash_block_size=BLOCK_SIZE,
        max_model_len=1024,
        enable_prefix_caching=True,
        scheduler_block_size=BLOCK_SIZE,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
    )
