"""Whether a configuration's prefix cache can ever be hit."""

from __future__ import annotations

from kvcore.spec.base import cdiv
from kvcore.spec.depot import DepotConfig
from kvcore.spec.mamba import MambaSpec
from kvcore.spec.pool import KVCacheGroup
from kvcore.spec.window import SlidingWindowSpec


def why_never_hit(config: DepotConfig) -> str | None:
    """Why no request can hit the prefix cache of ``config``; None if one can.

    A hit ends at a multiple of the scheduler's block size and leaves a token to
    compute; a draft model's groups must hold one block more. A retention interval
    excludes no configuration: the last boundary within a prompt is always kept. None,
    too, where caching is off.
    """
    if not config.enable_caching:
        return None
    boundary = config.scheduler_block_size
    dropped = max(
        (
            group.spec.block_size * config.context_parallel_size
            for i, group in enumerate(config.kv_cache.groups)
            if i in config.eagle_group_ids and not isinstance(group.manager_spec, MambaSpec)
        ),
        default=0,
    )
    sizes = ", ".join(str(group.spec.block_size) for group in config.cached_groups)
    if boundary + dropped + 1 > config.max_model_len:
        ahead = f" and the {dropped} that EAGLE drops" if dropped else ""
        return (
            f"hits are multiples of {boundary} tokens (the block sizes are {sizes}); with a token "
            f"to compute{ahead}, the shortest is beyond max_model_len {config.max_model_len}"
        )
    num_needed = sum(_blocks_of_hit(config, group) for group in config.cached_groups)
    num_sinks = sum(group.manager_spec.num_sink_blocks for group in config.cached_groups)
    num_usable = config.kv_cache.num_blocks - 1 - num_sinks
    if num_needed > num_usable:
        return (
            f"hits are multiples of {boundary} tokens (the block sizes are {sizes}), which take "
            f"{num_needed} blocks; the pool has {num_usable}"
        )
    return None


def _blocks_of_hit(config: DepotConfig, group: KVCacheGroup) -> int:
    """Blocks that the shortest hit takes, with one for the token to compute."""
    spec = group.manager_spec
    num_blocks = config.scheduler_block_size // (spec.block_size * config.context_parallel_size)
    if isinstance(spec, MambaSpec):
        num_blocks = 1
    elif isinstance(spec, SlidingWindowSpec):
        num_blocks = min(num_blocks, cdiv(spec.sliding_window - 1, spec.block_size))
    return num_blocks + 1
