"""Page sizes and admission bounds of every kind of spec, worked by hand."""

from __future__ import annotations

import pytest

from kvcore.errors import InvalidArgument
from kvcore.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RequestLimits,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    TQFullAttentionSpec,
    UniformTypeKVCacheSpecs,
)

# Block size 16 and 8 heads of 128 unless told: 16 * 8 * 128 = 16384 values a K page.
INT8 = {"dtype": "int8", "kv_quant_mode": "int8_per_token_head"}
FP8 = {"dtype": "float8_e4m3fn", "kv_quant_mode": "fp8_per_token_head"}
INT4 = {"dtype": "uint8", "kv_quant_mode": "int4_per_token_head"}
NVFP4 = {"dtype": "uint8", "kv_quant_mode": "nvfp4"}
DS_MLA = {"dtype": "uint8", "cache_dtype_str": "fp8_ds_mla"}
V4 = {**DS_MLA, "model_version": "deepseek_v4"}
SCALES = 2 * 16 * 8 * 4


def _window(**options: object) -> SlidingWindowSpec:
    return SlidingWindowSpec(16, 8, 128, sliding_window=64, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "page_bytes"),
    [
        pytest.param(FullAttentionSpec(16, 8, 128), 65536, id="full"),
        pytest.param(FullAttentionSpec(16, 8, 128, "float32"), 131072, id="full-float32"),
        pytest.param(FullAttentionSpec(16, 8, 128, "float8_e4m3fn"), 32768, id="full-fp8"),
        pytest.param(FullAttentionSpec(16, 8, 128, head_size_v=64), 49152, id="full-smaller-v"),
        pytest.param(FullAttentionSpec(16, 8, 128, page_size_padded=70000), 70000, id="padded"),
        pytest.param(
            FullAttentionSpec(16, 8, 128, **INT8),  # type: ignore[arg-type]
            32768 + SCALES,
            id="full-int8-scales",
        ),
        pytest.param(
            FullAttentionSpec(16, 8, 128, **FP8),  # type: ignore[arg-type]
            32768 + SCALES,
            id="full-fp8-scales",
        ),
        pytest.param(
            FullAttentionSpec(16, 8, 128, **INT4),  # type: ignore[arg-type]
            16384 + SCALES,
            id="full-int4-scales",
        ),
        # 64 bytes of values and 8 of scales a head.
        pytest.param(
            FullAttentionSpec(16, 8, 128, **NVFP4),  # type: ignore[arg-type]
            16 * 8 * (72 + 72),
            id="full-nvfp4",
        ),
        pytest.param(
            FullAttentionSpec(16, 8, 128, head_size_v=64, **NVFP4),  # type: ignore[arg-type]
            16 * 8 * (72 + 36),
            id="full-nvfp4-smaller-v",
        ),
        pytest.param(TQFullAttentionSpec(16, 8, 128), 65536, id="turboquant-off"),
        pytest.param(
            TQFullAttentionSpec(16, 8, 128, "uint8", tq_slot_size=136),
            16 * 8 * 136,
            id="turboquant",
        ),
        pytest.param(RSWASpec(16, 8, 128, rswa_window=64), 65536, id="rswa"),
        pytest.param(SinkFullAttentionSpec(16, 8, 128, sink_len=32), 65536, id="sink"),
        # DeepSeek V3: one head of 512 + 64.
        pytest.param(MLAAttentionSpec(64, 1, 576), 64 * 576 * 2, id="mla"),
        pytest.param(
            MLAAttentionSpec(64, 1, 576, **INT4),  # type: ignore[arg-type]
            64 * 288 + 2 * 64 * 4,
            id="mla-int4",
        ),
        pytest.param(
            MLAAttentionSpec(64, 1, 576, **DS_MLA),  # type: ignore[arg-type]
            64 * 656,
            id="mla-fp8-ds",
        ),
        pytest.param(
            MLAAttentionSpec(64, 1, 512, compress_ratio=4, **V4),  # type: ignore[arg-type]
            16 * 584,
            id="mla-deepseek-v4",
        ),
        # 9344 is 16.2 times 576.
        pytest.param(
            MLAAttentionSpec(64, 1, 512, compress_ratio=4, alignment=576, **V4),  # type: ignore[arg-type]
            17 * 576,
            id="mla-aligned",
        ),
        pytest.param(HiddenStateCacheSpec(16, 3, 896), 16 * 3 * 896 * 2, id="hidden-states"),
        pytest.param(_window(), 65536, id="window"),
        pytest.param(_window(head_size_v=64), 49152, id="window-smaller-v"),
        pytest.param(_window(**INT8), 32768 + SCALES, id="window-int8-scales"),
        pytest.param(_window(**INT4), 32768 + SCALES, id="window-int4-is-not-packed"),
        pytest.param(_window(**NVFP4), 16 * 8 * 144, id="window-nvfp4"),
        pytest.param(
            SlidingWindowMLASpec(64, 1, 576, sliding_window=128), 64 * 576 * 2, id="window-mla"
        ),
        pytest.param(
            SlidingWindowMLASpec(64, 1, 512, sliding_window=128, alignment=1024, **V4),  # type: ignore[arg-type]
            37 * 1024,
            id="window-mla-deepseek-v4-aligned",
        ),
        pytest.param(
            ChunkedLocalAttentionSpec(16, 8, 128, attention_chunk_size=64), 65536, id="chunked"
        ),
        pytest.param(
            ChunkedLocalAttentionSpec(16, 8, 128, attention_chunk_size=64, **NVFP4),  # type: ignore[arg-type]
            16 * 8 * 144,
            id="chunked-nvfp4",
        ),
        pytest.param(CrossAttentionSpec(16, 8, 128), 65536, id="cross"),
        pytest.param(
            MambaSpec(16, ((4, 96), (8, 64, 16)), ("bfloat16", "float32")),
            4 * 96 * 2 + 8 * 64 * 16 * 4,
            id="mamba",
        ),
        pytest.param(
            MambaSpec(16, ((4, 96),), ("bfloat16",), page_size_padded=1000), 1000, id="mamba-padded"
        ),
        pytest.param(
            UniformTypeKVCacheSpecs(
                16, {"a": FullAttentionSpec(16, 8, 128), "b": FullAttentionSpec(16, 4, 128)}
            ),
            65536 + 32768,
            id="uniform",
        ),
    ],
)
def test_page_bytes(spec: KVCacheSpec, page_bytes: int) -> None:
    assert spec.page_size_bytes == page_bytes


LIMITS = RequestLimits(
    max_model_len=1000, max_num_batched_tokens=200, max_num_encoder_input_tokens=1500
)


@pytest.mark.parametrize(
    ("spec", "cap", "num_pages"),
    [
        pytest.param(FullAttentionSpec(16, 8, 128), None, 63, id="full"),
        # 63 + 200 tokens, and a block more.
        pytest.param(_window(), 18, 18, id="window"),
        pytest.param(
            SlidingWindowSpec(16, 8, 128, sliding_window=2000), 64, 64, id="window-beyond-the-model"
        ),
        pytest.param(
            ChunkedLocalAttentionSpec(16, 8, 128, attention_chunk_size=64), 17, 17, id="chunked"
        ),
        pytest.param(RSWASpec(16, 8, 128, rswa_window=64), None, 63, id="rswa"),
        pytest.param(CrossAttentionSpec(16, 8, 128), None, 94, id="cross"),
        pytest.param(EncoderOnlyAttentionSpec(16, 8, 128), None, 0, id="encoder-only"),
        pytest.param(
            MambaSpec(16, ((4,),), ("float32",), num_speculative_blocks=3), None, 4, id="mamba-none"
        ),
        pytest.param(
            MambaSpec(16, ((4,),), ("float32",), mamba_cache_mode="align"),
            None,
            2,
            id="mamba-align",
        ),
        pytest.param(
            MambaSpec(16, ((4,),), ("float32",), mamba_cache_mode="all"), None, 63, id="mamba-all"
        ),
    ],
)
def test_blocks_of_one_request(spec: KVCacheSpec, cap: int | None, num_pages: int) -> None:
    assert spec.max_admission_blocks_per_request(200, 1000) == cap
    assert spec.max_memory_usage_bytes(LIMITS) == num_pages * spec.page_size_bytes


def test_a_context_parallel_rank_keeps_its_share() -> None:
    spec = FullAttentionSpec(16, 8, 128)
    limits = RequestLimits(max_model_len=1000, max_num_batched_tokens=1, dcp_world_size=4)
    assert spec.max_memory_usage_bytes(limits) == 16 * spec.page_size_bytes


@pytest.mark.parametrize(
    ("spec", "kind", "window"),
    [
        pytest.param(RSWASpec(16, 8, 128, rswa_window=64), "full_attention", None, id="rswa"),
        pytest.param(TQFullAttentionSpec(16, 8, 128), "full_attention", None, id="turboquant"),
        pytest.param(HiddenStateCacheSpec(16, 8, 128), "mla_attention", None, id="hidden-states"),
        pytest.param(
            FullAttentionSpec(16, 8, 128, sliding_window=64), "full_attention", None, id="full"
        ),
        pytest.param(_window(), "sliding_window", 64, id="window"),
        pytest.param(
            SlidingWindowMLASpec(16, 8, 128, sliding_window=64), "sliding_window_mla", 64, id="mla"
        ),
        pytest.param(
            UniformTypeKVCacheSpecs(16, {"a": _window(), "b": _window(head_size_v=64)}),
            "sliding_window",
            64,
            id="uniform",
        ),
        pytest.param(
            UniformTypeKVCacheSpecs(
                16, {"a": FullAttentionSpec(16, 8, 128), "b": MLAAttentionSpec(16, 1, 576)}
            ),
            "unknown",
            None,
            id="uniform-of-two-kinds",
        ),
    ],
)
def test_what_events_say(spec: KVCacheSpec, kind: str, window: int | None) -> None:
    assert (spec.kind, spec.event_window) == (kind, window)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        pytest.param(lambda: FullAttentionSpec(16, 0, 128), "num_kv_heads", id="no-heads"),
        pytest.param(
            lambda: FullAttentionSpec(16, 8, 128, head_size_v=0), "head_size_v", id="no-v-head"
        ),
        pytest.param(
            lambda: FullAttentionSpec(16, 8, 128, kv_quant_mode="fp3"), "kv_quant_mode", id="mode"
        ),
        pytest.param(
            lambda: FullAttentionSpec(16, 8, 120, kv_quant_mode="nvfp4"),
            "head_size",
            id="nvfp4-head",
        ),
        pytest.param(
            lambda: FullAttentionSpec(16, 8, 128, page_size_padded=65535),
            "page_size_padded",
            id="padding-too-small",
        ),
        pytest.param(
            lambda: FullAttentionSpec(16, 8, 128, sliding_window=8, attention_chunk_size=8),
            "attention_chunk_size",
            id="window-and-chunks",
        ),
        pytest.param(
            lambda: TQFullAttentionSpec(16, 8, 128, tq_slot_size=-1), "tq_slot_size", id="tq"
        ),
        pytest.param(lambda: RSWASpec(16, 8, 128, rswa_window=0), "rswa_window", id="rswa"),
        pytest.param(
            lambda: SinkFullAttentionSpec(16, 8, 128, sink_len=20), "sink_len", id="sink-not-whole"
        ),
        pytest.param(
            lambda: SlidingWindowSpec(16, 8, 128, sliding_window=0), "sliding_window", id="window"
        ),
        pytest.param(
            lambda: ChunkedLocalAttentionSpec(16, 8, 128, attention_chunk_size=0),
            "attention_chunk_size",
            id="chunk",
        ),
        pytest.param(
            lambda: MLAAttentionSpec(16, 1, 576, compress_ratio=3), "compress_ratio", id="ratio"
        ),
        pytest.param(
            lambda: MLAAttentionSpec(16, 1, 576, model_version="v9"), "model_version", id="version"
        ),
        pytest.param(lambda: MambaSpec(16, (), ()), "shapes", id="no-state"),
        pytest.param(lambda: MambaSpec(16, ((4,),), ()), "dtypes", id="dtypes"),
        pytest.param(
            lambda: MambaSpec(16, ((4,),), ("float32",), mamba_cache_mode="some"),
            "mamba_cache_mode",
            id="mamba-mode",
        ),
        pytest.param(
            lambda: MambaSpec(16, ((4,),), ("float32",), mamba_type="mamba9"),
            "mamba_type",
            id="mamba-type",
        ),
        pytest.param(
            lambda: MambaSpec(16, ((4,),), ("float32",), page_size_padded=15),
            "page_size_padded",
            id="mamba-padding-too-small",
        ),
        pytest.param(
            lambda: UniformTypeKVCacheSpecs(
                16, {"a": _window(), "b": SlidingWindowSpec(16, 8, 128, sliding_window=32)}
            ),
            "kv_cache_specs",
            id="windows-differ",
        ),
        pytest.param(
            lambda: UniformTypeKVCacheSpecs(16, {"a": FullAttentionSpec(32, 8, 128)}),
            "kv_cache_specs",
            id="block-sizes-differ",
        ),
    ],
)
def test_refused(make: object, field: str) -> None:
    assert callable(make)
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert caught.value.field == field


def test_blocks_of_groups_share_one_memory() -> None:
    full = KVCacheGroup(("a", "b"), FullAttentionSpec(16, 8, 128))
    window = KVCacheGroup(("c", "d", "e"), _window(head_size_v=64))
    encoder = KVCacheGroup(("f",) * 1, EncoderOnlyAttentionSpec(16, 64, 128))
    pool = KVCacheConfig(10, (full, window, encoder))
    assert pool.places == ([65536] * 3, {"a": 0, "b": 1, "c": 0, "d": 1, "e": 2})
    assert pool.pool_bytes == 10 * 3 * 65536


def test_a_block_of_a_uniform_group_is_all_its_pages() -> None:
    specs = {"a": FullAttentionSpec(16, 8, 128), "b": FullAttentionSpec(16, 4, 128)}
    group = KVCacheGroup(("a", "b"), UniformTypeKVCacheSpecs(16, specs))
    assert group.manager_spec == specs["a"]
    pool = KVCacheConfig(10, (group,))
    assert pool.pool_bytes == 10 * (65536 + 32768)
