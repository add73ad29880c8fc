"""A debugging aid: blocks are filled before they are handed out, so that what nobody has
written cannot pass for what somebody has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvcore.block import KVCacheBlock
from kvcore.block_pool import BlockPool
from kvcore.spec import KVCacheConfig
from kvcore.view import PoolView

Poison = Callable[[Sequence[int]], None]
"""Fills blocks, by id, and returns when that is done."""


class PoisoningBlockPool(BlockPool):
    """A pool that has every block filled that it hands out. Hits are not: they are written.

    A session may take back at once what a step of its own in flight still reads. Such a
    block is left as it is: only that session's workers know when the step has ended.
    """

    def __init__(self, config: KVCacheConfig, poison: Poison, **options: Any) -> None:
        super().__init__(config, **options)
        self._poison = poison

    def hand_out(self, num_blocks: int, view: PoolView) -> list[KVCacheBlock]:
        in_flight = {block.block_id for block in view.held_blocks()}
        blocks = super().hand_out(num_blocks, view)
        self._poison([block.block_id for block in blocks if block.block_id not in in_flight])
        return blocks


def make_block_pool(config: KVCacheConfig, poison: Poison | None, **options: Any) -> BlockPool:
    """A pool; one that poisons, if ``poison`` is given."""
    if poison is None:
        return BlockPool(config, **options)
    return PoisoningBlockPool(config, poison, **options)
