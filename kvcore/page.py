"""What a page holds: the tensors in one block of one layer, by kind of attention.

The shapes are those that vLLM 0.25.1's attention backends ask for: FlashAttention's
with K and V apart, FlashAttention's for heads of two sizes, Triton's with a scale behind
each quantised head, TurboQuant's, MLA's, and the model runner's for Mamba states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from kvcore.errors import InvalidArgument
from kvcore.spec import (
    DTYPE_BYTES,
    AttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    TQFullAttentionSpec,
)
from kvcore.spec.base import SCALE_BYTES, nvfp4_head_bytes

_NVFP4_GROUP = 16  # elements that share a scale


@dataclass(frozen=True, slots=True)
class PagePart:
    """A tensor within a page; ``strides`` are in elements, the last dimension's is 1."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset_bytes: int = 0


def page_parts(spec: KVCacheSpec) -> tuple[PagePart, ...]:
    """The tensors of one page.

    First the layer's own: "kv", of Mamba every "state". Then, of quantised K and V, its
    parts. A kind that is not one of vLLM's has its bytes as "page". InvalidArgument for
    sizes that no tensor can have.
    """
    parts = tuple(_parts(spec))
    for part in parts:
        itemsize = DTYPE_BYTES[part.dtype]
        if part.offset_bytes % itemsize or spec.page_size_bytes % itemsize:
            raise InvalidArgument(
                f"a page of {spec.page_size_bytes} bytes with {part.name} at byte "
                f"{part.offset_bytes} cannot hold {part.dtype}: pad it to a multiple of {itemsize}",
                field="page_size_padded",
            )
        last = part.offset_bytes + itemsize * (
            1 + sum((n - 1) * stride for n, stride in zip(part.shape, part.strides, strict=True))
        )
        assert last <= spec.page_size_bytes
    return parts


def _parts(spec: KVCacheSpec) -> Iterator[PagePart]:
    if isinstance(spec, MambaSpec):
        offset = 0
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
            yield _dense("state", dtype, shape, offset)
            offset += prod(shape) * DTYPE_BYTES[dtype]
    elif isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        yield _latent(spec)
    elif isinstance(spec, TQFullAttentionSpec) and spec.tq_slot_size > 0:
        yield _dense("kv", "uint8", (spec.block_size, spec.num_kv_heads, spec.tq_slot_size))
    elif isinstance(spec, AttentionSpec):
        yield from _heads(spec)
    else:
        yield _dense("page", "uint8", (spec.page_size_bytes,))


def _dense(name: str, dtype: str, shape: tuple[int, ...], offset_bytes: int = 0) -> PagePart:
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return PagePart(name, dtype, shape, strides, offset_bytes)


def _latent(spec: MLAAttentionSpec | SlidingWindowMLASpec) -> PagePart:
    """K and V as one vector a row. Scales a token, where there are, lie behind all rows."""
    rows, heads = spec.storage_block_size, spec.num_kv_heads
    if spec.cache_dtype_str == "fp8_ds_mla":
        return _dense("kv", "uint8", (rows, spec.real_page_size_bytes // rows))
    width = spec.head_size
    if spec.kv_quant_mode == "int4_per_token_head":
        width //= 2
    return _dense("kv", spec.dtype, (rows, width) if heads == 1 else (rows, heads, width))


def _heads(spec: AttentionSpec) -> Iterator[PagePart]:
    """K and V a head: apart where they are of one size, else one behind the other."""
    size, heads, itemsize = spec.block_size, spec.num_kv_heads, DTYPE_BYTES[spec.dtype]
    head_sizes = (spec.head_size, getattr(spec, "head_size_v", None) or spec.head_size)
    widths = [_width(spec, head_size) for head_size in head_sizes]
    apart = widths[0] == widths[1]
    if apart:
        yield _dense("kv", spec.dtype, (2, size, heads, widths[0]))
    else:
        yield _dense("kv", spec.dtype, (size, heads, sum(widths)))
    if spec.is_per_token_head:
        token = widths[0] if apart else sum(widths)  # elements from a head to the next
        second = size * heads * widths[0] if apart else widths[0]
        for side, name in enumerate(("k_scale", "v_scale")):
            offset = (second * side + widths[side]) * itemsize - SCALE_BYTES
            if offset % SCALE_BYTES or token * itemsize % SCALE_BYTES:
                raise InvalidArgument(
                    f"a scale of {SCALE_BYTES} bytes cannot follow a head of "
                    f"{head_sizes[side]} elements: take a multiple of {2 * SCALE_BYTES}",
                    field="head_size",
                )
            stride = token * itemsize // SCALE_BYTES
            yield PagePart(name, "float32", (size, heads), (heads * stride, stride), offset)
    elif spec.kv_quant_mode == "nvfp4" and apart:
        data, scales = head_sizes[0] // 2, head_sizes[0] // _NVFP4_GROUP
        for side, name in enumerate("kv"):
            start = side * size * heads * widths[0]
            yield _dense(f"{name}_data", "uint8", (size, heads, data), start)
            behind = start + size * heads * data
            yield _dense(f"{name}_scale", "float8_e4m3fn", (size, heads, scales), behind)


def _width(spec: AttentionSpec, head_size: int) -> int:
    """Elements that one head of K or V takes of a token, its scales included."""
    if spec.kv_quant_mode == "nvfp4":
        return nvfp4_head_bytes(head_size)
    if spec.kv_quant_mode == "int4_per_token_head":
        head_size //= 2
    if spec.is_per_token_head:
        return head_size + SCALE_BYTES // DTYPE_BYTES[spec.dtype]
    return head_size
