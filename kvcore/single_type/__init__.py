"""Block tables of one KV cache group: one manager class a kind of attention."""

from __future__ import annotations

from kvcore.single_type.base import SingleTypeKVCacheManager
from kvcore.single_type.chunked_local import ChunkedLocalAttentionManager
from kvcore.single_type.encoder import CrossAttentionManager, EncoderOnlyManager
from kvcore.single_type.full_attention import (
    FullAttentionManager,
    RSWAManager,
    SinkFullAttentionManager,
)
from kvcore.single_type.mamba import MambaManager
from kvcore.single_type.registry import make_manager, manager_class_for, register_kv_cache_spec
from kvcore.single_type.sliding_window import SlidingWindowManager

__all__ = [
    "ChunkedLocalAttentionManager",
    "CrossAttentionManager",
    "EncoderOnlyManager",
    "FullAttentionManager",
    "MambaManager",
    "RSWAManager",
    "SingleTypeKVCacheManager",
    "SinkFullAttentionManager",
    "SlidingWindowManager",
    "make_manager",
    "manager_class_for",
    "register_kv_cache_spec",
]
