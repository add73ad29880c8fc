"""The tensors in a page of every kind of attention."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from block_pages import block_pages
from kvcore.errors import InvalidArgument
from kvcore.page import page_parts
from kvcore.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    DepotConfig,
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
)

HEADS = (16, 2, 64)  # block size, KV heads, head size
APART = [("kv", "bfloat16", (2, 16, 2, 64), (2048, 128, 64, 1), 0)]
PER_HEAD = {"dtype": "int8", "kv_quant_mode": "int8_per_token_head"}


@dataclass(frozen=True, slots=True)
class NoiseSpec(KVCacheSpec):
    """A kind that is none of vLLM's."""

    nbytes: int = 24

    @property
    def kind(self) -> str:
        return "noise"

    @property
    def page_size_bytes(self) -> int:
        return self.nbytes

    def max_memory_usage_bytes(self, limits: RequestLimits) -> int:
        return self.nbytes


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        pytest.param(FullAttentionSpec(*HEADS), APART, id="full"),
        pytest.param(SlidingWindowSpec(*HEADS, sliding_window=64), APART, id="window"),
        pytest.param(ChunkedLocalAttentionSpec(*HEADS, attention_chunk_size=64), APART, id="chunk"),
        pytest.param(CrossAttentionSpec(*HEADS), APART, id="cross"),
        pytest.param(RSWASpec(*HEADS, rswa_window=64), APART, id="rswa"),
        pytest.param(SinkFullAttentionSpec(*HEADS, sink_len=16), APART, id="sink"),
        pytest.param(FullAttentionSpec(*HEADS, page_size_padded=10_000), APART, id="padded"),
        pytest.param(
            FullAttentionSpec(*HEADS, "float8_e4m3fn", kv_quant_mode="fp8_per_tensor"),
            [("kv", "float8_e4m3fn", (2, 16, 2, 64), (2048, 128, 64, 1), 0)],
            id="fp8 with a scale a tensor",
        ),
        pytest.param(
            FullAttentionSpec(*HEADS, head_size_v=32),
            [("kv", "bfloat16", (16, 2, 96), (192, 96, 1), 0)],
            id="heads of two sizes",
        ),
        pytest.param(
            TQFullAttentionSpec(*HEADS, "uint8", tq_slot_size=72),
            [("kv", "uint8", (16, 2, 72), (144, 72, 1), 0)],
            id="TurboQuant",
        ),
        pytest.param(
            MLAAttentionSpec(16, 1, 576),
            [("kv", "bfloat16", (16, 576), (576, 1), 0)],
            id="MLA",
        ),
        pytest.param(
            SlidingWindowMLASpec(16, 1, 576, sliding_window=64),
            [("kv", "bfloat16", (16, 576), (576, 1), 0)],
            id="MLA window",
        ),
        pytest.param(
            MLAAttentionSpec(64, 1, 512, "uint8", compress_ratio=4, alignment=1024),
            [("kv", "uint8", (16, 512), (512, 1), 0)],
            id="MLA compressed",
        ),
        pytest.param(
            MLAAttentionSpec(64, 1, 576, "uint8", cache_dtype_str="fp8_ds_mla"),
            [("kv", "uint8", (64, 656), (656, 1), 0)],
            id="MLA of DeepSeek",
        ),
        pytest.param(
            HiddenStateCacheSpec(16, 3, 64),
            [("kv", "bfloat16", (16, 3, 64), (192, 64, 1), 0)],
            id="hidden states",
        ),
        pytest.param(
            MambaSpec(16, shapes=((3, 8), (2, 4, 4)), dtypes=("bfloat16", "float32")),
            [
                ("state", "bfloat16", (3, 8), (8, 1), 0),
                ("state", "float32", (2, 4, 4), (16, 4, 1), 48),
            ],
            id="Mamba",
        ),
        pytest.param(
            FullAttentionSpec(*HEADS, **PER_HEAD),
            [
                ("kv", "int8", (2, 16, 2, 68), (2176, 136, 68, 1), 0),
                ("k_scale", "float32", (16, 2), (34, 17), 64),
                ("v_scale", "float32", (16, 2), (34, 17), 2176 + 64),
            ],
            id="int8 with a scale a head",
        ),
        pytest.param(
            FullAttentionSpec(*HEADS, "uint8", kv_quant_mode="int4_per_token_head"),
            [
                ("kv", "uint8", (2, 16, 2, 36), (1152, 72, 36, 1), 0),
                ("k_scale", "float32", (16, 2), (18, 9), 32),
                ("v_scale", "float32", (16, 2), (18, 9), 1152 + 32),
            ],
            id="int4 with a scale a head",
        ),
        pytest.param(
            FullAttentionSpec(*HEADS, head_size_v=32, **PER_HEAD),
            [
                ("kv", "int8", (16, 2, 104), (208, 104, 1), 0),
                ("k_scale", "float32", (16, 2), (52, 26), 64),
                ("v_scale", "float32", (16, 2), (52, 26), 68 + 32),
            ],
            id="int8, heads of two sizes",
        ),
        pytest.param(
            FullAttentionSpec(*HEADS, "uint8", kv_quant_mode="nvfp4"),
            [
                ("kv", "uint8", (2, 16, 2, 36), (1152, 72, 36, 1), 0),
                ("k_data", "uint8", (16, 2, 32), (64, 32, 1), 0),
                ("k_scale", "float8_e4m3fn", (16, 2, 4), (8, 4, 1), 1024),
                ("v_data", "uint8", (16, 2, 32), (64, 32, 1), 1152),
                ("v_scale", "float8_e4m3fn", (16, 2, 4), (8, 4, 1), 2176),
            ],
            id="nvfp4",
        ),
        pytest.param(NoiseSpec(16), [("page", "uint8", (24,), (1,), 0)], id="a kind of one's own"),
    ],
)
def test_parts(spec: KVCacheSpec, parts: list[tuple[Any, ...]]) -> None:
    found = page_parts(spec)
    assert [(p.name, p.dtype, p.shape, p.strides, p.offset_bytes) for p in found] == parts


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        pytest.param(
            MambaSpec(16, shapes=((3,), (2,)), dtypes=("bfloat16", "float32")),
            "page_size_padded",
            id="a state off its alignment",
        ),
        pytest.param(
            FullAttentionSpec(16, 1, 5, **PER_HEAD), "head_size", id="a scale off its alignment"
        ),
    ],
)
def test_refused(spec: KVCacheSpec, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        page_parts(spec)
    assert caught.value.field == field


@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("mode", ["int8_per_token_head", "nvfp4"])
def test_data_and_scales_fill_the_page_and_nothing_twice(
    tmp_path: Path, mode: str, layout: str
) -> None:
    torch = pytest.importorskip("torch")
    from kvcore.memory import PoolMemory

    dtype = "int8" if mode.startswith("int8") else "uint8"
    spec = FullAttentionSpec(16, 2, 64, dtype, kv_quant_mode=mode)
    config = DepotConfig(KVCacheConfig(4, (KVCacheGroup(("a", "b"), spec),)), layout=layout)
    with PoolMemory(config, str(tmp_path), name="test") as pool:
        parts = pool.parts("b")
        if mode == "nvfp4":
            data = [parts["k_data"], parts["v_data"]]
            scales = [parts["k_scale"], parts["v_scale"]]
        else:
            kv = pool.layer("b")
            data = [kv[:, 0, ..., :64], kv[:, 1, ..., :64]]
            scales = [parts["k_scale"], parts["v_scale"]]
        for tensor in data:
            assert not tensor[2].any()
            tensor[2].fill_(5)
        for tensor in scales:
            assert not tensor[2].float().any()
            six = torch.frombuffer(bytearray(b"\6" * tensor.itemsize), dtype=tensor.dtype)
            tensor[2] = six
        page = torch.frombuffer(bytearray(block_pages(pool, 2)), dtype=torch.uint8)
        page = page[spec.page_size_bytes :]
        num_scale_bytes = sum(tensor[2].numel() * tensor.itemsize for tensor in scales)
        assert int((page == 6).sum()) == num_scale_bytes
        assert int((page == 5).sum()) == spec.page_size_bytes - num_scale_bytes
        assert not any(block_pages(pool, 1)) and not any(block_pages(pool, 3))
