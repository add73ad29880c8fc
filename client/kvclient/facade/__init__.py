"""vLLM's KVCacheManager over a session: its method names, integer block ids.

``strict`` sends every call and decides as vLLM does; by default (lazy) the facade answers
growth itself, from blocks that it asked for a step ahead. ``KVCacheManager`` says more.
"""

from kvclient.facade.blocks import DetachedBlock, KVCacheBlocks
from kvclient.facade.manager import KVCacheManager
from kvclient.facade.stats import PrefixCacheStats

__all__ = ["DetachedBlock", "KVCacheBlocks", "KVCacheManager", "PrefixCacheStats"]
