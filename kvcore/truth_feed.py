"""The truth feed: content as it becomes readable for everybody, and as its last readable
copy goes. What its entries are is in feed.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore.block import KVCacheBlock
from kvcore.events import AllBlocksCleared
from kvcore.feed import (
    RUN_BLOCKS_MAX,
    ContentKind,
    Entry,
    RemovedBlocks,
    StoredBlocks,
    StoredRun,
)
from kvcore.request import Request
from kvcore.spec import KVCacheConfig

if TYPE_CHECKING:
    from kvcore.content_run import ContentRun


class TruthFeed:
    """What happened to a pool's content since the feed was last taken.

    ``medium`` is where the feed says that the content is.
    """

    __slots__ = ("_config", "_kinds", "_medium", "entries")

    def __init__(self, config: KVCacheConfig, medium: str) -> None:
        self._config = config
        self._medium = medium
        # By group and block size.
        self._kinds: dict[tuple[int, int], ContentKind] = {}
        # Public for the pool, which confirms blocks in a loop.
        self.entries: list[Entry] = []

    def take(self) -> list[Entry]:
        """The entries since the last call."""
        if not self.entries:
            return []
        entries, self.entries = self.entries, []
        return entries

    def keep_content(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        positions: Sequence[int],
        *,
        block_size: int,
        group: int,
        hash_ratio: int,
    ) -> None:
        """Remember what to say of ``blocks``, which stand at ``positions`` of a table."""
        start, num_blocks = 0, len(blocks)
        while start < num_blocks:
            first = positions[start]
            stop = start + RUN_BLOCKS_MAX
            if stop > num_blocks:
                stop = num_blocks
            while positions[stop - 1] - first != stop - 1 - start:
                stop -= 1  # a run has no gaps
            run = self.run(request, first, first + stop - start, block_size, group, hash_ratio)
            for position in range(start, stop):
                block = blocks[position]
                block.content = run
                block.content_position = position - start
            start = stop

    def run(
        self,
        request: Request,
        first: int,
        stop: int,
        block_size: int,
        group: int,
        hash_ratio: int = 1,
    ) -> StoredRun:
        """What to say of the blocks ``first`` to ``stop`` of the request's table."""
        hashes = request.block_hashes
        return StoredRun(
            self._kinds.get((group, block_size)) or self._kind(group, block_size),
            hashes[first * hash_ratio - 1] if first else None,
            hashes[(first + 1) * hash_ratio - 1 : stop * hash_ratio : hash_ratio],
            request.token_bytes(first * block_size, stop * block_size),
            (
                [request.extra_keys_of(position, block_size) for position in range(first, stop)]
                if request.has_extra_keys
                else None
            ),
            request.lora_id,
            request.extra.lora_name,
        )

    def keep_imported(
        self,
        blocks: Sequence[KVCacheBlock],
        hashes: Sequence[bytes],
        content: ContentRun,
        first: int,
        *,
        parent_hash: bytes | None,
        block_size: int,
        group: int,
    ) -> None:
        """Remember what a peer said of ``blocks``, those of ``content`` from ``first`` on.

        They have become readable, in this order; RUN_BLOCKS_MAX at most.
        """
        stop = first + len(blocks)
        num_bytes = len(content.tokens) // content.num_blocks
        extra_keys = None if content.extra_keys is None else content.extra_keys[first:stop]
        run = StoredRun(
            self._kinds.get((group, block_size)) or self._kind(group, block_size),
            parent_hash,
            hashes,
            content.tokens[first * num_bytes : stop * num_bytes],
            extra_keys if extra_keys is not None and any(extra_keys) else None,
            content.lora_id,
            content.lora_name,
        )
        for position, block in enumerate(blocks):
            block.content = run
            block.content_position = position
        self.entries.append(StoredBlocks(run, 0, len(blocks)))

    def _kind(self, group: int, block_size: int) -> ContentKind:
        kind = self._kinds.get((group, block_size))
        if kind is None:
            spec = self._config.groups[group].spec
            kind = ContentKind(block_size, group, spec.kind, spec.event_window, self._medium)
            self._kinds[group, block_size] = kind
        return kind

    def removed(self, hashes: list[bytes], group: int, reason: str) -> None:
        """The last readable copies went; the list is the feed's from now on."""
        last = self.entries[-1] if self.entries else None
        if isinstance(last, RemovedBlocks) and last.group == group and last.reason == reason:
            last.hashes += hashes
        else:
            self.entries.append(RemovedBlocks(hashes, group, self._medium, reason))

    def cleared(self, generation: int) -> None:
        """All content went."""
        self.entries.append(AllBlocksCleared(generation))
