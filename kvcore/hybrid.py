"""Hits that several kinds of attention agree on.

Semantics of HybridKVCacheCoordinator in vLLM 0.25.1's v1/core/kv_cache_coordinator.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcore.block import KVCacheBlock
from kvcore.block_pool import BlockPool
from kvcore.coordinator import KVCacheCoordinator
from kvcore.request import Request
from kvcore.single_type import SingleTypeKVCacheManager
from kvcore.spec import DepotConfig, FullAttentionSpec, KVCacheSpec
from kvcore.view import PoolView


@dataclass(slots=True)
class SpecGroup:
    """Groups of equal specs, which are looked up together.

    If one of them is a draft model's, all drop the block that it recomputes.
    """

    spec: KVCacheSpec
    manager: SingleTypeKVCacheManager
    group_ids: list[int] = field(default_factory=list)
    use_eagle: bool = False

    @property
    def is_full_attention(self) -> bool:
        """Whether every prefix of a hit is a hit, too."""
        return isinstance(self.spec, FullAttentionSpec)


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups: a hit is the longest prefix that is one in each of them."""

    def __init__(self, config: DepotConfig, pool: BlockPool, view: PoolView) -> None:
        super().__init__(config, pool, view)
        self._hash_block_size = config.hash_block_size
        self._scheduler_block_size = config.scheduler_block_size
        self._spec_groups = self._split(config)
        # Full attention accepts any shorter length, so that the other's is final.
        self._is_simple = len(self._spec_groups) == 2 and self._spec_groups[0].is_full_attention

    def _split(self, config: DepotConfig) -> list[SpecGroup]:
        spec_groups: list[SpecGroup] = []
        for manager, group in zip(self.managers, config.kv_cache.groups, strict=True):
            if not group.holds_blocks:
                continue
            alike = [one for one in spec_groups if one.spec == manager.spec]
            if not alike:
                alike = [SpecGroup(manager.spec, manager)]
                spec_groups += alike
            alike[0].group_ids.append(manager.group)
            alike[0].use_eagle |= manager.group in config.eagle_group_ids
        for spec_group in spec_groups:
            for group_id in spec_group.group_ids:
                self.managers[group_id].use_eagle = spec_group.use_eagle
        # Full attention first: its run from the start bounds the search of the others.
        return sorted(spec_groups, key=lambda one: not one.is_full_attention)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """As the base; hits end at multiples of the scheduler's block size, so that
        blocks beyond the last one wait, but for the one that EAGLE drops.
        """
        size = self._scheduler_block_size
        num_aligned = num_tokens // size * size
        if num_aligned == 0:
            return
        for manager in self.managers:
            num_cacheable = num_aligned
            if manager.use_eagle:
                num_cacheable = min(num_tokens, num_aligned + manager.block_size)
            manager.cache_blocks(request, num_cacheable)

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The fixed point: each kind of attention accepts a length or shortens it, until
        all accept the same one.
        """
        hits: list[list[KVCacheBlock] | None] = [None] * len(self.managers)
        hashes = self._hashes_by_size(block_hashes, max_length)
        length, longest = max_length, 0
        # Whose EAGLE drop holds at the present length: once for each length.
        dropped: set[int] = set()
        while True:
            candidate = length
            for number, group in enumerate(self._spec_groups):
                block_size = group.manager.block_size
                if group.is_full_attention and hits[group.group_ids[0]] is not None:
                    candidate = candidate // block_size * block_size
                    continue
                # vLLM lets states look one block ahead, too, though they drop none: their
                # hit could then end behind what full attention has.
                drops = (
                    group.use_eagle and group.manager.drops_eagle_block and number not in dropped
                )
                found = group.manager.find_longest_cache_hit(
                    hashes[block_size],
                    # One block more, which is then dropped.
                    min(candidate + block_size, max_length) if drops else candidate,
                    group.group_ids,
                    drop_eagle_block=drops,
                    alignment_tokens=self._scheduler_block_size,
                )
                num_found = len(found[0]) * block_size
                if drops:
                    dropped.add(number)
                elif num_found < candidate:
                    dropped.clear()
                candidate = num_found
                longest = max(longest, candidate)
                for group_id, blocks in zip(group.group_ids, found, strict=True):
                    hits[group_id] = blocks
            if candidate >= length:
                break
            length = candidate
            if self._is_simple:
                break
        # vLLM cuts the first of them only, so that another one's table would begin with
        # blocks beyond the hit, which the request then writes to.
        for group in self._spec_groups:
            if group.is_full_attention:
                for group_id in group.group_ids:
                    whole = hits[group_id]
                    assert whole is not None
                    del whole[length // group.manager.block_size :]
        self.num_uncached_common_prefix_tokens = longest - length
        return tuple([[] if blocks is None else blocks for blocks in hits]), length

    def find_longest_cache_hit_per_group(
        self, block_hashes: Sequence[bytes], max_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], tuple[int, ...]]:
        """Each group's own longest hit: its blocks, and its length in tokens."""
        hits: list[list[KVCacheBlock]] = [[] for _ in self.managers]
        lengths = [0] * len(self.managers)
        hashes = self._hashes_by_size(block_hashes, max_length)
        for group in self._spec_groups:
            block_size = group.manager.block_size
            found = group.manager.find_longest_cache_hit(
                hashes[block_size],
                max_length,
                group.group_ids,
                drop_eagle_block=group.use_eagle,
                alignment_tokens=self._scheduler_block_size,
            )
            for group_id, blocks in zip(group.group_ids, found, strict=True):
                hits[group_id] = blocks
                lengths[group_id] = len(blocks) * block_size
        return tuple(hits), tuple(lengths)

    def _hashes_by_size(
        self, block_hashes: Sequence[bytes], max_length: int
    ) -> dict[int, Sequence[bytes]]:
        """A coarser block's hash is the finer one at its end."""
        num_hashes = max_length // self._hash_block_size
        by_size: dict[int, Sequence[bytes]] = {}
        for group in self._spec_groups:
            size = group.manager.block_size
            if size not in by_size:
                ratio = group.manager.hash_ratio
                by_size[size] = block_hashes[ratio - 1 : num_hashes : ratio]
        return by_size
