"""Which coordinator serves a configuration."""

from __future__ import annotations

from kvcore.block_pool import BlockPool
from kvcore.coordinator import (
    KVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
from kvcore.hybrid import HybridKVCacheCoordinator
from kvcore.spec import DepotConfig
from kvcore.view import PoolView


def make_coordinator(config: DepotConfig, pool: BlockPool, view: PoolView) -> KVCacheCoordinator:
    """The coordinator for the groups of ``config``."""
    if not config.enable_caching:
        return KVCacheCoordinatorNoPrefixCache(config, pool, view)
    if len(config.kv_cache.groups) == 1:
        return UnitaryKVCacheCoordinator(config, pool, view)
    return HybridKVCacheCoordinator(config, pool, view)
