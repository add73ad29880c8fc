"""The groups of one session as a whole. Semantics of v1/core/kv_cache_coordinator.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvcore.block import KVCacheBlock
from kvcore.block_pool import BlockPool
from kvcore.request import Request
from kvcore.single_type import SingleTypeKVCacheManager, make_manager
from kvcore.spec import DepotConfig
from kvcore.view import PoolView

Tables = tuple[Sequence[KVCacheBlock], ...]
"""Blocks, one sequence a KV cache group."""


class KVCacheCoordinator(ABC):
    """Does to every group what is asked, and finds hits they agree on.

    ``num_uncached_common_prefix_tokens``: by how much the last hit was shorter than
    the longest that a single kind of attention had, which some request before shared.
    """

    num_uncached_common_prefix_tokens = 0

    def __init__(self, config: DepotConfig, pool: BlockPool, view: PoolView) -> None:
        self.config = config
        self.pool = pool
        self.managers = tuple(
            make_manager(config, pool, view, group) for group in range(len(config.kv_cache.groups))
        )
        # Those whose blocks hold the request's own tokens.
        self.token_managers = tuple(
            manager
            for manager in self.managers
            if manager.spec.holds_blocks and not manager.counts_encoder_tokens
        )
        # Those that do more than nothing, so that the others cost no call.
        base = SingleTypeKVCacheManager
        self.recycling = tuple(manager for manager in self.managers if manager.recycles)
        # Whether growth takes what the tables lack and registers what is full, and no more.
        self.grows_by_table = all(
            type(manager).is_settled is base.is_settled for manager in self.managers
        )
        # Whether cache_blocks registers every full block there is.
        self.registers_all = type(self).cache_blocks is KVCacheCoordinator.cache_blocks
        self._stepping = tuple(
            manager
            for manager in self.managers
            if type(manager).made_in_this_step is not base.made_in_this_step
        )

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Tables,
        total_computed_tokens: int,
        num_tokens_main_model: int,
        num_encoder_tokens: int = 0,
        apply_admission_cap: bool = False,
    ) -> int:
        """Free blocks it costs to give the request ``num_tokens`` slots in every group."""
        num_blocks = 0
        for manager, hit in zip(self.managers, new_computed_blocks, strict=True):
            if manager.counts_encoder_tokens:
                num_blocks += manager.get_num_blocks_to_allocate(
                    request_id, num_encoder_tokens, (), 0, num_encoder_tokens, apply_admission_cap
                )
            else:
                num_blocks += manager.get_num_blocks_to_allocate(
                    request_id,
                    num_tokens,
                    hit,
                    total_computed_tokens,
                    num_tokens_main_model,
                    apply_admission_cap,
                )
        return num_blocks

    def made_in_this_step(self, new_computed_blocks: Tables) -> bool:
        """Whether a group's hit is computed only in the step that is under way."""
        for manager in self._stepping:
            if manager.made_in_this_step(new_computed_blocks[manager.group]):
                return True
        return False

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Tables,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Begin a request's tables: its hits, then blocks for external tokens.

        All hits are referenced before any block is taken, so that no group's
        external blocks evict another group's hit. Does nothing for a request that
        runs already.
        """
        if any(request_id in manager.num_cached_blocks for manager in self.managers):
            assert not any(new_computed_blocks)
            return
        total = num_local_computed_tokens + num_external_computed_tokens
        for manager, hit in zip(self.managers, new_computed_blocks, strict=True):
            manager.add_local_computed_blocks(request_id, hit, total)
        if num_external_computed_tokens > 0:
            for manager in self.managers:
                manager.allocate_external_computed_blocks(
                    request_id, total, num_external_computed_tokens
                )

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        num_encoder_tokens: int = 0,
    ) -> tuple[list[KVCacheBlock], ...]:
        """Grow the tables to ``num_tokens`` slots; the new blocks."""
        return tuple(
            [
                manager.allocate_new_blocks(
                    request_id,
                    num_encoder_tokens if manager.counts_encoder_tokens else num_tokens,
                    num_tokens_main_model,
                )
                for manager in self.managers
            ]
        )

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks within ``num_tokens`` hits."""
        for manager in self.managers:
            manager.cache_blocks(request, num_tokens)

    def free(self, request_id: str) -> None:
        """End the request's tables, group by group, tail first."""
        for manager in self.managers:
            manager.free(request_id)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """End the tables and give their blocks to the caller, in table order."""
        return [
            block for manager in self.managers for block in manager.pop_blocks_for_free(request_id)
        ]

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int, num_prompt_tokens: int | None
    ) -> None:
        """Free what no attention looks at any more."""
        for manager in self.recycling:
            manager.remove_skipped_blocks(request_id, total_computed_tokens, num_prompt_tokens)

    def get_blocks(self, request_id: str) -> tuple[list[KVCacheBlock], ...]:
        """The request's tables, empty if it has none."""
        return tuple([manager.req_to_blocks.get(request_id, []) for manager in self.managers])

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """Leading blocks that every request of this session shares, by group."""
        return [manager.get_num_common_prefix_blocks(request_id) for manager in self.managers]

    def new_step_starts(self) -> None:
        """A scheduler step begins."""
        for manager in self._stepping:
            manager.new_step_starts()

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Blocks and length, in tokens, of the longest hit of at most ``max_length``."""


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Without a prefix cache: any number of groups, and never a hit."""

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        return [0] * len(self.managers)

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        return tuple([] for _ in self.managers), 0


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group: its hit is the hit."""

    def __init__(self, config: DepotConfig, pool: BlockPool, view: PoolView) -> None:
        super().__init__(config, pool, view)
        self.managers[0].use_eagle = 0 in config.eagle_group_ids

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        manager = self.managers[0]
        hit = manager.find_longest_cache_hit(
            block_hashes,
            max_length,
            (0,),
            drop_eagle_block=manager.use_eagle,
            alignment_tokens=manager.block_size,
        )
        return hit, len(hit[0]) * manager.block_size
