"""Blocks that transfers keep. They are counted apart from ``ref_cnt``, so that what a peer
reads changes no decision of a session but how many blocks it can take.

A pinned block that nobody references is idle: neither in use nor free, so it is not
handed out. When its last pin ends it goes where it would have gone when it was freed, and
is held back for the steps that may still use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvcore.block import KVCacheBlock
from kvcore.view import PoolView

if TYPE_CHECKING:
    from kvcore.block_pool import BlockPool


class Pins:
    """Of one pool."""

    __slots__ = ("_pool", "_taker", "counts", "filling", "idle")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        # Pins by block id, of blocks that have any. Public for the pool, which looks once a call.
        self.counts: dict[int, int] = {}
        # Ids of pinned blocks that nobody references.
        self.idle: set[int] = set()
        # Ids of pinned blocks whose bytes are on their way.
        self.filling: set[int] = set()
        # Takes what is everybody's; it is no session's and never in a step.
        self._taker = PoolView(pool)

    @property
    def num_takable(self) -> int:
        """Free blocks that no session's steps may still use."""
        return self._pool.num_free_blocks(self._taker)

    def take(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take free blocks to be filled, evicting what they hold; each has one pin.

        The caller knows that they are there.
        """
        blocks = self._pool.take(num_blocks, self._taker)
        for block in blocks:
            block.ref_cnt = 0
        ids = [block.block_id for block in blocks]
        self.counts.update(dict.fromkeys(ids, 1))
        self.idle.update(ids)
        self.filling.update(ids)
        return blocks

    def pin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more pin each; those that were free leave the queue."""
        pool, counts = self._pool, self.counts
        idle = []
        for block in blocks:
            block_id = block.block_id
            assert block_id
            if block_id in counts:
                counts[block_id] += 1
                continue
            counts[block_id] = 1
            if block.ref_cnt == 0:
                idle.append(block)
        pool.free_queue.remove_n(idle)
        pool.num_cached_blocks -= sum([block.block_hash is not None for block in idle])
        self.idle.update([block.block_id for block in idle])
        if pool.num_held_blocks:
            for block in idle:
                if block.held_by is not None:
                    pool.holds.keep(block)

    def unpin(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """One pin less each, first to be evicted first; none of them is being filled."""
        counts = self.counts
        idle: list[KVCacheBlock] = []
        for block in ordered_blocks:
            count = counts.pop(block.block_id)
            if count > 1:
                counts[block.block_id] = count - 1
            elif block.ref_cnt == 0:
                idle.append(block)
        self.idle.difference_update([block.block_id for block in idle])
        pool = self._pool
        cached = [block for block in idle if block.block_hash is not None]
        if len(cached) < len(idle):
            pool.free_queue.prepend_n([block for block in idle if block.block_hash is None])
        pool.free_queue.append_n(cached)
        pool.num_cached_blocks += len(cached)
        if pool.holds.by_block:
            for block in idle:
                if block.block_id in pool.holds.by_block:
                    pool.holds.resume(block)

    def touch_idle(self, blocks: Iterable[KVCacheBlock]) -> list[KVCacheBlock]:
        """Reference those of ``blocks`` that are idle; the others."""
        others = []
        residency = self._pool.residency
        for block in blocks:
            if block.block_id not in self.idle:
                others.append(block)
                continue
            self.idle.remove(block.block_id)
            block.ref_cnt = 1
            if residency is not None and block.block_id in residency.births:
                residency.on_touched(block)
        return others

    def keep(self, blocks: Sequence[KVCacheBlock], view: PoolView) -> list[KVCacheBlock]:
        """Those of ``blocks``, which ``view`` dropped the last reference of, without a pin.

        The others are idle, and remember which steps of ``view`` may still use them.
        """
        counts = self.counts
        kept = [block for block in blocks if block.block_id in counts]
        if not kept:
            return list(blocks)
        self.idle.update([block.block_id for block in kept])
        if view.last_use_step > view.completed_step:
            self._pool.holds.keep_released(kept, view)
        return [block for block in blocks if block.block_id not in counts]
