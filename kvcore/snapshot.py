"""What everybody can read now: all of it, and whether a hash is."""

from __future__ import annotations

from kvcore.block import KVCacheBlock
from kvcore.block_pool import BlockPool
from kvcore.events import BlockStored


def snapshot(pool: BlockPool) -> list[BlockStored]:
    """All readable content, a block each, a parent before its children."""
    ready: dict[tuple[int, bytes], KVCacheBlock] = {}
    for group, index in enumerate(pool.indexes):
        for block_hash in index.entries:
            for block in index.copies(block_hash):
                if block.pending is None and block.content is not None:
                    ready[group, block_hash] = block
                    break
    events: list[BlockStored] = []
    emitted: set[tuple[int, bytes]] = set()
    for key in ready:
        chain: list[BlockStored] = []
        at: tuple[int, bytes] | None = key
        while at is not None and at in ready and at not in emitted:
            emitted.add(at)
            block = ready[at]
            event = pool.partial.stored_event(block, at[1])
            assert event is not None
            chain.append(event)
            parent = event.parent_block_hash
            at = None if parent is None else (block.group, parent)
        events.extend(reversed(chain))
    return events
