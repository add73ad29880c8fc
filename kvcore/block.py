"""One block of the pool, and the queue of those that are free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from kvcore.feed import StoredRun
    from kvcore.view import Pending, PoolView


class KVCacheBlock:
    """Bookkeeping of one block. The bytes lie in the pool's memory at ``block_id``.

    There are millions, so what few blocks have is kept beside them: extra keys by
    BlockPool, what several views wait for by Holds.
    """

    __slots__ = (
        "block_hash",
        "block_id",
        "content",
        "content_position",
        "group",
        "held_by",
        "held_step",
        "next_free",
        "pending",
        "prev_free",
        "ref_cnt",
    )

    is_null: ClassVar[bool] = False

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        # How many transfers keep the block, apart from those that reference it.
        self.block_hash: bytes | None = None
        # The KV cache group that block_hash belongs to.
        self.group = 0
        # Set while block_hash is registered but its bytes are not known to be written.
        self.pending: Pending | None = None
        # Set while the block is free but other views must not take it yet; the pool's
        # ``holds.several`` if more than one view holds it back.
        self.held_by: PoolView | None = None
        self.held_step = 0
        # What events say of the block, and where in it; None unless events are published.
        self.content: StoredRun | None = None
        self.content_position = 0
        # Links of the free queue; both None while the block is not in it.
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    @property
    def pending_view(self) -> PoolView | None:
        """The view whose step writes the bytes, until they are known to be written."""
        return None if self.pending is None else self.pending.view

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt})"


class NullBlock(KVCacheBlock):
    """Stands in tables where nothing is looked at; never counted, freed or cached."""

    __slots__ = ()

    is_null = True


class FreeKVCacheBlockQueue:
    """The free blocks in the order in which they are taken: a doubly linked list.

    Order rules as in vLLM's FreeKVCacheBlockQueue (v1/core/kv_cache_utils.py): first
    by block id; blocks freed without a hash go to the front, those with one to the
    back; any block can be removed from the middle in O(1).
    """

    __slots__ = ("_head", "_tail", "num_free_blocks")

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self.num_free_blocks = 0
        self.append_n(blocks)

    def take_n(self, num_blocks: int) -> list[KVCacheBlock]:
        """Remove and return the first ``num_blocks`` blocks."""
        assert num_blocks <= self.num_free_blocks
        taken: list[KVCacheBlock] = []
        append = taken.append
        block = self._head.next_free
        for _ in range(num_blocks):
            assert block is not None
            append(block)
            following = block.next_free
            block.prev_free = block.next_free = None
            block = following
        assert block is not None
        self._head.next_free = block
        block.prev_free = self._head
        self.num_free_blocks -= num_blocks
        return taken

    def take_n_for(self, num_blocks: int, view: PoolView) -> list[KVCacheBlock]:
        """As take_n, passing over blocks that are held back from ``view``."""
        taken: list[KVCacheBlock] = []
        block = self._head.next_free
        while len(taken) < num_blocks:
            assert block is not None
            assert block is not self._tail
            following = block.next_free
            if block.held_by is None or block.held_by is view:
                self.remove(block)
                taken.append(block)
            block = following
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Take ``block`` out, wherever it stands."""
        before, after = block.prev_free, block.next_free
        assert before is not None
        assert after is not None
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def remove_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Take all of ``blocks`` out, wherever they stand; a call a block costs as much again."""
        for block in blocks:
            before, after = block.prev_free, block.next_free
            assert before is not None
            assert after is not None
            before.next_free = after
            after.prev_free = before
            block.prev_free = block.next_free = None
        self.num_free_blocks -= len(blocks)

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put ``blocks`` at the back, in their order."""
        last = self._tail.prev_free
        assert last is not None
        for block in blocks:
            block.prev_free = last
            last.next_free = block
            last = block
        last.next_free = self._tail
        self._tail.prev_free = last
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put ``blocks`` at the front, in their order."""
        first = self._head.next_free
        assert first is not None
        last = self._head
        for block in blocks:
            block.prev_free = last
            last.next_free = block
            last = block
        last.next_free = first
        first.prev_free = last
        self.num_free_blocks += len(blocks)

    def block_ids(self) -> list[int]:
        """Every free block's id, first to be taken first. Costs time per free block."""
        ids = []
        block = self._head.next_free
        while block is not None and block is not self._tail:
            ids.append(block.block_id)
            block = block.next_free
        return ids
