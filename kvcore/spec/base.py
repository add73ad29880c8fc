"""What every KV cache spec says, and what all attention specs share.

A spec is the format of one layer's cache. Names, fields and figures are those of vLLM
0.25.1 (v1/kv_cache_interface.py); dtypes are torch's names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from kvcore.errors import InvalidArgument

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}
"""Bytes of one element, by torch dtype name."""

KV_QUANT_MODES = (
    "none",
    "fp8_per_tensor",
    "int8_per_token_head",
    "fp8_per_token_head",
    "int4_per_token_head",
    "nvfp4",
)
"""vLLM's KVQuantMode, by name. ``dtype`` says how wide the stored elements are."""

SCALE_BYTES = 4
"""One float32 scale a token and head, for K and for V."""


def cdiv(numerator: int, denominator: int) -> int:
    """Division rounded up."""
    return -(-numerator // denominator)


def require_positive(name: str, value: int) -> None:
    """InvalidArgument naming ``name`` unless ``value`` is at least 1."""
    if value <= 0:
        raise InvalidArgument(f"{name} must be positive, got {value}", field=name)


def require_dtype(name: str, dtype: str) -> None:
    """InvalidArgument naming ``name`` unless ``dtype`` is known."""
    if dtype not in DTYPE_BYTES:
        raise InvalidArgument(
            f"{name} {dtype!r} is not one of {', '.join(DTYPE_BYTES)}", field=name
        )


def nvfp4_head_bytes(head_size: int) -> int:
    """Bytes of one nvfp4 head: two values a byte, and an fp8 scale for every 16."""
    return head_size // 2 + head_size // 16


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How large one request may be; what vLLM reads from its own configuration."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_encoder_input_tokens: int = 0
    dcp_world_size: int = 1
    pcp_world_size: int = 1


@dataclass(frozen=True, slots=True)
class KVCacheSpec(ABC):
    """The format of one layer's cache. ``block_size`` is in tokens.

    A spec of your own is a frozen dataclass derived from this one or from a kind that
    it resembles; ``kvcore.single_type.register_kv_cache_spec`` says which manager
    serves it.
    """

    block_size: int

    holds_blocks: ClassVar[bool] = True
    """Whether its layers have a cache at all."""
    supports_prefix_caching: ClassVar[bool] = True
    supports_context_parallel: ClassVar[bool] = False
    """Whether the tokens of a block may be spread over dcp * pcp ranks."""

    def __post_init__(self) -> None:
        require_positive("block_size", self.block_size)

    @property
    @abstractmethod
    def kind(self) -> str:
        """The name of this kind of cache in events and pool descriptions."""

    @property
    def event_window(self) -> int | None:
        """The sliding window that events tell, in tokens."""
        return None

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes of one block in one layer."""

    @property
    def storage_block_size(self) -> int:
        """Entries that a block stores: fewer than its tokens, if the layer compresses."""
        return self.block_size

    @property
    def num_sink_blocks(self) -> int:
        """Blocks the pool sets aside for good, for tokens that every request looks at."""
        return 0

    @property
    def uniform_key(self) -> Hashable:
        """Equal for specs that always need the same number of token slots."""
        return type(self)

    @abstractmethod
    def max_memory_usage_bytes(self, limits: RequestLimits) -> int:
        """The most bytes that one request can hold in one layer."""

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int
    ) -> int | None:
        """The most blocks one request holds at a time, where they are recycled."""
        return None


@dataclass(frozen=True, slots=True)
class AttentionSpec(KVCacheSpec):
    """K and V of every token, ``num_kv_heads`` heads of ``head_size`` elements each.

    ``page_size_padded``: bytes, when a page is made larger than it need be.
    ``indexes_kv_by_block_stride``: the layer's backend steps over a block's K and V
    with one stride, so that pages may be padded.
    """

    num_kv_heads: int
    head_size: int
    dtype: str = "bfloat16"
    _: KW_ONLY
    kv_quant_mode: str = "none"
    page_size_padded: int | None = None
    indexes_kv_by_block_stride: bool = False

    def __post_init__(self) -> None:
        KVCacheSpec.__post_init__(self)
        require_positive("num_kv_heads", self.num_kv_heads)
        require_positive("head_size", self.head_size)
        require_dtype("dtype", self.dtype)
        if self.kv_quant_mode not in KV_QUANT_MODES:
            raise InvalidArgument(
                f"kv_quant_mode {self.kv_quant_mode!r} is not one of {', '.join(KV_QUANT_MODES)}",
                field="kv_quant_mode",
            )
        multiple = {"int4_per_token_head": 2, "nvfp4": 16}.get(self.kv_quant_mode, 1)
        if self.head_size % multiple:
            raise InvalidArgument(
                f"head_size {self.head_size} is not a multiple of {multiple}, as "
                f"{self.kv_quant_mode} needs",
                field="head_size",
            )
        self._check_padding()

    def _check_padding(self) -> None:
        needed = self.real_page_size_bytes + self.scale_bytes
        if self.page_size_padded is not None and self.page_size_padded < needed:
            raise InvalidArgument(
                f"page_size_padded {self.page_size_padded} is less than the {needed} bytes "
                "that a page needs",
                field="page_size_padded",
            )

    @property
    def is_per_token_head(self) -> bool:
        """Whether every token and head has a scale of its own."""
        return self.kv_quant_mode.endswith("_per_token_head")

    @property
    def scale_bytes(self) -> int:
        """Bytes of a page's scales, which lie in the page behind K and V."""
        return (
            2 * self.block_size * self.num_kv_heads * SCALE_BYTES if self.is_per_token_head else 0
        )

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of K and V in a page."""
        head = self._head_bytes(self.head_size)
        return 2 * self.block_size * self.num_kv_heads * head

    @property
    def page_size_bytes(self) -> int:
        if self.page_size_padded is not None:
            return self.page_size_padded
        return self.real_page_size_bytes + self.scale_bytes

    def _head_bytes(self, head_size: int) -> int:
        """Bytes of one head of ``head_size`` elements."""
        width = DTYPE_BYTES[self.dtype]
        if self.kv_quant_mode == "nvfp4":
            return nvfp4_head_bytes(head_size) * width
        if self.kv_quant_mode == "int4_per_token_head":
            return head_size // 2 * width
        return head_size * width
