"""Shapes of models: what one token's KV takes."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.spec import FullAttentionSpec, KVCacheGroup


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of ``num_layers`` equal full-attention layers."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str = "bfloat16"

    def groups(self, block_size: int) -> tuple[KVCacheGroup, ...]:
        """The one KV cache group that all layers form."""
        spec = FullAttentionSpec(block_size, self.num_kv_heads, self.head_size, self.dtype)
        names = tuple(f"model.layers.{index}.self_attn.attn" for index in range(self.num_layers))
        return (KVCacheGroup(names, spec),)


MODELS: dict[str, ModelShape] = {
    # 128 bytes a token: for demonstrations and tests.
    "tiny": ModelShape(num_layers=2, num_kv_heads=1, head_size=16),
    "qwen2-0.5b": ModelShape(num_layers=24, num_kv_heads=2, head_size=64),
}
