"""Block tables of one KV cache group: one manager class a kind of attention.

Semantics of vLLM 0.25.1's v1/core/single_type_kv_cache_manager.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvcore.block import KVCacheBlock
from kvcore.block_pool import BlockPool
from kvcore.errors import InvalidArgument
from kvcore.request import Request
from kvcore.spec import FullAttentionSpec, KVCacheSpec
from kvcore.view import PoolView


def cdiv(numerator: int, denominator: int) -> int:
    """Division rounded up."""
    return -(-numerator // denominator)


class SingleTypeKVCacheManager(ABC):
    """The block tables of one session in one group."""

    def __init__(self, spec: KVCacheSpec, pool: BlockPool, view: PoolView, group: int) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.pool = pool
        self.view = view
        self.group = group
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        # How many blocks of a table are hits already. Known only while it runs.
        self.num_cached_blocks: dict[str, int] = {}
        # None: nobody asks for them, so they are not kept.
        self.new_block_ids: list[int] | None = []

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
    ) -> int:
        """Free blocks it costs to give the request ``num_tokens`` slots.

        A hit that lies in the free queue costs one too: it leaves the queue. One that is
        held back from this view costs nothing: it is none of those the view can take.
        """
        table = self.req_to_blocks.get(request_id, ())
        num_required = cdiv(num_tokens, self.block_size)
        if request_id in self.num_cached_blocks:
            assert not new_computed_blocks
            return max(num_required - len(table), 0)
        num_skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        num_local = len(new_computed_blocks) + len(table)
        num_new = max(num_required - max(num_skipped, num_local), 0)
        kept = new_computed_blocks[max(0, num_skipped - len(table)) :]
        view = self.view
        return num_new + sum(
            block.ref_cnt == 0
            and not block.is_null
            and (block.held_by is None or block.held_by is view)
            for block in kept
        )

    def is_settled(
        self, request_id: str, num_computed_tokens: int, num_slots: int, num_tokens_to_cache: int
    ) -> bool:
        """Whether an allocation would free, take and register nothing here.

        That is the usual decode step: the tokens fit the table, fill no block, and move
        no window past one. A manager that overrides what allocate_slots calls answers
        this itself; False is always right.
        """
        block_size = self.block_size
        table = self.req_to_blocks.get(request_id)
        if table is None or num_slots > len(table) * block_size:
            return False
        if num_tokens_to_cache // block_size > self.num_cached_blocks.get(request_id, 0):
            return False
        num_skipped = self.get_num_skipped_tokens(num_computed_tokens) // block_size
        return num_skipped <= 0 or not table or table[min(num_skipped, len(table)) - 1].is_null

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
        kept = new_computed_blocks[num_skipped:]
        self.pool.touch(kept)
        table.extend([self.pool.null_block] * num_skipped)
        table.extend(kept)
        self.num_cached_blocks[request_id] = len(table)

    def allocate_external_computed_blocks(
        self, request_id: str, total_computed_tokens: int, num_external_computed_tokens: int
    ) -> None:
        """Blocks for tokens whose KV is brought from elsewhere."""
        num_inside = total_computed_tokens - self.get_num_skipped_tokens(total_computed_tokens)
        if min(num_inside, num_external_computed_tokens) > 0:
            self.allocate_new_blocks(request_id, total_computed_tokens)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Grow the table to ``num_tokens`` slots; the new blocks."""
        table = self.req_to_blocks.get(request_id)
        if table is None:
            table = self.req_to_blocks[request_id] = []
        num_new = cdiv(num_tokens, self.block_size) - len(table)
        if num_new <= 0:
            return []
        new_blocks = self.pool.take(num_new, self.view)
        table.extend(new_blocks)
        if self.new_block_ids is not None:
            self.new_block_ids.extend([block.block_id for block in new_blocks])
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks within ``num_tokens`` hits."""
        num_full = num_tokens // self.block_size
        num_cached = self.num_cached_blocks.get(request.request_id, 0)
        if num_cached >= num_full:
            return
        self.pool.cache_full_blocks(
            request,
            self.req_to_blocks[request.request_id],
            num_cached_blocks=num_cached,
            num_full_blocks=num_full,
            block_size=self.block_size,
            group=self.group,
            view=self.view,
        )
        self.num_cached_blocks[request.request_id] = num_full

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """End the table and give it to the caller, who owes the pool its blocks."""
        self.num_cached_blocks.pop(request_id, None)
        return self.req_to_blocks.pop(request_id, [])

    def free(self, request_id: str) -> None:
        """End the table; its tail is evicted first."""
        blocks = self.pop_blocks_for_free(request_id)
        blocks.reverse()
        self.pool.free(blocks, self.view)

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Free what the attention no longer looks at, and put the null block there."""
        num_skipped_tokens = self.get_num_skipped_tokens(total_computed_tokens)
        table = self.req_to_blocks.get(request_id)
        if num_skipped_tokens <= 0 or table is None:
            return
        freed = []
        for position in range(min(num_skipped_tokens // self.block_size, len(table)) - 1, -1, -1):
            if table[position].is_null:
                break
            freed.append(table[position])
            table[position] = self.pool.null_block
        self.pool.free(freed, self.view)

    def take_new_block_ids(self) -> list[int]:
        """Ids of the blocks taken since the last call, for zeroing."""
        assert self.new_block_ids is not None
        block_ids, self.new_block_ids = self.new_block_ids, []
        return block_ids

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """How many leading tokens the next token's attention does not look at."""
        return 0

    @abstractmethod
    def get_num_common_prefix_blocks(self, request_id: str) -> int:
        """Leading blocks that every request of this session shares."""

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int
    ) -> list[KVCacheBlock]:
        """The blocks of the longest cached prefix of at most ``max_length`` tokens."""


class FullAttentionManager(SingleTypeKVCacheManager):
    """Every block is needed until the request ends; a hit is a run from the start."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int
    ) -> list[KVCacheBlock]:
        entries = self.pool.indexes[self.group].entries
        view = self.view
        hit: list[KVCacheBlock] = []
        for block_hash in block_hashes[: max_length // self.block_size]:
            entry = entries.get(block_hash)
            if entry is None:
                break
            copies = (entry,) if isinstance(entry, KVCacheBlock) else entry.values()
            for block in copies:
                pending = block.pending_view
                if pending is None or pending is view:
                    hit.append(block)
                    break
            else:
                break
        return hit

    def get_num_common_prefix_blocks(self, request_id: str) -> int:
        tables = self.req_to_blocks
        num_requests = len(tables)
        alone = len(self.pool.views) == 1
        num_common = 0
        for position, block in enumerate(tables.get(request_id, ())):
            if block.ref_cnt < num_requests:
                break
            if not alone:
                # Others' references say nothing of this session's requests.
                holders = sum(
                    position < len(table) and table[position] is block for table in tables.values()
                )
                if holders != num_requests:
                    break
            elif block.ref_cnt != num_requests:
                break
            num_common += 1
        return num_common


MANAGERS: dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]] = {
    FullAttentionSpec: FullAttentionManager,
}
"""Which manager serves which spec."""


def make_manager(
    spec: KVCacheSpec, pool: BlockPool, view: PoolView, group: int
) -> SingleTypeKVCacheManager:
    """The manager for ``spec``; InvalidArgument if there is none."""
    manager_class = MANAGERS.get(type(spec))
    if manager_class is None:
        raise InvalidArgument(f"no manager serves {type(spec).__name__}", field="spec")
    return manager_class(spec, pool, view, group)
