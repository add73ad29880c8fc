"""The event stream, typed: which content is in the pool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

ExtraKey = str | bytes | tuple[str, int]
"""A LoRA name or cache salt, a digest, or (multimodal identifier, offset in the block)."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks of one chain that are here now, parent before child.

    ``token_ids`` are little-endian uint32, of all the blocks; ``extra_keys`` one a block.
    ``sliding_window``, in tokens, is that of the group, None where it has none.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: bytes
    block_size: int
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[tuple[ExtraKey, ...], ...]
    group: int
    spec_kind: str
    medium: str
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that are no longer here."""

    block_hashes: tuple[bytes, ...]
    group: int
    medium: str
    reason: str


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is here any more; ``generation`` counts resets."""

    generation: int


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Event i has sequence ``first_sequence + i``, except in a snapshot.

    Without events it is a heartbeat, and ``first_sequence`` that of the next event.
    ``snapshot_end``: the snapshot is complete with this batch.
    """

    epoch: str
    first_sequence: int
    timestamp_seconds: float
    events: tuple[Event, ...]
    snapshot: bool
    snapshot_end: bool

    @property
    def next_sequence(self) -> int:
        """Where to resume after this batch."""
        return self.first_sequence + (0 if self.snapshot else len(self.events))


@dataclass(slots=True)
class IndexMirror:
    """What a follower knows: the hashes that are here, by group.

    Feed it every batch of a stream begun with a snapshot, or at the server's start.
    ValueError when a batch does not follow the one before it.
    """

    blocks: dict[int, dict[bytes, Any]] = field(default_factory=dict)
    epoch: str = ""
    next_sequence: int | None = None
    _in_snapshot: bool = field(default=False, init=False, repr=False)

    def apply(self, batch: EventBatch) -> None:
        """Take in one batch."""
        if batch.snapshot:
            if not self._in_snapshot:
                self.blocks.clear()
            self._in_snapshot = not batch.snapshot_end
        elif self.next_sequence not in (None, batch.first_sequence):
            raise ValueError(f"expected event {self.next_sequence}, got {batch.first_sequence}")
        self.epoch = batch.epoch
        if not batch.snapshot or batch.snapshot_end:
            self.next_sequence = batch.next_sequence
        self.apply_events(batch.events)

    def apply_events(self, events: Iterable[Event]) -> None:
        """Take in events, in order."""
        for event in events:
            if isinstance(event, BlockStored):
                group = self.blocks.setdefault(event.group, {})
                parent = event.parent_block_hash
                for block_hash in event.block_hashes:
                    group[block_hash] = parent
                    parent = block_hash
            elif isinstance(event, BlockRemoved):
                group = self.blocks.setdefault(event.group, {})
                for block_hash in event.block_hashes:
                    group.pop(block_hash, None)
            else:
                self.blocks.clear()

    def hashes(self, group: int = 0) -> set[bytes]:
        """The hashes that are here."""
        return set(self.blocks.get(group, ()))
