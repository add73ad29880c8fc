"""The manager of layers that look at a window of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.block import KVCacheBlock
from kvcore.block_pool import BlockPool
from kvcore.prefix_index import visible_blocks
from kvcore.single_type.base import SingleTypeKVCacheManager, align_hit
from kvcore.spec import DepotConfig, KVCacheSpec, SlidingWindowSpec, cdiv
from kvcore.view import PoolView


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Blocks before the window are released; a hit needs only those in it."""

    def __init__(
        self, spec: KVCacheSpec, *, pool: BlockPool, view: PoolView, group: int, config: DepotConfig
    ) -> None:
        super().__init__(spec, pool=pool, view=view, group=group, config=config)
        assert isinstance(spec, SlidingWindowSpec)
        self.sliding_window = spec.sliding_window

    def num_blocks_of_hit(self, with_eagle_block: bool) -> int:
        """How many blocks in a row a hit needs; the one that EAGLE drops is one more."""
        return cdiv(self.sliding_window - 1, self.block_size) + with_eagle_block

    def find_longest_cache_hit(
        self,
        block_hashes: Sequence[bytes],
        max_length: int,
        groups: Sequence[int],
        *,
        drop_eagle_block: bool,
        alignment_tokens: int,
    ) -> tuple[list[KVCacheBlock], ...]:
        block_size = self.block_size
        aligned = alignment_tokens == block_size
        needed = self.num_blocks_of_hit(drop_eagle_block)
        num_blocks = max_length // block_size
        null_block = self.pool.null_block
        hit = tuple([[null_block] * num_blocks for _ in groups])
        indexes = [self.pool.indexes[group] for group in groups]
        # From the right: the run that ends first is that of the longest hit.
        num_run = 0
        for position in range(num_blocks - 1, -1, -1):
            found = visible_blocks(block_hashes[position], indexes, self.view)
            if found is None:
                num_run = 0
                continue
            if num_run == 0 and not aligned:
                num_kept = position if drop_eagle_block else position + 1
                if num_kept * block_size % alignment_tokens:
                    continue  # a hit cannot end here
            for blocks, block in zip(hit, found, strict=True):
                blocks[position] = block
            num_run += 1
            if num_run >= needed:
                for blocks in hit:
                    del blocks[position + num_run :]
                break
        else:
            # The blocks from the start on are a hit even if they are fewer.
            for blocks in hit:
                del blocks[num_run:]
            if not aligned:
                align_hit(hit, block_size, alignment_tokens)
        if drop_eagle_block and hit[0]:
            for blocks in hit:
                blocks.pop()
            if not aligned:
                align_hit(hit, block_size, alignment_tokens)
        return hit

    def reachable_block_mask(
        self, start_block: int, end_block: int, num_prompt_tokens: int | None
    ) -> list[bool] | None:
        """Only the windows before a boundary where a hit can end.

        These are the multiples of the scheduler's block size; with a retention
        interval, its multiples, and the last boundary within the prompt, at which a
        repeat of the same prompt hits. With EAGLE a window ends one block later.
        """
        block_size, alignment = self.block_size, self.scheduler_block_size
        interval = self.retention_interval
        needed = self.num_blocks_of_hit(self.use_eagle)
        shift = 1 if self.use_eagle else 0
        mask: list[bool] | None = None
        segment = alignment if interval is None else interval
        if segment:
            per_segment = segment // block_size
            if needed >= per_segment:
                return None
            first_reached = per_segment - needed
            mask = [
                position >= shift and (position - shift) % per_segment >= first_reached
                for position in range(start_block, end_block)
            ]
        else:
            mask = [False] * (end_block - start_block)
        if interval is not None and num_prompt_tokens is not None:
            last_boundary = (num_prompt_tokens - 1) // alignment * alignment
            stop = last_boundary // block_size + shift
            for position in range(max(start_block, stop - needed), min(end_block, stop)):
                mask[position - start_block] = True
        return mask

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        # The next token's window holds itself and ``sliding_window - 1`` before it.
        return max(0, num_computed_tokens - self.sliding_window + 1)
