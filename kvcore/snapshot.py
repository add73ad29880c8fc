"""What everybody can read now: all of it, and whether a hash is."""

from __future__ import annotations

from kvcore.block import KVCacheBlock
from kvcore.block_pool import BlockPool
from kvcore.feed import StoredBlocks, StoredRun


def snapshot(pool: BlockPool) -> list[StoredBlocks]:
    """All readable content, a parent before its children.

    In few objects, none of which changes: nobody else has a turn while it is taken, and
    what they say of each block can be read later.
    """
    found: list[StoredBlocks] = []
    last: StoredBlocks | None = None
    for index in pool.indexes:
        ready: dict[bytes, tuple[StoredRun, int]] = {}
        for block_hash, first in index.entries.items():
            # One copy, full, is the usual case, which costs no call.
            for block in (first,) if isinstance(first, KVCacheBlock) else first.values():
                run, position = block.content, block.content_position
                if block.pending is None and run is not None:
                    if block.block_hash != block_hash:
                        run, position = pool.partial.content(block, block_hash)
                        assert run is not None
                    ready[block_hash] = run, position
                    break
        for block_hash in list(ready):
            if block_hash not in ready:
                continue
            # Back to the first whose parent is not here, or was told.
            kept = ready.pop(block_hash)
            chain = [kept]
            while (parent := kept[0].parent_of(kept[1])) is not None and parent in ready:
                kept = ready.pop(parent)
                chain.append(kept)
            for run, position in reversed(chain):
                if last is not None and last.run is run and last.stop == position:
                    last.stop += 1
                else:
                    last = StoredBlocks(run, position, position + 1)
                    found.append(last)
    return found
