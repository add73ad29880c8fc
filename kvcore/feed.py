"""The truth feed while nobody reads it: what happened to which blocks, in few objects.

A prompt of a thousand tokens becomes readable as one entry, of which a reader makes
one event a block. Most feeds are read by nobody, and none within the call that
caused them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvcore.events import AllBlocksCleared, BlockRemoved, BlockStored, Event

RUN_BLOCKS_MAX = 32
"""A run's tokens are kept while one of its blocks holds content, so runs are short."""


@dataclass(frozen=True, slots=True)
class ContentKind:
    """What events say of every block of a KV cache group."""

    block_size: int
    group: int
    spec_kind: str
    sliding_window: int | None
    medium: str


class StoredRun:
    """Consecutive blocks of one table that one call registered: what events say of each.

    ``tokens`` are little-endian uint32, of all the blocks; ``extra_keys`` None: no
    block has any. Nothing of it changes once it is made.
    """

    __slots__ = ("extra_keys", "hashes", "kind", "lora_id", "lora_name", "parent_hash", "tokens")

    def __init__(
        self,
        kind: ContentKind,
        parent_hash: bytes | None,
        hashes: Sequence[bytes],
        tokens: bytes,
        extra_keys: Sequence[tuple[Any, ...] | None] | None = None,
        lora_id: int | None = None,
        lora_name: str | None = None,
    ) -> None:
        self.kind = kind
        self.parent_hash = parent_hash
        self.hashes = hashes
        self.tokens = tokens
        self.extra_keys = extra_keys
        self.lora_id = lora_id
        self.lora_name = lora_name

    def parent_of(self, position: int) -> bytes | None:
        """The hash before that of the block at ``position`` of the run."""
        return self.hashes[position - 1] if position else self.parent_hash

    def tokens_of(self, start: int, stop: int) -> bytes:
        """Those of the blocks ``start`` to ``stop`` of the run."""
        num_bytes = len(self.tokens) // len(self.hashes)
        return self.tokens[start * num_bytes : stop * num_bytes]

    def event(self, position: int) -> BlockStored:
        """The block at ``position`` of the run is readable."""
        kind = self.kind
        return BlockStored(
            block_hashes=[self.hashes[position]],
            parent_block_hash=self.parent_of(position),
            token_ids=self.tokens_of(position, position + 1),
            block_size=kind.block_size,
            lora_id=self.lora_id,
            lora_name=self.lora_name,
            extra_keys=[None if self.extra_keys is None else self.extra_keys[position]],
            group=kind.group,
            spec_kind=kind.spec_kind,
            medium=kind.medium,
            sliding_window=kind.sliding_window,
        )


class StoredBlocks:
    """Blocks ``start`` to ``stop`` of a run became readable for everybody, in this order."""

    __slots__ = ("run", "start", "stop")

    def __init__(self, run: StoredRun, start: int, stop: int) -> None:
        self.run = run
        self.start = start
        self.stop = stop

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> StoredBlocks:
        """The events ``start`` to ``stop`` of these."""
        return StoredBlocks(self.run, self.start + start, self.start + stop)

    def events(self) -> Iterator[BlockStored]:
        """One a block."""
        return map(self.run.event, range(self.start, self.stop))


class RemovedBlocks:
    """The last readable copies of these hashes went, in this order, for one reason."""

    __slots__ = ("group", "hashes", "medium", "reason")

    def __init__(self, hashes: list[bytes], group: int, medium: str, reason: str) -> None:
        self.hashes = hashes
        self.group = group
        self.medium = medium
        self.reason = reason

    def __len__(self) -> int:
        return len(self.hashes)

    def part(self, start: int, stop: int) -> RemovedBlocks:
        """The events ``start`` to ``stop`` of these."""
        return RemovedBlocks(self.hashes[start:stop], self.group, self.medium, self.reason)

    def events(self) -> Iterator[BlockRemoved]:
        """One a block."""
        return (
            BlockRemoved([block_hash], self.group, self.medium, self.reason)
            for block_hash in self.hashes
        )


Entry = StoredBlocks | RemovedBlocks | AllBlocksCleared
"""One or more events of the feed."""


def events_of(entries: Iterable[Entry | Event]) -> Iterator[Event]:
    """The events themselves."""
    for entry in entries:
        if isinstance(entry, StoredBlocks | RemovedBlocks):
            yield from entry.events()
        else:
            yield entry
