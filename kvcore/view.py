"""What one session sees of a pool that others share.

vLLM counts tokens as computed when it schedules them, so a block is a hit before
its bytes exist. That is right for the scheduler that ordered them, and wrong for
everybody else. A view knows which step it is in and which step's writes have
ended: blocks it registers are visible to itself at once, to others when that step
has completed; blocks it frees can be taken by itself at once, by others when the
step of their last use has completed.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvcore.block import KVCacheBlock

if TYPE_CHECKING:
    from kvcore.block_pool import BlockPool


class Pending:
    """Blocks that ``view`` registered in ``step``; each whose ``pending`` is this still is."""

    __slots__ = ("blocks", "step", "view")

    def __init__(self, view: PoolView, step: int) -> None:
        self.view = view
        self.step = step
        self.blocks: list[KVCacheBlock] = []


class PoolView:
    """One session's steps. A view that never begins a step sees all as written."""

    __slots__ = (
        "_held",
        "_pending",
        "completed_step",
        "last_use_step",
        "num_held_blocks",
        "pool",
        "retaken",
        "step",
    )

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.step = 0
        self.completed_step = 0
        # The last step that may read or write what is freed now.
        self.last_use_step = 0
        # In order of step, one a step.
        self._pending: deque[Pending] = deque()
        # (step, blocks), in order of step.
        self._held: deque[tuple[int, list[KVCacheBlock]]] = deque()
        # Free blocks that others must not take yet.
        self.num_held_blocks = 0
        # By id, blocks that this view freed and took again, and the step, not completed yet,
        # that may still use them. Its workers run steps in order; nobody else waits for them.
        self.retaken: dict[int, int] = {}

    def begin_step(self, step: int, completed_step: int, *, is_synchronous: bool = False) -> None:
        """Enter ``step``; the writes of ``completed_step`` and before have ended.

        Both only rise; ``completed_step`` < ``step``, unless nothing is in flight.
        ``is_synchronous``: what runs in ``step`` begins only after what is freed in it,
        so that nobody has to wait for what is freed.
        """
        assert step >= self.step
        assert completed_step >= self.completed_step
        self.step = step
        self.last_use_step = completed_step if is_synchronous else step
        if completed_step != self.completed_step:
            self.completed_step = completed_step
            self._complete()

    def add_pending(self, blocks: list[KVCacheBlock]) -> None:
        """Blocks registered in this step; their bytes are not known to be written."""
        if not self._pending or self._pending[-1].step != self.step:
            self._pending.append(Pending(self, self.step))
        pending = self._pending[-1]
        for block in blocks:
            block.pending = pending
        pending.blocks += blocks

    def pending_blocks(self, first_step: int = 0) -> list[KVCacheBlock]:
        """Those that this view registered, from a step on, and whose bytes are not known to be
        written.
        """
        found: list[KVCacheBlock] = []
        for pending in reversed(self._pending):
            if pending.step < first_step:
                break
            pending.blocks = [block for block in pending.blocks if block.pending is pending]
            found += pending.blocks
        return found

    def hold(self, blocks: list[KVCacheBlock]) -> None:
        """Blocks freed now, which a step that has not completed may still use."""
        for block in blocks:
            block.held_by = self
            block.held_step = self.last_use_step
        self.await_end(blocks)
        self.num_held_blocks += len(blocks)
        self.pool.num_held_blocks += len(blocks)

    def await_end(self, blocks: list[KVCacheBlock]) -> None:
        """Look, when their last use has completed, whether ``blocks`` are held back for it."""
        self._held.append((self.last_use_step, blocks))

    def forget_pending(self) -> None:
        """What is not known to be written now never will be: make it no hit."""
        for pending in self._pending:
            for block in pending.blocks:
                if block.pending is pending:
                    self.pool.forget(block)
        self._pending.clear()

    def depart(self) -> None:
        """The session is over, but its workers may still write.

        What it frees from now on is held back, and what it holds back stays so, until
        the pool closes the view.
        """
        self.step += 1
        self.last_use_step = self.step

    def held_blocks(self) -> list[KVCacheBlock]:
        """The free blocks that others must not take yet, each once, held by others too or not."""
        blocks = {
            block.block_id: block
            for _, held in self._held
            for block in held
            if block.held_by is self or block.held_by is self.pool.holds.several
        }
        return list(blocks.values())

    def take_back(self, block: KVCacheBlock) -> None:
        """This view, which a free block is held back for, takes it itself."""
        self.retaken[block.block_id] = block.held_step
        self.release(block)

    def release(self, block: KVCacheBlock) -> None:
        """``block`` is no longer free, or no longer held back."""
        block.held_by = None
        self.num_held_blocks -= 1
        self.pool.num_held_blocks -= 1

    def _complete(self) -> None:
        completed = self.completed_step
        steps, held = self._pending, self._held
        while steps and steps[0].step <= completed:
            pending = steps.popleft()
            # One may have lost its hash since, and gained another one later.
            self.pool.confirm([block for block in pending.blocks if block.pending is pending])
        num_released = 0
        while held and held[0][0] <= completed:
            for block in held.popleft()[1]:
                if block.held_by is self:
                    if block.held_step <= completed:
                        block.held_by = None
                        num_released += 1
                elif block.held_by is self.pool.holds.several:
                    self.pool.holds.end(block)
        self.num_held_blocks -= num_released
        self.pool.num_held_blocks -= num_released
        if self.retaken:
            self.retaken = {i: step for i, step in self.retaken.items() if step > completed}
