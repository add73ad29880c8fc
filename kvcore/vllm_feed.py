"""vLLM's feed: events at allocation, one a physical copy, even empty ones.

As vLLM 0.25.1 records them in v1/core/block_pool.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.events import MEDIUM, AllBlocksCleared, BlockStored, Event
from kvcore.request import Request
from kvcore.spec import KVCacheConfig


class VllmFeed:
    """What happened to a pool's hits since the feed was last taken."""

    __slots__ = ("_config", "events")

    def __init__(self, config: KVCacheConfig) -> None:
        self._config = config
        # Public for the pool, which may not afford a call for each block that it evicts.
        self.events: list[Event] = []

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    def stored(
        self,
        request: Request,
        positions: Sequence[int],
        *,
        span: range,
        block_size: int,
        group: int,
        hash_ratio: int = 1,
    ) -> None:
        """New hits at ``positions`` of a table, out of ``span``: one event.

        It tells the tokens of the whole span, and may tell no block at all.
        """
        hashes = request.block_hashes
        first, stop = span.start, span.stop
        spec = self._config.groups[group].spec
        extra_keys = [request.extra_keys_of(position, block_size) for position in positions]
        self.events.append(
            BlockStored(
                block_hashes=[hashes[(position + 1) * hash_ratio - 1] for position in positions],
                parent_block_hash=hashes[first * hash_ratio - 1] if first else None,
                token_ids=request.token_bytes(first * block_size, stop * block_size),
                block_size=block_size,
                lora_id=request.lora_id,
                lora_name=request.extra.lora_name,
                extra_keys=extra_keys or None,
                group=group,
                spec_kind=spec.kind,
                medium=MEDIUM,
                sliding_window=spec.event_window,
            )
        )

    def cleared(self, generation: int) -> None:
        """No block is a hit any more."""
        self.events.append(AllBlocksCleared(generation))
