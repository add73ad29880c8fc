"""Specs of multi-head latent attention: one compressed entry a token, no K and V apart."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from kvcore.errors import InvalidArgument
from kvcore.spec.base import DTYPE_BYTES, AttentionSpec, require_positive
from kvcore.spec.full_attention import FullAttentionSpec
from kvcore.spec.window import SlidingWindowSpec

DEEPSEEK_V4 = "deepseek_v4"
FP8_DS_MLA = "fp8_ds_mla"
FP8_DS_MLA_TOKEN_BYTES = 656
"""512 fp8 values, 4 float32 scales, 64 bfloat16 rotary values."""
DEEPSEEK_V4_TOKEN_BYTES = 584
"""448 fp8 values, 64 bfloat16 rotary values, 8 fp8 scales."""


def _check_compression(spec: MLAAttentionSpec | SlidingWindowMLASpec) -> None:
    require_positive("compress_ratio", spec.compress_ratio)
    if spec.block_size % spec.compress_ratio:
        raise InvalidArgument(
            f"compress_ratio {spec.compress_ratio} does not divide the block size "
            f"{spec.block_size}",
            field="compress_ratio",
        )
    if spec.model_version not in (None, DEEPSEEK_V4):
        raise InvalidArgument(
            f"model_version {spec.model_version!r} is not {DEEPSEEK_V4}", field="model_version"
        )


def _align(spec: MLAAttentionSpec | SlidingWindowMLASpec) -> None:
    """Pad the page of a spec that is being made to a multiple of its ``alignment``."""
    if spec.alignment is None:
        return
    require_positive("alignment", spec.alignment)
    real = spec.real_page_size_bytes
    padded = real + -real % spec.alignment
    if padded != real:
        object.__setattr__(spec, "page_size_padded", padded)


@dataclass(frozen=True, slots=True)
class MLAAttentionSpec(FullAttentionSpec):
    """``cache_dtype_str``: "fp8_ds_mla" packs a token into 656 bytes (DeepSeek V4: 584).

    ``alignment``: the page is padded to a multiple of so many bytes.
    ``compress_ratio``: tokens an entry. ``model_version``: None or "deepseek_v4".
    """

    _: KW_ONLY
    cache_dtype_str: str | None = None
    alignment: int | None = None
    compress_ratio: int = 1
    model_version: str | None = None

    def __post_init__(self) -> None:
        _check_compression(self)
        FullAttentionSpec.__post_init__(self)
        _align(self)
        self._check_padding()

    @property
    def kind(self) -> str:
        return "mla_attention"

    @property
    def storage_block_size(self) -> int:
        return self.block_size // self.compress_ratio

    @property
    def real_page_size_bytes(self) -> int:
        if self.cache_dtype_str == FP8_DS_MLA:
            if self.model_version == DEEPSEEK_V4:
                return self.storage_block_size * DEEPSEEK_V4_TOKEN_BYTES
            return self.block_size * FP8_DS_MLA_TOKEN_BYTES
        head_size = self.head_size
        if self.kv_quant_mode == "int4_per_token_head":
            head_size //= 2
        return self.storage_block_size * self.num_kv_heads * head_size * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class HiddenStateCacheSpec(MLAAttentionSpec):
    """A layer that keeps hidden states, one entry a token, to be read later."""


@dataclass(frozen=True, slots=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """A sliding window over MLA entries; fields as in MLAAttentionSpec."""

    _: KW_ONLY
    cache_dtype_str: str | None = None
    alignment: int | None = None
    compress_ratio: int = 1
    model_version: str | None = None

    def __post_init__(self) -> None:
        _check_compression(self)
        SlidingWindowSpec.__post_init__(self)
        _align(self)
        AttentionSpec._check_padding(self)

    @property
    def kind(self) -> str:
        return "sliding_window_mla"

    @property
    def storage_block_size(self) -> int:
        return self.block_size // self.compress_ratio

    @property
    def real_page_size_bytes(self) -> int:
        if self.model_version == DEEPSEEK_V4 and self.cache_dtype_str == FP8_DS_MLA:
            return self.storage_block_size * DEEPSEEK_V4_TOKEN_BYTES
        return (
            self.storage_block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]
        )
