"""Hashes of a block beyond, or short of, that of its full content.

A coarse group's block can be named at any finer hash boundary inside it. Such a name
is the block's only hash until the block is full, or an alias beside it. Semantics of
the partial entries in vLLM 0.25.1's v1/core/block_pool.py.
"""

from __future__ import annotations

from kvcore.block import KVCacheBlock
from kvcore.feed import StoredRun


class PartialHashes:
    """Which blocks have a partial hash, and which have several."""

    __slots__ = ("aliases_by_id", "num_tokens_by_id")

    def __init__(self) -> None:
        # Both are public, so that those who look at every block see at once that
        # there are none. Of blocks whose block_hash is partial: the tokens it covers.
        self.num_tokens_by_id: dict[int, int] = {}
        # Further hashes of a block, and what events say of them.
        self.aliases_by_id: dict[int, dict[bytes, StoredRun | None]] = {}

    def set_primary(self, block: KVCacheBlock, num_tokens: int) -> None:
        """The block's ``block_hash`` covers ``num_tokens``, fewer than a full block's."""
        self.num_tokens_by_id[block.block_id] = num_tokens

    def num_tokens(self, block: KVCacheBlock) -> int | None:
        """What the block's partial ``block_hash`` covers; None if that is not partial."""
        return self.num_tokens_by_id.get(block.block_id)

    def add_alias(self, block: KVCacheBlock, block_hash: bytes, content: StoredRun | None) -> None:
        """Name the block by one hash more."""
        self.aliases_by_id.setdefault(block.block_id, {})[block_hash] = content

    def aliases(self, block: KVCacheBlock) -> dict[bytes, StoredRun | None]:
        """The block's further hashes, oldest first."""
        return self.aliases_by_id.get(block.block_id, {})

    def forget(self, block: KVCacheBlock) -> None:
        """The block has no hash any more."""
        self.num_tokens_by_id.pop(block.block_id, None)
        self.aliases_by_id.pop(block.block_id, None)

    def clear(self) -> None:
        """No block has one."""
        self.num_tokens_by_id.clear()
        self.aliases_by_id.clear()
