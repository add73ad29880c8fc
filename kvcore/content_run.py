"""What is known, besides their bytes, of blocks that follow each other: to and from peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcore.block import KVCacheBlock

if TYPE_CHECKING:
    from kvcore.block_pool import BlockPool
    from kvcore.feed import StoredRun


class ContentRun(NamedTuple):
    """Of ``num_blocks`` blocks, each but the first the child of the one before it.

    ``tokens`` are little-endian uint32, of all of them; empty: nothing is known. ``extra_keys``,
    one a block; None: no block has any.
    """

    num_blocks: int
    parent_hash: bytes | None
    tokens: bytes
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None


def content_runs(
    pool: BlockPool, blocks: Sequence[KVCacheBlock | None], hashes: Sequence[bytes]
) -> Iterator[ContentRun]:
    """Of those of ``blocks`` that are not None, each found under its one of ``hashes``."""
    stretch: _Stretch | None = None
    run: StoredRun | None = None
    # The position of run that would continue the stretch, and whose child would.
    following, last_hash = -1, b""
    extras, content = pool.extras, pool.partial.content
    for block, block_hash in zip(blocks, hashes, strict=True):
        if block is None:
            continue
        # The usual case costs no call.
        if block.block_hash == block_hash:
            found, position = block.content, block.content_position
        else:
            found, position = content(block, block_hash)
        extra = extras.get(block.block_id) if extras else None
        salt = None if extra is None else extra.cache_salt
        if stretch is not None and salt == stretch.cache_salt:
            if found is run and position == following:
                following += 1
                last_hash = block_hash
                continue
            stretch.add(run, following)
            if stretch.continues(found, position, last_hash):
                stretch.start = position
                run, following, last_hash = found, position + 1, block_hash
                continue
            yield stretch.content()
        elif stretch is not None:
            stretch.add(run, following)
            yield stretch.content()
        stretch = _Stretch(found, position, salt)
        run, following, last_hash = found, position + 1, block_hash
    if stretch is not None:
        stretch.add(run, following)
        yield stretch.content()


class _Stretch:
    """A ContentRun while it is put together, out of parts of StoredRuns."""

    __slots__ = ("_parts", "cache_salt", "first", "num_blocks", "position", "start")

    def __init__(self, first: StoredRun | None, position: int, cache_salt: str | None) -> None:
        self.first = first
        self.position = self.start = position
        self.cache_salt = cache_salt
        self.num_blocks = 0
        self._parts: list[tuple[StoredRun, int, int]] = []

    def add(self, run: StoredRun | None, stop: int) -> None:
        """The blocks of ``run`` from where it was begun."""
        self.num_blocks += stop - self.start
        if run is not None:
            self._parts.append((run, self.start, stop))

    def continues(self, run: StoredRun | None, position: int, last_hash: bytes) -> bool:
        """Whether the block at ``position`` of ``run`` is the next child, and of the same LoRA."""
        first = self.first
        if run is None or first is None:
            return run is first  # of both nothing is known
        return run.parent_of(position) == last_hash and (run.lora_id, run.lora_name) == (
            first.lora_id,
            first.lora_name,
        )

    def content(self) -> ContentRun:
        first = self.first
        if first is None:
            return ContentRun(self.num_blocks, None, b"", cache_salt=self.cache_salt)
        extra_keys: list[tuple[Any, ...] | None] | None = None
        if any(run.extra_keys is not None for run, _, _ in self._parts):
            extra_keys = []
            for run, start, stop in self._parts:
                extra_keys += (run.extra_keys or [None] * stop)[start:stop]
        return ContentRun(
            self.num_blocks,
            first.parent_of(self.position),
            b"".join([run.tokens_of(start, stop) for run, start, stop in self._parts]),
            extra_keys,
            first.lora_id,
            first.lora_name,
            self.cache_salt,
        )
