"""What happened to cached content, as vLLM's distributed/kv_events.py names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# vLLM's name for the pool's own memory, whatever the device.
MEDIUM = "GPU"


@dataclass(slots=True)
class BlockStored:
    """Blocks became hits. ``token_ids`` are little-endian uint32, of all the blocks."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: bytes
    block_size: int
    lora_id: int | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None
    group: int
    spec_kind: str
    medium: str
    # The window of a sliding window group, in tokens.
    sliding_window: int | None = None


@dataclass(slots=True)
class BlockRemoved:
    """Blocks are no longer hits."""

    block_hashes: list[bytes]
    group: int
    medium: str
    reason: str = "evicted"


@dataclass(slots=True)
class AllBlocksCleared:
    """The whole index was emptied by a reset."""

    generation: int = 0


Event = BlockStored | BlockRemoved | AllBlocksCleared
