"""Shapes of models: what one token's KV takes, and which layers look at what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcore.spec import (
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)


class Shape(Protocol):
    """A frozen dataclass; its fields are what options may override."""

    def groups(self, block_size: int) -> tuple[KVCacheGroup, ...]:
        """The KV cache groups of the model's layers."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of ``num_layers`` equal full-attention layers."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str = "bfloat16"

    def groups(self, block_size: int) -> tuple[KVCacheGroup, ...]:
        spec = FullAttentionSpec(block_size, self.num_kv_heads, self.head_size, self.dtype)
        return (_group(range(self.num_layers), spec),)


@dataclass(frozen=True, slots=True)
class SlidingShape:
    """Of every ``windows + 1`` layers the last looks at everything, the others at a window.

    As in Gemma 3. Layers that stand at the same place in that pattern form a group.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    windows: int
    sliding_window: int
    dtype: str = "bfloat16"

    def groups(self, block_size: int) -> tuple[KVCacheGroup, ...]:
        heads = (block_size, self.num_kv_heads, self.head_size, self.dtype)
        window = SlidingWindowSpec(*heads, sliding_window=self.sliding_window)
        return _pattern(self.num_layers, [window] * self.windows, FullAttentionSpec(*heads))


@dataclass(frozen=True, slots=True)
class MambaShape:
    """Of every ``mambas + 1`` layers the last attends, the others carry a Mamba state.

    The state is kept at every block's end, so that hits can end at each of them; its page
    is padded to the attention's.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    mambas: int
    conv_shape: tuple[int, ...]
    ssm_shape: tuple[int, ...]
    dtype: str = "bfloat16"

    def groups(self, block_size: int) -> tuple[KVCacheGroup, ...]:
        full = FullAttentionSpec(block_size, self.num_kv_heads, self.head_size, self.dtype)
        mamba = MambaSpec(
            block_size,
            shapes=(self.conv_shape, self.ssm_shape),
            dtypes=(self.dtype, "float32"),
            page_size_padded=full.page_size_bytes,
            mamba_cache_mode="all",
        )
        return _pattern(self.num_layers, [mamba] * self.mambas, full)


def _pattern(
    num_layers: int, others: Sequence[KVCacheSpec], full: KVCacheSpec
) -> tuple[KVCacheGroup, ...]:
    """Full attention first, then a group for each place in the pattern before it."""
    width = len(others) + 1
    groups = [_group(range(width - 1, num_layers, width), full)]
    groups += [_group(range(i, num_layers, width), spec) for i, spec in enumerate(others)]
    return tuple(groups)


def _group(indices: Sequence[int], spec: KVCacheSpec) -> KVCacheGroup:
    name = "mixer" if isinstance(spec, MambaSpec) else "self_attn.attn"
    return KVCacheGroup(tuple(f"model.layers.{index}.{name}" for index in indices), spec)


MODELS: dict[str, Shape] = {
    # 128 bytes a token: for demonstrations and tests.
    "tiny": ModelShape(num_layers=2, num_kv_heads=1, head_size=16),
    "qwen2-0.5b": ModelShape(num_layers=24, num_kv_heads=2, head_size=64),
    # As small: layers of several kinds, that share one pool.
    "gemma-like": SlidingShape(
        num_layers=6, num_kv_heads=1, head_size=16, windows=2, sliding_window=128
    ),
    "mamba-hybrid": MambaShape(
        num_layers=6, num_kv_heads=1, head_size=16, mambas=2, conv_shape=(3, 8), ssm_shape=(2, 4, 4)
    ),
}
