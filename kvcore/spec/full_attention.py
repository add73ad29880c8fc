"""Specs of layers that look at every earlier token, and of those kept like them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from kvcore.errors import InvalidArgument
from kvcore.spec.base import AttentionSpec, RequestLimits, cdiv, require_positive


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(AttentionSpec):
    """A layer whose blocks are all kept until the request ends.

    ``head_size_v``: of the V head; None makes it ``head_size``. ``sliding_window`` and
    ``attention_chunk_size``: set when the layer computes with a window although all
    its blocks are kept. ``non_causal``: the layer looks at later tokens too.
    """

    head_size_v: int = None  # type: ignore[assignment]  # never None once made
    _: KW_ONLY
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False

    supports_context_parallel: ClassVar[bool] = True

    def __post_init__(self) -> None:
        fill_head_size_v(self)
        for name in ("sliding_window", "attention_chunk_size"):
            value = getattr(self, name)
            if value is not None:
                require_positive(name, value)
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise InvalidArgument(
                "a layer has a sliding window or attends in chunks, not both",
                field="attention_chunk_size",
            )
        AttentionSpec.__post_init__(self)

    @property
    def kind(self) -> str:
        return "full_attention"

    @property
    def uniform_key(self) -> Hashable:
        return "full_attention"

    @property
    def real_page_size_bytes(self) -> int:
        return self._kv_bytes()

    def _kv_bytes(self) -> int:
        heads = self._head_bytes(self.head_size) + self._head_bytes(self.head_size_v)
        return self.block_size * self.num_kv_heads * heads

    def max_memory_usage_bytes(self, limits: RequestLimits) -> int:
        # A context-parallel rank keeps its share of the tokens.
        tokens = cdiv(limits.max_model_len, limits.dcp_world_size * limits.pcp_world_size)
        return cdiv(tokens, self.block_size) * self.page_size_bytes


def fill_head_size_v(spec: AttentionSpec) -> None:
    """Give a spec that is being made the V head size that it left out."""
    head_size_v = getattr(spec, "head_size_v", None)
    if head_size_v is None:
        object.__setattr__(spec, "head_size_v", spec.head_size)
    else:
        require_positive("head_size_v", head_size_v)


@dataclass(frozen=True, slots=True)
class TQFullAttentionSpec(FullAttentionSpec):
    """TurboQuant: ``tq_slot_size`` bytes a token and head, K and V together; 0: plain."""

    _: KW_ONLY
    tq_slot_size: int = 0

    def __post_init__(self) -> None:
        if self.tq_slot_size < 0:
            raise InvalidArgument("tq_slot_size must not be negative", field="tq_slot_size")
        FullAttentionSpec.__post_init__(self)

    @property
    def real_page_size_bytes(self) -> int:
        if self.tq_slot_size > 0:
            return self.block_size * self.num_kv_heads * self.tq_slot_size
        return self._kv_bytes()


@dataclass(frozen=True, slots=True)
class RSWASpec(FullAttentionSpec):
    """Reference sliding window attention: the prompt stays visible, and of the
    generated tokens the last ``rswa_window``. What lies between is released.
    """

    _: KW_ONLY
    rswa_window: int

    def __post_init__(self) -> None:
        require_positive("rswa_window", self.rswa_window)
        FullAttentionSpec.__post_init__(self)

    @property
    def uniform_key(self) -> Hashable:
        return ("rswa", self.rswa_window)


@dataclass(frozen=True, slots=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention over ``sink_len`` more tokens, the same ones for every request.

    Their blocks are set aside when the pool is made, and stand in no block table.
    """

    _: KW_ONLY
    sink_len: int

    def __post_init__(self) -> None:
        FullAttentionSpec.__post_init__(self)
        if self.sink_len <= 0 or self.sink_len % self.block_size:
            raise InvalidArgument(
                f"sink_len must be a positive multiple of the block size {self.block_size}, "
                f"got {self.sink_len}",
                field="sink_len",
            )

    @property
    def kind(self) -> str:
        return "sink_full_attention"

    @property
    def num_sink_blocks(self) -> int:
        return self.sink_len // self.block_size

    @property
    def uniform_key(self) -> Hashable:
        return ("sink", self.sink_len)
