"""Specs of layers that look at a part of the earlier tokens, and recycle their blocks."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass

from kvcore.spec.base import (
    DTYPE_BYTES,
    AttentionSpec,
    RequestLimits,
    cdiv,
    require_positive,
)
from kvcore.spec.full_attention import fill_head_size_v


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(AttentionSpec):
    """A layer that looks at the last ``sliding_window`` tokens, the present one included.

    ``head_size_v``: of the V head; None makes it ``head_size``.
    """

    head_size_v: int = None  # type: ignore[assignment]  # never None once made
    _: KW_ONLY
    sliding_window: int

    def __post_init__(self) -> None:
        fill_head_size_v(self)
        require_positive("sliding_window", self.sliding_window)
        AttentionSpec.__post_init__(self)

    @property
    def kind(self) -> str:
        return "sliding_window"

    @property
    def event_window(self) -> int | None:
        return self.sliding_window

    @property
    def uniform_key(self) -> Hashable:
        return ("sliding_window", self.sliding_window)

    @property
    def real_page_size_bytes(self) -> int:
        if self.kv_quant_mode == "nvfp4":
            heads = self._head_bytes(self.head_size) + self._head_bytes(self.head_size_v)
        else:
            # int4 is not packed here: vLLM gives these layers a byte a value.
            heads = (self.head_size + self.head_size_v) * DTYPE_BYTES[self.dtype]
        return self.block_size * self.num_kv_heads * heads

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int
    ) -> int:
        # The window before the step, and what the step computes; and one block more,
        # as the window may begin inside one.
        tokens = min(self.sliding_window - 1 + max_num_batched_tokens, max_model_len)
        return cdiv(tokens, self.block_size) + 1

    def max_memory_usage_bytes(self, limits: RequestLimits) -> int:
        num_blocks = self.max_admission_blocks_per_request(
            limits.max_num_batched_tokens, limits.max_model_len
        )
        return num_blocks * self.page_size_bytes


@dataclass(frozen=True, slots=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A layer that looks back to the last multiple of ``attention_chunk_size`` tokens."""

    _: KW_ONLY
    attention_chunk_size: int

    def __post_init__(self) -> None:
        require_positive("attention_chunk_size", self.attention_chunk_size)
        AttentionSpec.__post_init__(self)

    @property
    def kind(self) -> str:
        return "chunked_local_attention"

    @property
    def uniform_key(self) -> Hashable:
        return ("chunked_local_attention", self.attention_chunk_size)

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int
    ) -> int:
        # The chunk under way, and what the step computes.
        tokens = min(self.attention_chunk_size + max_num_batched_tokens, max_model_len)
        return cdiv(tokens, self.block_size)

    def max_memory_usage_bytes(self, limits: RequestLimits) -> int:
        num_blocks = self.max_admission_blocks_per_request(
            limits.max_num_batched_tokens, limits.max_model_len
        )
        return num_blocks * self.page_size_bytes
