"""Checksums of ready blocks' bytes, as far as somebody has computed them.

The bytes of a ready block do not change, so that one sum is right until the block loses
its content, which drops it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcore.block import KVCacheBlock


class BlockSums:
    """Of one pool: XXH3-64, by block id."""

    __slots__ = ("_num_blocks", "by_id")

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        # Empty as long as nobody asked for any: 8 bytes a block. 0: not known. Public for the
        # pool, which drops one block's in a hot path.
        self.by_id: array[int] = array("Q")

    def of(self, blocks: Iterable[KVCacheBlock]) -> list[int]:
        """One a block; 0 of one that is not known."""
        by_id = self.by_id
        if not by_id:
            return [0 for _ in blocks]
        return [by_id[block.block_id] for block in blocks]

    def keep(self, blocks: Sequence[KVCacheBlock], sums: Sequence[int]) -> None:
        """Remember them. The blocks are ready, and have been since before they were summed."""
        if not self.by_id:
            self.by_id = array("Q", bytes(8 * self._num_blocks))
        for block, value in zip(blocks, sums, strict=True):
            self.by_id[block.block_id] = value

    def clear(self) -> None:
        """No block has content any more."""
        self.by_id = array("Q")
