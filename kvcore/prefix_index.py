"""From a block's hash to the blocks that hold that content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvcore.block import KVCacheBlock

if TYPE_CHECKING:
    from kvcore.view import PoolView

Copies = KVCacheBlock | dict[int, KVCacheBlock]
"""One block, which is the usual case, or several by id in the order of insertion."""


class PrefixIndex:
    """One KV cache group's hashes. Equal content may lie in several blocks: all are
    kept, and a lookup answers the first. As vLLM's BlockHashToBlockMap
    (v1/core/block_pool.py).
    """

    __slots__ = ("entries",)

    def __init__(self) -> None:
        # Public for the lookup loop, which may not afford a call a block.
        self.entries: dict[bytes, Copies] = {}

    def copies(self, block_hash: bytes) -> Iterator[KVCacheBlock]:
        """Every block with this content, first registered first."""
        entry = self.entries.get(block_hash)
        if entry is not None:
            if isinstance(entry, KVCacheBlock):
                yield entry
            else:
                yield from entry.values()

    def insert(self, block_hash: bytes, block: KVCacheBlock) -> None:
        """Add a copy."""
        entry = self.entries.setdefault(block_hash, block)
        if entry is not block:
            if isinstance(entry, KVCacheBlock):
                self.entries[block_hash] = {entry.block_id: entry, block.block_id: block}
            else:
                entry[block.block_id] = block

    def remove(self, block_hash: bytes, block: KVCacheBlock) -> bool:
        """Drop a copy that was inserted before; whether others are left."""
        entry = self.entries[block_hash]
        if entry is not block:
            assert isinstance(entry, dict)
            del entry[block.block_id]
            if entry:
                return True
        del self.entries[block_hash]
        return False

    def holds(self, block_hash: bytes, block: KVCacheBlock) -> bool:
        """Whether ``block`` is a copy under this hash."""
        entry = self.entries.get(block_hash)
        return entry is block or (isinstance(entry, dict) and block.block_id in entry)

    def is_ready_elsewhere(self, block_hash: bytes, block: KVCacheBlock) -> bool:
        """Whether a copy other than ``block`` is readable for everybody."""
        entry = self.entries.get(block_hash)
        if entry is None or entry is block:
            return False  # the usual case, for which no iterator is made
        copies = self.copies(block_hash)
        return any(copy is not block and copy.pending is None for copy in copies)

    def ready_copy(self, block_hash: bytes) -> KVCacheBlock | None:
        """The first that is readable for everybody."""
        for copy in self.copies(block_hash):
            if copy.pending is None:
                return copy
        return None


def visible_blocks(
    block_hash: bytes, indexes: Sequence[PrefixIndex], view: PoolView
) -> list[KVCacheBlock] | None:
    """The first copy in each index that ``view`` may read; None if one has none."""
    found = []
    for index in indexes:
        entry = index.entries.get(block_hash)
        if entry is None:
            return None
        copies = (entry,) if isinstance(entry, KVCacheBlock) else entry.values()
        for block in copies:
            pending = block.pending
            if pending is None or pending.view is view:
                found.append(block)
                break
        else:
            return None
    return found
