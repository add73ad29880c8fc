"""One session's cache operations, under vLLM's names and with its decisions.

Semantics of vLLM 0.25.1's KVCacheManager (v1/core/kv_cache_manager.py): fed the same
operations, it answers the same block ids, hits and refusals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcore.block import KVCacheBlock
from kvcore.block_pool import BlockPool
from kvcore.coordinator import Tables
from kvcore.coordinator_factory import make_coordinator
from kvcore.errors import InvalidArgument
from kvcore.events import Event
from kvcore.growth import grow
from kvcore.operation import NoFit, NoFitReason
from kvcore.request import Request, RequestStatus
from kvcore.spec import (
    AttentionSpec,
    CrossAttentionSpec,
    DepotConfig,
    EncoderOnlyAttentionSpec,
    cdiv,
)
from kvcore.view import PoolView

# Reading a member off its enum costs 0.1 us and more on Python 3.11.
_RUNNING = RequestStatus.RUNNING


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks of one request, one sequence a KV cache group."""

    blocks: Tables

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """The blocks of both, group by group."""
        return KVCacheBlocks(
            tuple([*mine, *theirs] for mine, theirs in zip(self.blocks, other.blocks, strict=True))
        )

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """The block ids; with ``allow_none``, None when there are none."""
        if allow_none and not any(self.blocks):
            return None
        return self.block_ids

    @property
    def block_ids(self) -> tuple[list[int], ...]:
        """The block ids."""
        return tuple([[block.block_id for block in group] for group in self.blocks])

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of the blocks that are no hits, of the only group."""
        assert len(self.blocks) == 1
        return [block.block_id for block in self.blocks[0] if block.block_hash is None]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Ids of the blocks that are no hits, by group; the null block is left out."""
        return [
            [block.block_id for block in group if block.block_hash is None and not block.is_null]
            for group in self.blocks
        ]

    def new_empty(self) -> KVCacheBlocks:
        """No blocks, of as many groups."""
        return KVCacheBlocks(tuple(() for _ in self.blocks))


@dataclass(slots=True)
class PrefixCacheStats:
    """Lookups since the last report; queries and hits are in tokens."""

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    reset: bool = False


class KVCacheManager:
    """The cache for one scheduler.

    Alone, it makes a pool of its own, in which all that is registered counts as
    written. With ``pool`` and ``view`` it is one of several on a shared pool.
    """

    def __init__(
        self,
        config: DepotConfig,
        pool: BlockPool | None = None,
        view: PoolView | None = None,
        *,
        enable_kv_cache_events: bool = False,
        log_stats: bool = True,
        track_new_block_ids: bool = True,
    ) -> None:
        if pool is None:
            pool = BlockPool(
                config.kv_cache,
                enable_kv_cache_events=enable_kv_cache_events,
            )
        self.config = config
        self.block_pool = pool
        self.view = pool.open_view() if view is None else view
        self.coordinator = make_coordinator(config, pool, self.view)
        self._eagle_block_size = max(
            (
                manager.block_size
                for manager in self.coordinator.managers
                if manager.drops_eagle_block and manager.group in config.eagle_group_ids
            ),
            default=0,
        )
        if not track_new_block_ids:
            for manager in self.coordinator.managers:
                manager.new_block_ids = None
        self.max_model_len = config.max_model_len
        # Of a request that grows, computed and new tokens.
        self.quiet_end_max = min(config.max_model_len, config.max_request_tokens)
        self.enable_caching = config.enable_caching
        self.log_stats = log_stats
        self.watermark_blocks = int(config.watermark * config.kv_cache.num_blocks)
        self.no_blocks: Tables = tuple(() for _ in config.kv_cache.groups)
        self.empty_kv_cache_blocks = KVCacheBlocks(self.no_blocks)
        # Why the last allocate_slots that answered None did.
        self.last_refusal: NoFit | None = None
        self.prefix_cache_stats = PrefixCacheStats()

    @property
    def usage(self) -> float:
        """Share of the pool that is in use, from 0 to 1."""
        return self.block_pool.usage

    def new_step_starts(self) -> None:
        """Schedulers say so before each step: what the last one made can now be hit."""
        self.coordinator.new_step_starts()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """The statistics since the last call; None when they are not kept."""
        if not self.log_stats:
            return None
        stats, self.prefix_cache_stats = self.prefix_cache_stats, PrefixCacheStats()
        return stats

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The longest cached prefix and its tokens, at most ``num_tokens - 1``.

        Takes no reference: the blocks may be evicted until they are allocated.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0
        blocks, num_hit_tokens = self.find_computed_blocks(request)
        if self.log_stats:
            stats = self.prefix_cache_stats
            if request.num_preemptions > 0:
                stats.preempted_requests += 1
                stats.preempted_queries += request.num_tokens
                stats.preempted_hits += num_hit_tokens
            else:
                stats.requests += 1
                stats.queries += request.num_tokens
                stats.hits += num_hit_tokens
        return blocks, num_hit_tokens

    def find_computed_blocks(
        self, request: Request, num_tokens_max: int | None = None
    ) -> tuple[KVCacheBlocks, int]:
        """As get_computed_blocks, without counting it in the statistics.

        ``num_tokens_max``: the longest hit of at most so many tokens.
        """
        num_lookup_tokens = max(request.num_tokens - 1, 0)  # one may be cut off to nothing
        if num_tokens_max is not None:
            # An EAGLE group must see the block that it drops.
            num_lookup_tokens = min(num_lookup_tokens, num_tokens_max + self._eagle_block_size)
        blocks, num_hit_tokens = self.coordinator.find_longest_cache_hit(
            request.block_hashes, num_lookup_tokens
        )
        return self.create_kv_cache_blocks(blocks), num_hit_tokens

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        *,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> KVCacheBlocks | None:
        """Slots for tokens to compute: the new blocks, or None if they do not fit.

        The table becomes: what the request holds, the hit (``new_computed_blocks``,
        of ``num_new_computed_tokens``), blocks for tokens computed elsewhere, blocks
        for ``num_new_tokens`` and the lookahead; in cross-attention groups, blocks for
        ``num_encoder_tokens``. Full blocks become hits up to the
        request's last token, unless ``delay_cache_blocks``. None allocates nothing,
        and says why in ``last_refusal``. The watermark counts for waiting and
        preempted requests while others are scheduled.
        """
        if num_new_tokens == 0 and num_external_computed_tokens == 0:
            raise InvalidArgument(
                "num_new_tokens must be greater than 0 when there are no external computed tokens",
                field="num_new_tokens",
            )
        empty = self.empty_kv_cache_blocks
        if (
            request.status is _RUNNING
            and new_computed_blocks is None
            and not num_new_computed_tokens
            and not num_external_computed_tokens
            and not full_sequence_must_fit
            and not reserved_blocks
            and not num_encoder_tokens
            and not delay_cache_blocks
        ):
            grown = grow(self, request, num_new_tokens, num_lookahead_tokens)
            return None if grown is None else self.create_kv_cache_blocks(grown)
        coordinator = self.coordinator
        pool = self.block_pool
        request_id = request.request_id
        hit = empty.blocks if new_computed_blocks is None else new_computed_blocks.blocks
        num_local = request.num_computed_tokens + num_new_computed_tokens
        total_computed = min(num_local + num_external_computed_tokens, self.max_model_len)
        watermark = 0
        if has_scheduled_reqs and request.status is not _RUNNING:
            watermark = self.watermark_blocks

        num_main = total_computed + num_new_tokens
        num_slots = min(num_main + num_lookahead_tokens, self.max_model_len)
        if full_sequence_must_fit:
            num_tokens = min(request.num_tokens, self.max_model_len)
            num_needed = coordinator.get_num_blocks_to_allocate(
                request_id, num_tokens, hit, total_computed, num_tokens, num_encoder_tokens, True
            )
            num_free = pool.num_free_blocks(self.view)
            if num_needed + watermark > num_free:
                self.last_refusal = NoFit(num_needed, num_free, 0, watermark)
                return None

        coordinator.remove_skipped_blocks(request_id, total_computed, request.num_prompt_tokens)
        num_needed = coordinator.get_num_blocks_to_allocate(
            request_id,
            num_slots,
            hit,
            num_local + num_external_computed_tokens,
            num_main,
            num_encoder_tokens,
        )
        num_free = pool.num_free_blocks(self.view)
        if num_needed + watermark > num_free - reserved_blocks:
            self.last_refusal = NoFit(num_needed, num_free, reserved_blocks, watermark)
            return None
        if num_external_computed_tokens > 0:
            num_needed += sum(
                manager.num_uncounted_blocks(blocks, total_computed, num_main)
                for manager, blocks in zip(coordinator.managers, hit, strict=True)
            )
            if num_needed > num_free:
                self.last_refusal = NoFit(num_needed, num_free, 0, 0)
                return None
        if hit is not empty.blocks and coordinator.made_in_this_step(hit):
            self.last_refusal = NoFit(
                num_needed, num_free, reserved_blocks, watermark, NoFitReason.HIT_OF_THIS_STEP
            )
            return None

        if hit is not empty.blocks or num_external_computed_tokens > 0:
            coordinator.allocate_new_computed_blocks(
                request_id, hit, num_local, num_external_computed_tokens
            )
        new_blocks = coordinator.allocate_new_blocks(
            request_id, num_slots, num_main, num_encoder_tokens
        )
        if self.enable_caching and not delay_cache_blocks and not request.outlived_reset:
            coordinator.cache_blocks(request, min(num_main, request.num_tokens))
        return self.create_kv_cache_blocks(new_blocks)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Make the full blocks within ``num_computed_tokens`` hits."""
        if self.enable_caching and not request.outlived_reset:
            self.coordinator.cache_blocks(request, num_computed_tokens)

    def free(self, request: Request) -> None:
        """Give the request's blocks back, tail first. No-op if it has none."""
        self.coordinator.free(request.request_id)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Take the request's blocks away without freeing them; see return_blocks."""
        return self.coordinator.pop_blocks_for_free(request.request_id)

    def return_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give back what pop_blocks_for_free answered, tail first."""
        self.block_pool.free(reversed(blocks), self.view)

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free blocks that no attention looks at any more."""
        self.coordinator.remove_skipped_blocks(request_id, total_computed_tokens, num_prompt_tokens)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make these blocks no hits any more."""
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False, and nothing is done, while blocks are in use."""
        if not self.block_pool.reset():
            return False
        self.prefix_cache_stats.reset = True
        return True

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Leading blocks that all this session's requests share, by group."""
        return self.coordinator.get_num_common_prefix_blocks(running_request_id)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The request's blocks."""
        return self.create_kv_cache_blocks(self.coordinator.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The request's block table, by group."""
        return self.get_blocks(request_id).block_ids

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[list[int], ...]:
        """The part of the block table that holds ``num_computed_tokens``, by group.

        Blocks of states and of encoder tokens are answered in full.
        """
        clipped = []
        for block_ids, group in zip(
            self.get_block_ids(request_id), self.config.kv_cache.groups, strict=True
        ):
            spec = group.manager_spec
            is_by_token = isinstance(spec, AttentionSpec) and not isinstance(
                spec, CrossAttentionSpec | EncoderOnlyAttentionSpec
            )
            stop = cdiv(num_computed_tokens, spec.block_size) if is_by_token else None
            clipped.append(block_ids[:stop])
        return tuple(clipped)

    def take_events(self) -> list[Event]:
        """vLLM's event feed since the last call."""
        return self.block_pool.vllm_feed.take()

    def take_new_block_ids(self) -> list[int]:
        """Ids of the blocks this session took since the last call, for zeroing."""
        return [
            block_id
            for manager in self.coordinator.managers
            for block_id in manager.take_new_block_ids()
        ]

    def create_kv_cache_blocks(self, blocks: Tables) -> KVCacheBlocks:
        """``blocks`` as a result."""
        return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks
