"""The blocks of a pool: which are free, which hold content that can be hit.

Order of allocation, eviction and events as in vLLM 0.25.1 (v1/core/block_pool.py)
when one view uses the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvcore.block import FreeKVCacheBlockQueue, KVCacheBlock
from kvcore.errors import InvalidArgument
from kvcore.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvcore.hashing import ExtraKeys
from kvcore.prefix_index import PrefixIndex
from kvcore.request import TOKEN_BYTES, Request
from kvcore.residency import ResidencySampler
from kvcore.spec import KVCacheConfig
from kvcore.view import PoolView

# vLLM's name for the pool's own memory, whatever the device.
MEDIUM = "GPU"


class BlockStates(NamedTuple):
    """Blocks in use, hits nobody uses, held back from other views, and the rest."""

    live: int
    cached: int
    quarantined: int
    free: int


class BlockPool:
    """All blocks, the free queue, and one prefix index a KV cache group.

    ``enable_kv_cache_events`` records vLLM's feed (``take_events``);
    ``publish_events`` the truth feed (``take_truth_events``): content as it becomes
    readable for everybody, and as its last readable copy goes.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        enable_caching: bool = True,
        enable_kv_cache_events: bool = False,
        publish_events: bool = False,
        residency: ResidencySampler | None = None,
    ) -> None:
        self.config = config
        self.enable_caching = enable_caching
        self.enable_kv_cache_events = enable_kv_cache_events
        self.publish_events = publish_events
        self.residency = residency
        self.blocks = [KVCacheBlock(block_id) for block_id in range(config.num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_queue = FreeKVCacheBlockQueue(self.blocks[1:])
        self.indexes = tuple(PrefixIndex() for _ in config.groups)
        self.views: list[PoolView] = []
        # Stands for the views that together hold back a block.
        self.several = PoolView(self)
        # Free blocks held back by some view.
        self.num_held_blocks = 0
        # Blocks in use that were held back when they were hit, or released in steps that
        # may still read them.
        self.num_holds_kept = 0
        # Free blocks with content.
        self.num_cached_blocks = 0
        self.num_evictions = 0
        self._events: list[Event] = []
        self._truth: list[Event] = []

    def open_view(self) -> PoolView:
        """What one more session sees of this pool."""
        view = PoolView(self)
        self.views.append(view)
        return view

    def close_view(self, view: PoolView) -> None:
        """Nothing of ``view`` is in flight any more: complete all its steps."""
        view.begin_step(view.step, max(view.step, view.completed_step))
        self.views.remove(view)

    def num_free_blocks(self, view: PoolView) -> int:
        """Blocks that ``view`` can take."""
        return self.free_queue.num_free_blocks - self.num_held_blocks + view.num_held_blocks

    @property
    def num_live_blocks(self) -> int:
        """Blocks that are in use."""
        return len(self.blocks) - 1 - self.free_queue.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use, from 0 to 1; the null block is not counted."""
        num_blocks = len(self.blocks) - 1
        return 1.0 - self.free_queue.num_free_blocks / num_blocks

    def states(self) -> BlockStates:
        """How many blocks are in which state; the null block is in none."""
        num_free = self.free_queue.num_free_blocks
        held = {block.block_id: block for view in self.views for block in view.held_blocks()}
        num_held_cached = sum(block.block_hash is not None for block in held.values())
        num_cached = self.num_cached_blocks - num_held_cached
        return BlockStates(
            live=self.num_live_blocks,
            cached=num_cached,
            quarantined=len(held),
            free=num_free - num_cached - len(held),
        )

    def take(self, num_blocks: int, view: PoolView) -> list[KVCacheBlock]:
        """Take free blocks, evicting what they hold. The caller knows that they are there."""
        if self.num_held_blocks == view.num_held_blocks:
            blocks = self.free_queue.take_n(num_blocks)
        else:
            blocks = self.free_queue.take_n_for(num_blocks, view)
        residency = self.residency
        for block in blocks:
            if block.held_by is not None:
                view.release(block)
            if block.block_hash is not None:
                self._drop_content(block)
                self.num_cached_blocks -= 1
                self.num_evictions += 1
            elif residency is not None:
                residency.on_evicted(block)
            assert block.ref_cnt == 0
            block.ref_cnt = 1
            if residency is not None:
                residency.on_taken(block)
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Reference blocks that were hit; those that were free leave the queue.

        Steps that a block was held back for may still read it: when it is free again, it
        is held back for them as before.
        """
        residency = self.residency
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_queue.remove(block)
                if block.held_by is not None:
                    self._keep_holds(block)
                if block.block_hash is not None:
                    self.num_cached_blocks -= 1
            block.ref_cnt += 1
            if residency is not None:
                residency.on_touched(block)

    def free(self, ordered_blocks: Iterable[KVCacheBlock], view: PoolView) -> None:
        """Drop a reference of each, first to be evicted first.

        Blocks without a hash go to the front of the queue, in this order, and those
        with one to the back.
        """
        with_hash: list[KVCacheBlock] = []
        without_hash: list[KVCacheBlock] = []
        in_use: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (without_hash if block.block_hash is None else with_hash).append(block)
            else:
                in_use.append(block)
            assert block.ref_cnt >= 0
        if without_hash:
            self.free_queue.prepend_n(without_hash)
        if with_hash:
            self.free_queue.append_n(with_hash)
            self.num_cached_blocks += len(with_hash)
        if view.step > view.completed_step:
            if with_hash or without_hash:
                view.hold(with_hash + without_hash)
            if in_use and len(self.views) > 1:
                self._keep_releases(in_use, view)
        if self.num_holds_kept:
            for block in with_hash + without_hash:
                if block.holds is not None:
                    self._hold_again(block)

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        *,
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        group: int,
        view: PoolView,
    ) -> None:
        """Make ``blocks[num_cached_blocks:num_full_blocks]`` hits of the request's hashes.

        ``blocks`` is the request's whole table. The bytes count as written when the
        view's present step has completed.
        """
        if num_cached_blocks >= num_full_blocks:
            return
        hashes = request.block_hashes
        assert len(hashes) >= num_full_blocks
        index = self.indexes[group]
        new_blocks = []
        for position in range(num_cached_blocks, num_full_blocks):
            block = blocks[position]
            if block.is_null:
                continue
            assert block.block_hash is None
            block.block_hash = block_hash = hashes[position]
            block.group = group
            block.extra = request.extra
            index.insert(block_hash, block)
            new_blocks.append(block)
        if self.publish_events:
            self._keep_content(
                request, blocks, range(num_cached_blocks, num_full_blocks), block_size
            )
        if self.enable_kv_cache_events:
            self._record_stored(request, num_cached_blocks, num_full_blocks, block_size, group)
        if view.step > view.completed_step:
            view.add_pending(new_blocks)
        else:
            for block in new_blocks:
                self.confirm(block)

    def confirm(self, block: KVCacheBlock) -> None:
        """The block's bytes are written: everybody may read it."""
        assert block.block_hash is not None
        if block.content is not None and not self._has_ready(block):
            self._truth.append(self.stored_event(block))
        block.pending_view = None

    def forget(self, block: KVCacheBlock) -> None:
        """Make a block no hit any more; whoever references it keeps it."""
        if block.block_hash is not None:
            self._drop_content(block)
            if block.ref_cnt == 0:
                self.num_cached_blocks -= 1
        elif self.residency is not None:
            self.residency.on_evicted(block)

    def forget_matching(self, matches: Callable[[ExtraKeys], bool]) -> None:
        """Forget every block whose content's extra keys match. Costs time per block."""
        for block in self.blocks:
            if block.extra is not None and matches(block.extra):
                self._drop_content(block, "reset")
                if block.ref_cnt == 0:
                    self.num_cached_blocks -= 1

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget the blocks of these ids. Nothing is done if one is out of range."""
        checked = list(block_ids)
        for block_id in checked:
            if not 0 <= block_id < len(self.blocks):
                raise InvalidArgument(
                    f"block id {block_id} is not in 0..{len(self.blocks) - 1}", field="block_ids"
                )
        for block_id in checked:
            self.forget(self.blocks[block_id])

    def reset(self, generation: int = 0) -> bool:
        """Forget all content, if no block is in use; otherwise do nothing: False."""
        if self.num_live_blocks:
            return False
        self.clear(generation)
        return True

    def clear(self, generation: int) -> None:
        """Forget all content, also that of blocks in use, which keep their references."""
        for index in self.indexes:
            index.entries.clear()
        self.num_cached_blocks = 0
        for block in self.blocks:
            block.block_hash = None
            block.extra = None
            block.content = None
            block.pending_view = None
        if self.residency is not None:
            self.residency.reset()
        if self.enable_kv_cache_events:
            self._events.append(AllBlocksCleared(generation))
        if self.publish_events:
            self._truth.append(AllBlocksCleared(generation))

    def take_events(self) -> list[Event]:
        """vLLM's feed since the last call."""
        events, self._events = self._events, []
        return events

    def take_truth_events(self) -> list[Event]:
        """The truth feed since the last call."""
        if not self._truth:
            return []
        events, self._truth = self._truth, []
        return events

    def stored_event(self, block: KVCacheBlock) -> BlockStored:
        """What the truth feed says when ``block`` becomes the first readable copy."""
        assert block.content is not None
        assert block.block_hash is not None
        parent_hash, tokens, extra_keys, lora_id, lora_name = block.content
        spec = self.config.groups[block.group].spec
        return BlockStored(
            block_hashes=[block.block_hash],
            parent_block_hash=parent_hash,
            token_ids=tokens,
            block_size=spec.block_size,
            lora_id=lora_id,
            lora_name=lora_name,
            extra_keys=[extra_keys],
            group=block.group,
            spec_kind=spec.kind,
            medium=MEDIUM,
        )

    def end_hold(self, block: KVCacheBlock) -> None:
        """One of the several views that hold back ``block`` waits for no step any more."""
        assert block.holds is not None
        self.several.release(block)
        self._set_holds(block, block.holds)

    def _keep_holds(self, block: KVCacheBlock) -> None:
        """A block that is held back is in use again."""
        holder = block.held_by
        assert holder is not None
        if holder is not self.several:
            block.holds = {holder: block.held_step}
        holder.release(block)
        self.num_holds_kept += 1

    def _keep_releases(self, blocks: list[KVCacheBlock], view: PoolView) -> None:
        """Blocks that ``view`` released in its present step, and others still use.

        Whoever releases one last may have completed its steps before that one has.
        """
        for block in blocks:
            if block.holds is None:
                block.holds = {}
                self.num_holds_kept += 1
            block.holds[view] = view.step
        view.await_end(blocks)

    def _hold_again(self, block: KVCacheBlock) -> None:
        """A block that was held back before its last use is free again."""
        holds = block.holds
        assert holds is not None
        self.num_holds_kept -= 1
        if block.held_by is not None:
            holds[block.held_by] = block.held_step
            block.held_by.release(block)
        self._set_holds(block, holds)

    def _set_holds(self, block: KVCacheBlock, holds: dict[PoolView, int]) -> None:
        """Hold back a free block for those of ``holds`` whose steps have not completed."""
        waiting = {view: step for view, step in holds.items() if step > view.completed_step}
        block.holds = None
        if not waiting:
            return
        if len(waiting) > 1:
            block.holds = waiting
            block.held_by = self.several
        else:
            ((block.held_by, block.held_step),) = waiting.items()
        block.held_by.num_held_blocks += 1
        self.num_held_blocks += 1

    def _has_ready(self, block: KVCacheBlock) -> bool:
        """Whether another copy of the block's content is readable for everybody."""
        assert block.block_hash is not None
        entry = self.indexes[block.group].entries.get(block.block_hash)
        if entry is None or entry is block:
            return False  # the usual case, for which no iterator is made
        copies = self.indexes[block.group].copies(block.block_hash)
        return any(copy is not block and copy.pending_view is None for copy in copies)

    def _drop_content(self, block: KVCacheBlock, reason: str = "evicted") -> None:
        block_hash = block.block_hash
        assert block_hash is not None
        if self.residency is not None:
            self.residency.on_evicted(block)
        self.indexes[block.group].remove(block_hash, block)
        if self.enable_kv_cache_events:
            self._events.append(BlockRemoved([block_hash], block.group, MEDIUM, reason))
        if block.pending_view is None and block.content is not None and not self._has_ready(block):
            self._truth.append(BlockRemoved([block_hash], block.group, MEDIUM, reason))
        block.block_hash = None
        block.extra = None
        block.content = None
        block.pending_view = None

    def _keep_content(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        positions: range,
        block_size: int,
    ) -> None:
        """Remember, for events, what the blocks at ``positions`` of a table hold."""
        hashes = request.block_hashes
        lora_id, lora_name = request.lora_id, request.extra.lora_name
        block_bytes = block_size * TOKEN_BYTES
        with memoryview(request.tokens) as tokens:
            for position in positions:
                if blocks[position].is_null:
                    continue
                blocks[position].content = (
                    hashes[position - 1] if position else None,
                    tokens[position * block_bytes : (position + 1) * block_bytes].tobytes(),
                    request.extra_keys_of(position, block_size) if request.has_extra_keys else None,
                    lora_id,
                    lora_name,
                )

    def _record_stored(
        self, request: Request, first: int, stop: int, block_size: int, group: int
    ) -> None:
        hashes = request.block_hashes
        self._events.append(
            BlockStored(
                block_hashes=list(hashes[first:stop]),
                parent_block_hash=hashes[first - 1] if first else None,
                token_ids=request.token_bytes(first * block_size, stop * block_size),
                block_size=block_size,
                lora_id=request.lora_id,
                lora_name=request.extra.lora_name,
                extra_keys=[
                    request.extra_keys_of(position, block_size) for position in range(first, stop)
                ],
                group=group,
                spec_kind=self.config.groups[group].spec.kind,
                medium=MEDIUM,
            )
        )
