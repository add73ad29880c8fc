"""What a pool is made of: KV cache specs, groups, sizing, and a depot's configuration.

Names, fields and figures as in vLLM 0.25.1 (v1/kv_cache_interface.py and
v1/core/kv_cache_utils.py).
"""

from __future__ import annotations

from kvcore.spec.base import (
    DTYPE_BYTES,
    KV_QUANT_MODES,
    AttentionSpec,
    KVCacheSpec,
    RequestLimits,
    cdiv,
)
from kvcore.spec.depot import DepotConfig
from kvcore.spec.encoder import CrossAttentionSpec, EncoderOnlyAttentionSpec
from kvcore.spec.full_attention import (
    FullAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    TQFullAttentionSpec,
)
from kvcore.spec.mamba import MAMBA_CACHE_MODES, MAMBA_TYPES, MambaSpec
from kvcore.spec.mla import HiddenStateCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec
from kvcore.spec.pool import KVCacheConfig, KVCacheGroup, available_bytes_for, num_blocks_for
from kvcore.spec.reach import why_never_hit
from kvcore.spec.uniform import UniformTypeKVCacheSpecs
from kvcore.spec.window import ChunkedLocalAttentionSpec, SlidingWindowSpec

__all__ = [
    "DTYPE_BYTES",
    "KV_QUANT_MODES",
    "MAMBA_CACHE_MODES",
    "MAMBA_TYPES",
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "DepotConfig",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "HiddenStateCacheSpec",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVCacheSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "RSWASpec",
    "RequestLimits",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "TQFullAttentionSpec",
    "UniformTypeKVCacheSpecs",
    "available_bytes_for",
    "cdiv",
    "num_blocks_for",
    "why_never_hit",
]
