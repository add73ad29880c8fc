"""Block tables of one KV cache group: what all kinds of attention share.

Semantics of vLLM 0.25.1's v1/core/single_type_kv_cache_manager.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvcore.block import KVCacheBlock
from kvcore.block_pool import BlockPool
from kvcore.request import Request
from kvcore.spec import DepotConfig, KVCacheSpec, cdiv
from kvcore.spec.pool import ZEROED_SPECS
from kvcore.view import PoolView

if TYPE_CHECKING:
    from kvcore.growth import Later

_ALLOCATES = frozenset(
    (
        "allocate_new_blocks",
        "cache_blocks",
        "get_num_blocks_to_allocate",
        "remove_skipped_blocks",
    )
)
"""What is_settled tells the outcome of."""


def _is_never_settled(*_: object) -> bool:
    return False


class SingleTypeKVCacheManager(ABC):
    """The block tables of one session in one group.

    A subclass says which blocks make a hit, and overrides what else its attention
    does differently.
    """

    counts_encoder_tokens = False
    """Whether its slots are for the encoder's tokens, instead of the request's."""
    drops_eagle_block = True
    """Whether a draft model can make it leave out the last block of a hit."""

    def __init_subclass__(cls) -> None:
        if "is_settled" not in vars(cls) and not _ALLOCATES.isdisjoint(vars(cls)):
            cls.is_settled = _is_never_settled  # type: ignore[assignment,method-assign]

    def __init__(
        self, spec: KVCacheSpec, *, pool: BlockPool, view: PoolView, group: int, config: DepotConfig
    ) -> None:
        self.spec = spec
        self.pool = pool
        self.view = view
        self.group = group
        # Tokens a block: with context parallelism, of all ranks together.
        self.block_size = spec.block_size * config.context_parallel_size
        self.scheduler_block_size = config.scheduler_block_size
        # Hashes a block.
        self.hash_ratio = max(1, self.block_size // config.hash_block_size)
        self.retention_interval = config.prefix_cache_retention_interval
        # Whether hits drop the block that a draft model recomputes.
        self.use_eagle = False
        self.max_admission_blocks = spec.max_admission_blocks_per_request(
            config.max_num_batched_tokens, config.max_model_len
        )
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        # How many blocks of a table are hits already. Known only while it runs.
        self.num_cached_blocks: dict[str, int] = {}
        # The last step that registered blocks of a table, and the first of them.
        self.registered: dict[str, tuple[int, int]] = {}
        kind, base = type(self), SingleTypeKVCacheManager
        # Whether blocks can be released before the request ends.
        self.recycles = (
            kind.remove_skipped_blocks is not base.remove_skipped_blocks
            or kind.get_num_skipped_tokens is not base.get_num_skipped_tokens
        )
        # None: nobody asks for them, so they are not kept.
        self.new_block_ids: list[int] | None = []
        self._is_zeroed = type(spec) in ZEROED_SPECS

    # --- tables -----------------------------------------------------------------------

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool,
    ) -> int:
        """Free blocks it costs to give the request ``num_tokens`` slots.

        A hit that lies in the free queue costs one too: it leaves the queue. One that is
        held back from this view costs nothing: it is none of those the view can take.
        ``num_tokens_main_model`` leaves lookahead tokens out. ``apply_admission_cap``:
        of a request that recycles blocks, count only what it holds at a time.
        """
        table = self.req_to_blocks.get(request_id, ())
        num_required = -(-num_tokens // self.block_size)
        if apply_admission_cap and self.max_admission_blocks is not None:
            num_required = min(num_required, self.max_admission_blocks)
        if request_id in self.num_cached_blocks:
            assert not new_computed_blocks
            return max(num_required - len(table), 0)
        num_skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        num_local = len(new_computed_blocks) + len(table)
        num_new = max(num_required - max(num_skipped, num_local), 0)
        kept = new_computed_blocks[max(0, num_skipped - len(table)) :]
        return num_new + num_evictable(kept, self.view)

    def num_uncounted_blocks(
        self,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_tokens_main_model: int,
    ) -> int:
        """What a request with external tokens takes beyond get_num_blocks_to_allocate."""
        return 0

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
    ) -> None:
        """Begin a table with the blocks of a hit, and reference them.

        Blocks outside the attention window are the null block.
        """
        table = self.req_to_blocks.setdefault(request_id, [])
        assert not table
        num_skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        if num_skipped > 0:
            new_computed_blocks = new_computed_blocks[num_skipped:]
            table.extend([self.pool.null_block] * num_skipped)
        self.pool.touch(new_computed_blocks)
        table.extend(new_computed_blocks)
        self.num_cached_blocks[request_id] = len(table)

    def allocate_external_computed_blocks(
        self, request_id: str, total_computed_tokens: int, num_external_computed_tokens: int
    ) -> None:
        """Blocks for tokens whose KV is brought from elsewhere."""
        num_skipped = max(0, self.get_num_skipped_tokens(total_computed_tokens))
        if min(total_computed_tokens - num_skipped, num_external_computed_tokens) > 0:
            table = self.req_to_blocks.setdefault(request_id, [])
            self._extend(table, cdiv(total_computed_tokens, self.block_size) - len(table))

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Grow the table to ``num_tokens`` slots; the new blocks."""
        return self.extend_table(request_id, num_tokens)

    def extend_table(
        self, request_id: str, num_tokens: int, later: Later | None = None
    ) -> list[KVCacheBlock]:
        """Grow the table to ``num_tokens`` slots; the new blocks, whose content ``later`` takes."""
        table = self.req_to_blocks.get(request_id)
        if table is None:
            table = self.req_to_blocks[request_id] = []
        return self._extend(table, -(-num_tokens // self.block_size) - len(table), later)

    def _extend(
        self, table: list[KVCacheBlock], num_blocks: int, later: Later | None = None
    ) -> list[KVCacheBlock]:
        if num_blocks <= 0:
            return []
        if later is None:
            new_blocks = self.pool.take(num_blocks, self.view)
        else:
            new_blocks = self.pool.hand_out(num_blocks, self.view)
            later.taken += new_blocks
        table.extend(new_blocks)
        if self.new_block_ids is not None and self._is_zeroed:
            self.new_block_ids.extend([block.block_id for block in new_blocks])
        return new_blocks

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """End the table and give it to the caller, who owes the pool its blocks."""
        self.num_cached_blocks.pop(request_id, None)
        self.registered.pop(request_id, None)
        return self.req_to_blocks.pop(request_id, [])

    def free(self, request_id: str) -> None:
        """End the table; its tail is evicted first."""
        blocks = self.pop_blocks_for_free(request_id)
        blocks.reverse()
        self.pool.free(blocks, self.view)

    def num_blocks_held(self) -> int:
        """Blocks in all tables; the null block is none."""
        num_entries = sum(map(len, self.req_to_blocks.values()))
        if not self.recycles:
            return num_entries
        return num_entries - sum(
            block.is_null for table in self.req_to_blocks.values() for block in table
        )

    def is_settled(
        self, request_id: str, num_computed_tokens: int, num_slots: int, num_tokens_to_cache: int
    ) -> bool:
        """Whether an allocation would free, take and register nothing here.

        That is the usual decode step: the tokens fit the table, fill no block, and move
        no window past one. False is always right, and is what a manager answers that
        overrides what an allocation does, unless it overrides this as well.
        """
        block_size = self.block_size
        table = self.req_to_blocks.get(request_id)
        if table is None or num_slots > len(table) * block_size:
            return False
        if num_tokens_to_cache // block_size > self.num_cached_blocks.get(request_id, 0):
            return False
        num_skipped = self.get_num_skipped_tokens(num_computed_tokens) // block_size
        return num_skipped <= 0 or not table or table[min(num_skipped, len(table)) - 1].is_null

    def window_end(self, num_computed_tokens: int) -> int:
        """How many computed and new tokens there can be until a window passes a block.

        From a successful allocation at ``num_computed_tokens`` on, while no later window
        is asked for. A window moves by a token a token at most, but chunks do not.
        """
        block_size = self.block_size
        skipped = max(0, self.get_num_skipped_tokens(num_computed_tokens))
        last = num_computed_tokens + block_size - 1 - skipped % block_size
        if self.get_num_skipped_tokens(last) // block_size > skipped // block_size:
            last = num_computed_tokens
        return last + 1

    def take_new_block_ids(self) -> list[int]:
        """Ids of the blocks taken since the last call, for zeroing."""
        assert self.new_block_ids is not None
        block_ids, self.new_block_ids = self.new_block_ids, []
        return block_ids

    # --- what attention does not look at ----------------------------------------------

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """How many leading tokens the next token's attention does not look at."""
        return 0

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int, num_prompt_tokens: int | None
    ) -> None:
        """Free what the attention no longer looks at, and put the null block there."""
        num_skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        if num_skipped > 0:
            self._remove_range(request_id, 0, num_skipped)

    def has_released(
        self, request_id: str, num_computed_tokens: int, num_prompt_tokens: int | None
    ) -> bool:
        """Whether the request cannot go on from ``num_computed_tokens``.

        What the next token looks at, or a place that would be written, is gone then.
        """
        first = max(0, self.get_num_skipped_tokens(num_computed_tokens)) // self.block_size
        table = self.req_to_blocks.get(request_id, ())
        return any(block.is_null for block in table[first:])

    def has_absorbed(self, request_id: str, num_tokens: int) -> bool:
        """Whether what the first ``num_tokens`` left may hold later tokens, not apart."""
        return False

    def _remove_range(self, request_id: str, first: int, stop: int) -> None:
        """Free the blocks at ``first`` to ``stop``, from the last on to one gone already."""
        table = self.req_to_blocks.get(request_id)
        if table is None:
            return
        position = min(stop, len(table)) - 1
        freed = []
        while position >= first and not table[position].is_null:
            freed.append(table[position])
            table[position] = self.pool.null_block
            position -= 1
        if freed:
            self.pool.free(freed, self.view)

    # --- hits -------------------------------------------------------------------------

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks within ``num_tokens`` hits, those that can ever be one."""
        request_id = request.request_id
        num_full = num_tokens // self.block_size
        num_cached = self.num_cached_blocks.get(request_id, 0)
        if num_cached >= num_full:
            return
        table = self.req_to_blocks[request_id]
        mask = self.reachable_block_mask(num_cached, num_full, request.num_prompt_tokens)
        block = table[num_cached]
        if (
            num_full == num_cached + 1
            and mask is None
            and block.block_hash is None
            and not block.is_null
        ):
            self.pool.cache_full_block(
                request,
                block,
                num_cached,
                self.block_size,
                self.group,
                self.view,
                self.hash_ratio,
            )
        else:
            self.pool.cache_full_blocks(
                request,
                table,
                num_cached_blocks=num_cached,
                num_full_blocks=num_full,
                block_size=self.block_size,
                group=self.group,
                view=self.view,
                hash_ratio=self.hash_ratio,
                block_mask=mask,
            )
        self.num_cached_blocks[request_id] = num_full
        step = self.view.step
        registered = self.registered.get(request_id)
        if registered is None or registered[0] != step or registered[1] > num_cached:
            self.registered[request_id] = (step, num_cached)

    def reachable_block_mask(
        self, start_block: int, end_block: int, num_prompt_tokens: int | None
    ) -> list[bool] | None:
        """Which blocks at ``start_block`` to ``end_block`` can ever serve a hit.

        None: all of them.
        """
        return None

    @abstractmethod
    def find_longest_cache_hit(
        self,
        block_hashes: Sequence[bytes],
        max_length: int,
        groups: Sequence[int],
        *,
        drop_eagle_block: bool,
        alignment_tokens: int,
    ) -> tuple[list[KVCacheBlock], ...]:
        """The blocks of the longest cached prefix of at most ``max_length`` tokens.

        ``block_hashes`` are of this group's blocks. ``groups``: all groups of this
        spec; each must have every block of the hit, and gets a list of its own, with
        the null block where nothing is looked at. ``drop_eagle_block``: leave the last
        matched block out. The length is a multiple of ``alignment_tokens``.
        """

    def made_in_this_step(self, hit: Sequence[KVCacheBlock]) -> bool:
        """Whether the hit must wait for the next step, to be computed first."""
        return False

    def new_step_starts(self) -> None:  # noqa: B027  (most kinds have nothing to do)
        """A scheduler step begins."""

    def get_num_common_prefix_blocks(self, request_id: str) -> int:
        """Leading blocks that every request of this session shares."""
        return 0


def num_evictable(blocks: Iterable[KVCacheBlock], view: PoolView) -> int:
    """How many of ``blocks`` lie in the free queue, where ``view`` can take them."""
    pins = view.pool.pins.counts
    if pins:
        blocks = [block for block in blocks if block.block_id not in pins]
    return sum(
        [
            block.ref_cnt == 0
            and not block.is_null
            and (block.held_by is None or block.held_by is view)
            for block in blocks
        ]
    )


def align_hit(hit: tuple[list[KVCacheBlock], ...], block_size: int, alignment_tokens: int) -> None:
    """Shorten the hit to a multiple of ``alignment_tokens``."""
    num_blocks = len(hit[0])
    num_kept = num_blocks * block_size // alignment_tokens * alignment_tokens // block_size
    if num_kept < num_blocks:
        for blocks in hit:
            del blocks[num_kept:]
