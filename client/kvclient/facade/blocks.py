"""Blocks as a Scheduler holds them: integer ids, and tickets of those that wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvclient.values import BlockTables


@dataclass(slots=True)
class KVCacheBlocks:
    """Block ids of one request, one list a KV cache group; 0 is the null block."""

    blocks: BlockTables

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """The blocks of both, group by group."""
        return KVCacheBlocks(
            tuple([*mine, *theirs] for mine, theirs in zip(self.blocks, other.blocks, strict=True))
        )

    def get_block_ids(self, allow_none: bool = False) -> BlockTables | None:
        """The block ids; with ``allow_none``, None when there are none."""
        return None if allow_none and not any(self.blocks) else self.blocks

    def new_empty(self) -> KVCacheBlocks:
        """No blocks, of as many groups."""
        return KVCacheBlocks(tuple([] for _ in self.blocks))


@dataclass(frozen=True, slots=True)
class DetachedBlock:
    """A block that waits, off the pool, for its ticket to be returned."""

    block_id: int
    ticket: int


class BlockPool:
    """What a Scheduler does with popped blocks."""

    def __init__(self, return_ticket: Callable[[int], None]) -> None:
        self._return_ticket = return_ticket

    def free_blocks(self, ordered_blocks: Iterable[DetachedBlock]) -> None:
        """Returns the tickets of these blocks, whole, each once."""
        for ticket in dict.fromkeys(block.ticket for block in ordered_blocks):
            self._return_ticket(ticket)
