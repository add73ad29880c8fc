"""Specs say of themselves what vLLM 0.25.1's say: page bytes, caps, kinds, windows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from families import chunked, full, mamba, sliding
from harness import Oracle
from ours import describe_spec, make_spec

pytestmark = pytest.mark.oracle

Spec = dict[str, Any]

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "uint8", "int8")
QUANTISED = {
    "none": ("bfloat16", "float32"),
    "fp8_per_tensor": ("float8_e4m3fn", "uint8"),
    "int8_per_token_head": ("int8",),
    "fp8_per_token_head": ("float8_e4m3fn",),
    "int4_per_token_head": ("uint8",),
    "nvfp4": ("uint8",),
}
"""The element types that each mode stores."""

LENGTHS = (
    {"max_model_len": 1000, "max_num_batched_tokens": None},
    {"max_model_len": 1000, "max_num_batched_tokens": 96},
    {"max_model_len": 100, "max_num_batched_tokens": 8192},
)


def _each(specs: list[Spec], **fields: tuple[Any, ...]) -> list[Spec]:
    """Every spec with every combination of the fields' values; None leaves a field out."""
    return [
        {**spec, **{name: value for name, value in zip(fields, values, strict=True) if value}}
        for spec in specs
        for values in itertools.product(*fields.values())
    ]


def _attention() -> list[Spec]:
    plain = [
        full(16),
        full(16, sliding_window=64),
        full(16, attention_chunk_size=64),
        full(16, non_causal=True),
        full(16, "RSWASpec", rswa_window=40),
        full(16, "SinkFullAttentionSpec", sink_len=32),
        full(16, "TQFullAttentionSpec"),
        full(16, "TQFullAttentionSpec", tq_slot_size=136),
        sliding(16, 100),
        sliding(16, 1),
    ]
    one_size = [
        chunked(16, 64),
        full(16, "CrossAttentionSpec"),
        full(16, "EncoderOnlyAttentionSpec"),
    ]
    specs = []
    for mode, dtypes in QUANTISED.items():
        sized = _each(plain, head_size=(64, 128), head_size_v=(None, 32))
        specs += _each(
            sized + _each(one_size, head_size=(64,)),
            kv_quant_mode=(None if mode == "none" else mode,),
            dtype=dtypes,
            num_kv_heads=(1, 3),
            page_size_padded=(None, 1 << 20),
        )
    return specs + _each(plain, page_size_padded=(64,))


def _latent() -> list[Spec]:
    fields = {"compress_ratio": (1, 4), "alignment": (None, 576), "head_size": (576,)}
    mla = _each(
        [full(64, "MLAAttentionSpec", dtype=dtype) for dtype in ("bfloat16", "uint8")]
        + [full(64, "MLAAttentionSpec", dtype="uint8", kv_quant_mode="int4_per_token_head")]
        + [full(64, "HiddenStateCacheSpec")],
        cache_dtype_str=(None, "auto", "fp8_ds_mla"),
        model_version=(None, "deepseek_v4"),
        **fields,
    )
    window = _each(
        [sliding(64, 128, "SlidingWindowMLASpec", dtype="uint8")],
        cache_dtype_str=(None, "fp8_ds_mla"),
        model_version=(None, "deepseek_v4"),
        **fields,
    )
    return mla + window


def _states() -> list[Spec]:
    shapes = ([[3, 8], [4, 4]], [[7, 128]], [[2, 3, 5], [1], [16, 64, 128]])
    dtypes = (["float16", "float32", "bfloat16"], ["float32"] * 3)
    return [
        {
            **mamba(block_size, mode, num_speculative_blocks=num_speculative_blocks),
            "shapes": shape,
            "dtypes": dtype[: len(shape)],
            **({"page_size_padded": 1 << 20} if padded else {}),
        }
        for block_size, mode, num_speculative_blocks, shape, dtype, padded in itertools.product(
            (16, 1000), ("none", "all", "align"), (0, 2), shapes, dtypes, (False, True)
        )
    ]


def _uniform() -> list[Spec]:
    layers = (
        {"a": full(16), "b": full(16, head_size_v=8, num_kv_heads=4)},
        {"a": full(16), "b": full(16, "MLAAttentionSpec", head_size=576)},
        {"a": full(16, "RSWASpec", rswa_window=32), "b": full(16, "RSWASpec", rswa_window=32)},
        {"a": sliding(16, 64), "b": sliding(16, 64, num_kv_heads=4)},
        {"a": sliding(16, 64), "b": sliding(16, 32)},
        {"a": full(16), "b": sliding(16, 64)},
        {"a": full(16), "b": full(32)},
        {"a": chunked(16, 64), "b": chunked(16, 64)},
        {"a": chunked(16, 64), "b": chunked(16, 32)},
        {"a": mamba(16, "all"), "b": {**mamba(16, "all"), "shapes": [[5], [6]]}},
        {"a": mamba(16, "all"), "b": mamba(16, "all", num_speculative_blocks=1)},
        {
            "a": sliding(16, 64, "SlidingWindowMLASpec"),
            "b": sliding(16, 64, "SlidingWindowMLASpec", num_kv_heads=2),
        },
    )
    return [
        {"kind": "UniformTypeKVCacheSpecs", "block_size": 16, "kv_cache_specs": one}
        for one in layers
    ]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(
    "specs",
    [
        pytest.param(_attention(), id="attention"),
        pytest.param(_latent(), id="latent"),
        pytest.param(_states(), id="states"),
        pytest.param(_uniform(), id="uniform"),
    ],
)
def test_specs_agree(oracle: Oracle, specs: list[Spec], lengths: dict[str, Any]) -> None:
    config = {**lengths, "encoder_max": 77, "dcp_world_size": 1, "pcp_world_size": 1}
    theirs = oracle.describe_specs(config, specs)
    for spec, described in zip(specs, theirs, strict=True):
        if "raised" in described:
            with pytest.raises(Exception, match=r"\w"):
                describe_spec(make_spec(spec), config)
        else:
            assert describe_spec(make_spec(spec), config) == described, spec


@pytest.mark.parametrize(("dcp", "pcp"), [(2, 1), (1, 2), (4, 2)])
def test_context_parallel_memory_agrees(oracle: Oracle, dcp: int, pcp: int) -> None:
    config = {**LENGTHS[0], "encoder_max": 0, "dcp_world_size": dcp, "pcp_world_size": pcp}
    specs = [full(16), full(16, "MLAAttentionSpec"), full(16, "TQFullAttentionSpec")]
    assert [describe_spec(make_spec(spec), config) for spec in specs] == oracle.describe_specs(
        config, specs
    )
