"""Hashes of a block beyond, or short of, that of its full content.

A coarse group's block can be named at any finer hash boundary inside it. Such a name
is the block's only hash until the block is full, or an alias beside it. Semantics of
the partial entries in vLLM 0.25.1's v1/core/block_pool.py.
"""

from __future__ import annotations

from kvcore.block import BlockContent, KVCacheBlock


class PartialHashes:
    """Which blocks have a partial hash, and which have several."""

    __slots__ = ("_aliases", "_num_tokens")

    def __init__(self) -> None:
        # Of blocks whose block_hash is partial: the tokens that it covers.
        self._num_tokens: dict[int, int] = {}
        # Further hashes of a block, and what events say of them.
        self._aliases: dict[int, dict[bytes, BlockContent | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._num_tokens or self._aliases)

    def set_primary(self, block: KVCacheBlock, num_tokens: int) -> None:
        """The block's ``block_hash`` covers ``num_tokens``, fewer than a full block's."""
        self._num_tokens[block.block_id] = num_tokens

    def num_tokens(self, block: KVCacheBlock) -> int | None:
        """What the block's partial ``block_hash`` covers; None if that is not partial."""
        return self._num_tokens.get(block.block_id)

    def add_alias(
        self, block: KVCacheBlock, block_hash: bytes, content: BlockContent | None
    ) -> None:
        """Name the block by one hash more."""
        self._aliases.setdefault(block.block_id, {})[block_hash] = content

    def aliases(self, block: KVCacheBlock) -> dict[bytes, BlockContent | None]:
        """The block's further hashes, oldest first."""
        return self._aliases.get(block.block_id, {})

    def forget(self, block: KVCacheBlock) -> None:
        """The block has no hash any more."""
        self._num_tokens.pop(block.block_id, None)
        self._aliases.pop(block.block_id, None)

    def clear(self) -> None:
        """No block has one."""
        self._num_tokens.clear()
        self._aliases.clear()
