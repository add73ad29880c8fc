"""The blocks of a pool: which are free, which hold content that can be hit.

Order of allocation, eviction and events as in vLLM 0.25.1 (v1/core/block_pool.py)
when one view uses the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvcore.block import FreeKVCacheBlockQueue, KVCacheBlock, NullBlock
from kvcore.block_sums import BlockSums
from kvcore.errors import InvalidArgument
from kvcore.events import MEDIUM, BlockRemoved
from kvcore.feed import StoredBlocks
from kvcore.hashing import ExtraKeys
from kvcore.holds import Holds
from kvcore.partial_block import PartialHashes
from kvcore.pins import Pins
from kvcore.prefix_index import PrefixIndex
from kvcore.request import NO_EXTRA_KEYS, Request
from kvcore.residency import ResidencySampler
from kvcore.spec import KVCacheConfig
from kvcore.truth_feed import TruthFeed
from kvcore.view import PoolView
from kvcore.vllm_feed import VllmFeed


class BlockStates(NamedTuple):
    """Blocks in use, hits nobody uses, what nobody uses but transfers keep or fill, held
    back from other views, and the rest.
    """

    live: int
    cached: int
    pinned: int
    in_transfer: int
    quarantined: int
    free: int


class BlockPool:
    """All blocks, the free queue, and one prefix index a KV cache group.

    ``enable_kv_cache_events`` records ``vllm_feed``, ``publish_events`` the
    ``truth_feed``. ``medium`` is where the truth feed says that content is; vLLM's feed
    has vLLM's word.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        enable_kv_cache_events: bool = False,
        publish_events: bool = False,
        medium: str = MEDIUM,
        residency: ResidencySampler | None = None,
    ) -> None:
        self.config = config
        self.enable_kv_cache_events = enable_kv_cache_events
        self.publish_events = publish_events
        self.residency = residency
        self.null_block: KVCacheBlock = NullBlock(0)
        self.blocks: list[KVCacheBlock] = [self.null_block]
        self.blocks += [KVCacheBlock(block_id) for block_id in range(1, config.num_blocks)]
        self.free_queue = FreeKVCacheBlockQueue(self.blocks[1:])
        self.sink_blocks = tuple(
            self._set_aside(group.manager_spec.num_sink_blocks) for group in config.groups
        )
        self.num_sink_blocks = sum(map(len, self.sink_blocks))
        self.indexes = tuple(PrefixIndex() for _ in config.groups)
        self.partial = PartialHashes(self)
        # By block id, of those whose content has any: the extra keys of who registered it.
        self.extras: dict[int, ExtraKeys] = {}
        self.sums = BlockSums(config.num_blocks)
        self.views: list[PoolView] = []
        # Free blocks held back by some view.
        self.num_held_blocks = 0
        # Free blocks with content.
        self.num_cached_blocks = 0
        self.num_evictions = 0
        self.holds = Holds(self)
        self.pins = Pins(self)
        self.vllm_feed = VllmFeed(config)
        self.truth_feed = TruthFeed(config, medium)

    def _set_aside(self, num_blocks: int) -> list[KVCacheBlock]:
        blocks = self.free_queue.take_n(num_blocks)
        for block in blocks:
            block.ref_cnt = 1
        return blocks

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
    def num_used_blocks(self) -> int:
        """Blocks that are in use or kept by transfers; sinks, which always are, aside."""
        return len(self.blocks) - 1 - self.free_queue.num_free_blocks - self.num_sink_blocks

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
        num_in_transfer = len(self.pins.idle & self.pins.filling)
        return BlockStates(
            live=self.num_used_blocks + self.num_sink_blocks - len(self.pins.idle),
            cached=num_cached,
            pinned=len(self.pins.idle) - num_in_transfer,
            in_transfer=num_in_transfer,
            quarantined=len(held),
            free=num_free - num_cached - len(held),
        )

    def take(self, num_blocks: int, view: PoolView) -> list[KVCacheBlock]:
        """Take free blocks, evicting what they hold. The caller knows that they are there."""
        blocks = self.hand_out(num_blocks, view)
        self.evict(blocks)
        return blocks

    def hand_out(self, num_blocks: int, view: PoolView) -> list[KVCacheBlock]:
        """As take; what the blocks hold is a hit until ``evict``, which must come next of all
        but taking more.
        """
        if self.num_held_blocks == view.num_held_blocks:
            blocks = self.free_queue.take_n(num_blocks)
        else:
            blocks = self.free_queue.take_n_for(num_blocks, view)
        for block in blocks:
            if block.held_by is not None:
                view.take_back(block)
            assert block.ref_cnt == 0
            block.ref_cnt = 1
        return blocks

    def evict(self, blocks: Sequence[KVCacheBlock]) -> None:
        """The rest of ``take``, of blocks that were handed out, in that order."""
        num_evicted = self._drop_content(blocks)
        self.num_cached_blocks -= num_evicted
        self.num_evictions += num_evicted
        if self.residency is not None:
            self.residency.on_taken(blocks)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Reference blocks that were hit; those that were free leave the queue.

        Steps that a block was held back for may still read it: when it is free again, it
        is held back for them as before.
        """
        residency = self.residency
        if self.pins.counts:
            blocks = self.pins.touch_idle(blocks)
        for block in blocks:
            if block.ref_cnt == 0:
                if block.is_null:
                    continue
                self.free_queue.remove(block)
                if block.held_by is not None:
                    self.holds.keep(block)
                if block.block_hash is not None:
                    self.num_cached_blocks -= 1
            block.ref_cnt += 1
            if residency is not None and block.block_id in residency.births:
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
        if self.pins.counts:
            with_hash = self.pins.keep(with_hash, view)
            without_hash = self.pins.keep(without_hash, view)
        if without_hash:
            self.free_queue.prepend_n(without_hash)
        if with_hash:
            self.free_queue.append_n(with_hash)
            self.num_cached_blocks += len(with_hash)
        if view.last_use_step > view.completed_step:
            if with_hash or without_hash:
                view.hold(with_hash + without_hash)
            if in_use and len(self.views) > 1:
                self.holds.keep_released(in_use, view)
        if self.holds.num_kept:
            for block in with_hash + without_hash:
                if block.block_id in self.holds.by_block:
                    self.holds.resume(block)

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        *,
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        group: int,
        view: PoolView,
        hash_ratio: int = 1,
        block_mask: Sequence[bool] | None = None,
    ) -> None:
        """Make ``blocks[num_cached_blocks:num_full_blocks]`` hits of the request's hashes.

        ``blocks`` is the request's whole table. ``hash_ratio``: how many of the
        request's hashes a block spans; the last one is its own. Null blocks are left
        out, and blocks where ``block_mask`` (one a new block) is False. The bytes count
        as written when the view's present step has completed.
        """
        if num_cached_blocks >= num_full_blocks:
            return
        stop = num_full_blocks * hash_ratio
        assert len(request.block_hashes) >= stop
        hashes = request.block_hashes[(num_cached_blocks + 1) * hash_ratio - 1 : stop : hash_ratio]
        index = self.indexes[group]
        entries = index.entries
        new_blocks = blocks[num_cached_blocks:num_full_blocks]
        positions: Sequence[int] = range(num_cached_blocks, num_full_blocks)
        if block_mask is not None or self.null_block in new_blocks:
            kept = [
                offset
                for offset, block in enumerate(new_blocks)
                if not block.is_null and (block_mask is None or block_mask[offset])
            ]
            new_blocks = [new_blocks[offset] for offset in kept]
            hashes = [hashes[offset] for offset in kept]
            positions = [num_cached_blocks + offset for offset in kept]
        for block, block_hash in zip(new_blocks, hashes, strict=True):
            if block.block_hash is not None:
                assert self.partial.num_tokens(block) is not None
                self._drop_content((block,))  # it has grown beyond what its hash says
            block.block_hash = block_hash
            block.group = group
            # The first copy is the usual case, which costs no call.
            if entries.setdefault(block_hash, block) is not block:
                index.insert(block_hash, block)
        if request.has_extra_keys:
            self.extras.update((block.block_id, request.extra) for block in new_blocks)
        if self.publish_events:
            self.truth_feed.keep_content(
                request,
                new_blocks,
                positions,
                block_size=block_size,
                group=group,
                hash_ratio=hash_ratio,
            )
        if self.enable_kv_cache_events:
            self.vllm_feed.stored(
                request,
                positions,
                span=range(num_cached_blocks, num_full_blocks),
                block_size=block_size,
                group=group,
                hash_ratio=hash_ratio,
            )
        if view.step > view.completed_step:
            view.add_pending(new_blocks)
        elif self.publish_events:
            self.confirm(new_blocks)

    def cache_full_block(
        self,
        request: Request,
        block: KVCacheBlock,
        position: int,
        block_size: int,
        group: int,
        view: PoolView,
        hash_ratio: int,
    ) -> None:
        """As cache_full_blocks, of one block, not null, without a hash: a decode step's.

        It says the same twice, because by way of lists and runs, however they were put
        together, one block took 1.4 to 1.8 times as long.
        """
        assert len(request.block_hashes) >= (position + 1) * hash_ratio
        block_hash = request.block_hashes[(position + 1) * hash_ratio - 1]
        block.block_hash = block_hash
        block.group = group
        index = self.indexes[group]
        if index.entries.setdefault(block_hash, block) is not block:
            index.insert(block_hash, block)
        if request.has_extra_keys:
            self.extras[block.block_id] = request.extra
        if self.publish_events:
            block.content = self.truth_feed.run(
                request, position, position + 1, block_size, group, hash_ratio
            )
            block.content_position = 0
        if self.enable_kv_cache_events:
            span = range(position, position + 1)
            self.vllm_feed.stored(
                request,
                span,
                span=span,
                block_size=block_size,
                group=group,
                hash_ratio=hash_ratio,
            )
        if view.step > view.completed_step:
            view.add_pending([block])
        elif self.publish_events:
            self.confirm([block])

    def confirm(self, blocks: Iterable[KVCacheBlock]) -> None:
        """The blocks' bytes are written: everybody may read them."""
        indexes = self.indexes
        aliases_by_id = self.partial.aliases_by_id
        run, start, stop = None, 0, 0
        for block in blocks:
            content = block.content
            if content is not None:
                block_hash = block.block_hash
                assert block_hash is not None
                # Being the first copy is the usual case, which costs no call.
                index = indexes[block.group]
                is_first = index.entries.get(block_hash) is block
                if is_first or not index.is_ready_elsewhere(block_hash, block):
                    position = block.content_position
                    if content is not run or position != stop:
                        if run is not None:
                            self.truth_feed.entries.append(StoredBlocks(run, start, stop))
                        run, start = content, position
                    stop = position + 1
            if aliases_by_id and block.block_id in aliases_by_id:
                if run is not None:
                    self.truth_feed.entries.append(StoredBlocks(run, start, stop))
                    run = None
                self.partial.confirm_aliases(block)
            block.pending = None
        if run is not None:
            self.truth_feed.entries.append(StoredBlocks(run, start, stop))

    def forget(self, block: KVCacheBlock) -> None:
        """Make a block no hit any more; whoever references it keeps it."""
        if self._drop_content((block,)):
            self.num_cached_blocks -= self.is_free(block)

    def is_free(self, block: KVCacheBlock) -> bool:
        """Whether the block is in the free queue; of the null block no answer is right."""
        return block.ref_cnt == 0 and block.block_id not in self.pins.counts

    def extra_of(self, block: KVCacheBlock) -> ExtraKeys:
        """The extra keys of whoever registered the block's content."""
        return self.extras.get(block.block_id, NO_EXTRA_KEYS)

    def forget_matching(self, matches: Callable[[ExtraKeys], bool]) -> int:
        """Forget every block whose content's extra keys match; how many. Costs time per block."""
        num_forgotten = 0
        for block in self.blocks:
            if block.block_hash is not None and matches(self.extra_of(block)):
                self._drop_content((block,), "reset")
                self.num_cached_blocks -= self.is_free(block)
                num_forgotten += 1
        return num_forgotten

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
        if self.num_used_blocks:
            return False
        self.clear(generation)
        return True

    def clear(self, generation: int) -> int:
        """Forget all content, also that of blocks in use, which keep their references.

        Answers how many blocks had any.
        """
        num_cleared = 0
        for index in self.indexes:
            index.entries.clear()
        self.partial.clear()
        self.extras.clear()
        self.sums.clear()
        self.num_cached_blocks = 0
        for block in self.blocks:
            num_cleared += block.block_hash is not None
            block.block_hash = None
            block.content = None
            block.pending = None
        if self.residency is not None:
            self.residency.reset()
        if self.enable_kv_cache_events:
            self.vllm_feed.cleared(generation)
        if self.publish_events:
            self.truth_feed.cleared(generation)
        return num_cleared

    def _drop_content(self, blocks: Iterable[KVCacheBlock], reason: str = "evicted") -> int:
        """Make ``blocks`` no hits any more, and tell so; how many were."""
        indexes, partial = self.indexes, self.partial
        births = {} if self.residency is None else self.residency.births
        # What few pools have is looked for once.
        is_plain = not (
            births
            or self.enable_kv_cache_events
            or partial.num_tokens_by_id
            or partial.aliases_by_id
            or self.extras
            or self.sums.by_id
        )
        num_dropped = 0
        # Hashes of one group whose last readable copies went, to be told together.
        gone: list[bytes] = []
        gone_group = 0
        for block in blocks:
            block_hash = block.block_hash
            if births and block.block_id in births:
                assert self.residency is not None
                self.residency.on_evicted(block)
            if block_hash is None:
                continue
            num_dropped += 1
            index = indexes[block.group]
            entries = index.entries
            copies_left = entries[block_hash] is not block
            if copies_left:
                index.remove(block_hash, block)
            else:
                del entries[block_hash]  # the usual case, without a call
            was_readable = block.content is not None and block.pending is None
            if was_readable and not (copies_left and index.is_ready_elsewhere(block_hash, block)):
                if block.group != gone_group:
                    if gone:
                        self.truth_feed.removed(gone, gone_group, reason)
                    gone, gone_group = [], block.group
                gone.append(block_hash)
            if not is_plain:
                if gone:
                    self.truth_feed.removed(gone, gone_group, reason)
                    gone = []
                self._drop_rest(block, reason, was_readable=was_readable)
            block.block_hash = None
            block.content = None
            block.pending = None
        if gone:
            self.truth_feed.removed(gone, gone_group, reason)
        return num_dropped

    def _drop_rest(self, block: KVCacheBlock, reason: str, *, was_readable: bool) -> None:
        """Of _drop_content, what few pools have: vLLM's feed, partial hashes, extra keys, sums."""
        block_hash = block.block_hash
        assert block_hash is not None
        if self.enable_kv_cache_events:
            self.vllm_feed.events.append(BlockRemoved([block_hash], block.group, MEDIUM, reason))
        if self.partial.num_tokens_by_id or self.partial.aliases_by_id:
            self.partial.drop(block, was_readable=was_readable, reason=reason)
        self.extras.pop(block.block_id, None)
        if self.sums.by_id:
            self.sums.by_id[block.block_id] = 0
