"""Hashes of a block beyond, or short of, that of its full content.

A coarse group's block can be named at any finer hash boundary inside it. Such a name
is the block's only hash until the block is full, or an alias beside it. Semantics of
the partial entries in vLLM 0.25.1's v1/core/block_pool.py. Nothing here makes such
names by itself, as nothing in vLLM's v1/core does: ``cache_partial_block`` is for
connectors that cache parts of blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.block import KVCacheBlock
from kvcore.errors import InvalidArgument
from kvcore.events import MEDIUM, BlockRemoved, BlockStored
from kvcore.feed import StoredBlocks, StoredRun
from kvcore.request import Request
from kvcore.view import PoolView

if TYPE_CHECKING:
    from kvcore.block_pool import BlockPool


class PartialHashes:
    """Which blocks of a pool have a partial hash, and which have several."""

    __slots__ = ("_pool", "aliases_by_id", "num_tokens_by_id")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        # Both are public, so that those who look at every block see at once that
        # there are none. Of blocks whose block_hash is partial: the tokens it covers.
        self.num_tokens_by_id: dict[int, int] = {}
        # Further hashes of a block, and what events say of them.
        self.aliases_by_id: dict[int, dict[bytes, StoredRun | None]] = {}

    def num_tokens(self, block: KVCacheBlock) -> int | None:
        """What the block's partial ``block_hash`` covers; None if that is not partial."""
        return self.num_tokens_by_id.get(block.block_id)

    def aliases(self, block: KVCacheBlock) -> dict[bytes, StoredRun | None]:
        """The block's further hashes, oldest first."""
        return self.aliases_by_id.get(block.block_id, {})

    def stored_event(self, block: KVCacheBlock, block_hash: bytes) -> BlockStored | None:
        """What the truth feed says of a block under one of its hashes, full, partial or alias.

        None if events are not published.
        """
        run, position = self.content(block, block_hash)
        return None if run is None else run.event(position)

    def content(self, block: KVCacheBlock, block_hash: bytes) -> tuple[StoredRun | None, int]:
        """Where that is kept: a run, and the block's position in it."""
        if block.block_hash == block_hash:
            return block.content, block.content_position
        return self.aliases_by_id[block.block_id][block_hash], 0

    def cache_partial_block(
        self,
        request: Request,
        block: KVCacheBlock,
        num_tokens: int,
        *,
        block_size: int,
        hash_block_size: int,
        group: int,
        view: PoolView,
    ) -> bytes | None:
        """Make ``block`` a hit of the request's first ``num_tokens`` tokens as well.

        They end inside the block, at a boundary of ``hash_block_size``. A longer
        partial hash replaces a shorter one, and the full block's hash replaces it in
        turn; a full block gets an alias. Answers the hash, or None for the null block.
        """
        if block.is_null:
            return None
        block_hash = _partial_hash(
            request, num_tokens, block_size=block_size, hash_block_size=hash_block_size
        )
        pool = self._pool
        index = pool.indexes[group]
        if index.holds(block_hash, block):
            return block_hash
        covered = self.num_tokens(block)
        if covered is not None and covered < num_tokens:
            pool.forget(block)
        position = num_tokens // hash_block_size - 1
        span = range(position, position + 1)
        content = None
        if pool.publish_events:
            content = pool.truth_feed.run(request, position, position + 1, hash_block_size, group)
        if block.block_hash is None:
            pool.num_cached_blocks += pool.is_free(block)
            block.block_hash = block_hash
            block.group = group
            if request.has_extra_keys:
                pool.extras[block.block_id] = request.extra
            block.content = content
            block.content_position = 0
            self.num_tokens_by_id[block.block_id] = num_tokens
            is_pending = view.step > view.completed_step
        else:
            self.aliases_by_id.setdefault(block.block_id, {})[block_hash] = content
            is_pending = block.pending is not None
        index.insert(block_hash, block)
        if pool.enable_kv_cache_events:
            pool.vllm_feed.stored(request, span, span=span, block_size=hash_block_size, group=group)
        if not is_pending:
            self._confirm(block, block_hash, content)
        elif block.pending is None:
            view.add_pending([block])
        return block_hash

    def confirm_aliases(self, block: KVCacheBlock) -> None:
        """The block's bytes are written: everybody may read it under its further hashes."""
        for block_hash, content in self.aliases(block).items():
            self._confirm(block, block_hash, content)

    def drop(self, block: KVCacheBlock, *, was_readable: bool, reason: str) -> None:
        """The block's ``block_hash`` is no hit any more, and so are its further ones."""
        pool = self._pool
        index = pool.indexes[block.group]
        for block_hash in self.aliases(block):
            index.remove(block_hash, block)
            if pool.enable_kv_cache_events:
                removed = BlockRemoved([block_hash], block.group, MEDIUM, reason)
                pool.vllm_feed.events.append(removed)
            if was_readable and not index.is_ready_elsewhere(block_hash, block):
                pool.truth_feed.removed([block_hash], block.group, reason)
        self.num_tokens_by_id.pop(block.block_id, None)
        self.aliases_by_id.pop(block.block_id, None)

    def clear(self) -> None:
        """No block has one."""
        self.num_tokens_by_id.clear()
        self.aliases_by_id.clear()

    def _confirm(self, block: KVCacheBlock, block_hash: bytes, content: StoredRun | None) -> None:
        """Tell the truth feed that content can be read, unless it could already."""
        index = self._pool.indexes[block.group]
        if content is not None and not index.is_ready_elsewhere(block_hash, block):
            self._pool.truth_feed.entries.append(StoredBlocks(content, 0, 1))


def _partial_hash(
    request: Request, num_tokens: int, *, block_size: int, hash_block_size: int
) -> bytes:
    """The request's hash of its first ``num_tokens`` tokens, which fill no whole block.

    InvalidArgument if the request has no such hash.
    """
    if num_tokens <= 0 or num_tokens % hash_block_size or num_tokens % block_size == 0:
        raise InvalidArgument(
            f"num_tokens {num_tokens} must be a multiple of the hash block size "
            f"{hash_block_size} that ends inside a block of {block_size}",
            field="num_tokens",
        )
    num_hashes = num_tokens // hash_block_size
    if num_hashes > len(request.block_hashes):
        raise InvalidArgument(
            f"num_tokens {num_tokens}: the request has hashes of "
            f"{len(request.block_hashes) * hash_block_size}",
            field="num_tokens",
        )
    return request.block_hashes[num_hashes - 1]
