"""Blocks that wait for steps of several sessions.

A step that has not completed may still use a block that its session has released.
While one view waits for a free block, the block says so itself (``held_by``,
``held_step``). ``Holds`` is for the rest: a free block that several views wait for, and
a block that is in use while a view waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.block import KVCacheBlock
from kvcore.view import PoolView

if TYPE_CHECKING:
    from kvcore.block_pool import BlockPool


class Holds:
    """Of one pool."""

    __slots__ = ("_pool", "by_block", "num_kept", "several")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        # Stands for the views that together hold back a block.
        self.several = PoolView(pool)
        # By block id and view, the steps that a block waits for: when several views hold it
        # back, and while it is in use, of those that held it back or released it.
        self.by_block: dict[int, dict[PoolView, int]] = {}
        # Blocks in use that were held back when they were hit, or released in steps that
        # may still read them.
        self.num_kept = 0

    def keep(self, block: KVCacheBlock) -> None:
        """A block that is held back is in use again."""
        holder = block.held_by
        assert holder is not None
        if holder is not self.several:
            self.by_block[block.block_id] = {holder: block.held_step}
        holder.release(block)
        self.num_kept += 1

    def keep_released(self, blocks: list[KVCacheBlock], view: PoolView) -> None:
        """Blocks that ``view`` released while a step of it may use them, and others still do.

        Whoever releases one last may have completed its steps before that one has.
        """
        for block in blocks:
            if block.block_id not in self.by_block:
                self.by_block[block.block_id] = {}
                self.num_kept += 1
            self.by_block[block.block_id][view] = view.last_use_step
        view.await_end(blocks)

    def resume(self, block: KVCacheBlock) -> None:
        """A block that was held back before its last use is free again."""
        holds = self.by_block.pop(block.block_id)
        self.num_kept -= 1
        if block.held_by is not None:
            holds[block.held_by] = block.held_step
            block.held_by.release(block)
        self._hold(block, holds)

    def end(self, block: KVCacheBlock) -> None:
        """One of the several views that hold back ``block`` waits for no step any more."""
        self.several.release(block)
        self._hold(block, self.by_block.pop(block.block_id))

    def is_awaited_beside(self, block: KVCacheBlock, view: PoolView) -> bool:
        """Whether a step of another view, not completed yet, may still use a block in use."""
        return any(
            other is not view and step > other.completed_step
            for other, step in self.by_block.get(block.block_id, {}).items()
        )

    def _hold(self, block: KVCacheBlock, holds: dict[PoolView, int]) -> None:
        """Hold back a free block for those of ``holds`` whose steps have not completed."""
        waiting = {view: step for view, step in holds.items() if step > view.completed_step}
        if not waiting:
            return
        if len(waiting) > 1:
            self.by_block[block.block_id] = waiting
            block.held_by = self.several
        else:
            ((block.held_by, block.held_step),) = waiting.items()
        block.held_by.num_held_blocks += 1
        self._pool.num_held_blocks += 1
