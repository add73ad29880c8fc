"""Specs of layers that look at an encoder's tokens, or are part of an encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcore.spec.base import AttentionSpec, RequestLimits, cdiv


@dataclass(frozen=True, slots=True)
class CrossAttentionSpec(AttentionSpec):
    """A decoder's layer that looks at the encoder's output.

    Its blocks hold encoder tokens, which are a request's own: nothing is shared.
    """

    supports_prefix_caching: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        return "cross_attention"

    def max_memory_usage_bytes(self, limits: RequestLimits) -> int:
        num_blocks = cdiv(limits.max_num_encoder_input_tokens, self.block_size)
        return num_blocks * self.page_size_bytes


@dataclass(frozen=True, slots=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """A layer that computes all its tokens at once, and keeps nothing."""

    holds_blocks: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        return "encoder_only_attention"

    def max_memory_usage_bytes(self, limits: RequestLimits) -> int:
        return 0
