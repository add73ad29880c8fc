"""Sizing and configuration."""

from __future__ import annotations

import pytest

from kvcore.errors import InvalidArgument
from kvcore.spec import (
    DepotConfig,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    available_bytes_for,
    num_blocks_for,
)

QWEN2 = KVCacheGroup(tuple(f"layer.{i}" for i in range(24)), FullAttentionSpec(16, 2, 64))


def test_qwen2_half_a_billion() -> None:
    assert QWEN2.spec.page_size_bytes == 8192
    # 24 layers in what vLLM finds available: the blocks, and a layer's tensor.
    available = 131_928 * 8192 * 24 + 8191
    assert num_blocks_for(available, (QWEN2,)) == 131_928
    pool = KVCacheConfig(131_928, (QWEN2,))
    assert pool.pool_bytes // len(pool.places[0]) == 1_080_754_176


@pytest.mark.parametrize(
    ("spec", "page_bytes"),
    [
        pytest.param(FullAttentionSpec(16, 8, 128), 65536, id="bfloat16"),
        pytest.param(FullAttentionSpec(16, 8, 128, "float32"), 131072, id="float32"),
        pytest.param(FullAttentionSpec(16, 8, 128, "float8_e4m3fn"), 32768, id="fp8"),
        pytest.param(FullAttentionSpec(16, 8, 128, head_size_v=64), 49152, id="smaller-v-heads"),
    ],
)
def test_page_bytes(spec: FullAttentionSpec, page_bytes: int) -> None:
    assert spec.page_size_bytes == page_bytes


def test_memory_utilization() -> None:
    assert available_bytes_for(1000, 0.9) == 900
    with pytest.raises(InvalidArgument, match="memory_utilization"):
        available_bytes_for(1000, 1.5)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        pytest.param(lambda: FullAttentionSpec(0, 1, 1), "block_size", id="block-size"),
        pytest.param(lambda: FullAttentionSpec(1, 1, 1, "int7"), "dtype", id="dtype"),
        pytest.param(lambda: KVCacheConfig(1, (QWEN2,)), "num_blocks", id="only-the-null-block"),
        pytest.param(lambda: KVCacheGroup((), QWEN2.spec), "layer_names", id="no-layers"),
        pytest.param(lambda: num_blocks_for(8192, (QWEN2,)), "available_bytes", id="too-little"),
        pytest.param(
            lambda: DepotConfig(KVCacheConfig(2, (QWEN2,)), watermark=1.0), "watermark", id="mark"
        ),
        pytest.param(
            lambda: DepotConfig(KVCacheConfig(2, (QWEN2,)), layout="heap"), "layout", id="layout"
        ),
        pytest.param(
            lambda: DepotConfig(
                KVCacheConfig(2, (QWEN2,)),
                tensor_parallel_size=2,
                tensor_parallel_rank=1,
                num_ranks=2,
            ),
            "tensor_parallel_rank",
            id="ranks beyond the group",
        ),
    ],
)
def test_refused(make: object, field: str) -> None:
    assert callable(make)
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert caught.value.field == field


def test_fingerprint_tells_contents_apart() -> None:
    pool = KVCacheConfig(100, (QWEN2,))
    base = DepotConfig(pool, model="a")
    assert base.fingerprint == DepotConfig(pool, model="a", layout="layer").fingerprint
    assert base.fingerprint == DepotConfig(KVCacheConfig(9, (QWEN2,)), model="a").fingerprint
    others = [
        DepotConfig(pool, model="b"),
        DepotConfig(pool, model="a", weights_revision="2"),
        DepotConfig(pool, model="a", hash_seed="1"),
        DepotConfig(pool, model="a", hash_scheme="sha256_cbor"),
        DepotConfig(pool, model="a", tensor_parallel_size=2),
        DepotConfig(pool, model="a", tensor_parallel_size=2, tensor_parallel_rank=1),
        DepotConfig(pool, model="a", tensor_parallel_size=2, num_ranks=2),
    ]
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 8
