"""The blocks of a pool: which are free, which hold content that can be hit.

Order of allocation, eviction and events as in vLLM 0.25.1 (v1/core/block_pool.py)
when one view uses the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvcore.block import FreeKVCacheBlockQueue, KVCacheBlock
from kvcore.errors import InvalidArgument
from kvcore.events import MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvcore.feed import RUN_BLOCKS_MAX, Entry, RemovedBlocks, StoredBlocks, StoredRun, events_of
from kvcore.hashing import ExtraKeys
from kvcore.partial_block import PartialHashes
from kvcore.prefix_index import PrefixIndex
from kvcore.request import Request
from kvcore.residency import ResidencySampler
from kvcore.spec import KVCacheConfig
from kvcore.view import PoolView


class BlockStates(NamedTuple):
    """Blocks in use, hits nobody uses, held back from other views, and the rest."""

    live: int
    cached: int
    quarantined: int
    free: int


class BlockPool:
    """All blocks, the free queue, and one prefix index a KV cache group.

    ``enable_kv_cache_events`` records vLLM's feed (``take_events``);
    ``publish_events`` the truth feed (``take_feed``): content as it becomes readable
    for everybody, and as its last readable copy goes. ``medium`` is where the truth feed
    says that it is; vLLM's feed has vLLM's word.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        enable_caching: bool = True,
        enable_kv_cache_events: bool = False,
        publish_events: bool = False,
        medium: str = MEDIUM,
        residency: ResidencySampler | None = None,
    ) -> None:
        self.config = config
        self.enable_caching = enable_caching
        self.enable_kv_cache_events = enable_kv_cache_events
        self.publish_events = publish_events
        self.medium = medium
        self.residency = residency
        self.blocks = [KVCacheBlock(block_id) for block_id in range(config.num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_queue = FreeKVCacheBlockQueue(self.blocks[1:])
        self.sink_blocks = tuple(
            self._set_aside(group.manager_spec.num_sink_blocks) for group in config.groups
        )
        self.num_sink_blocks = sum(map(len, self.sink_blocks))
        self.indexes = tuple(PrefixIndex() for _ in config.groups)
        self.partial = PartialHashes()
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
        self._feed: list[Entry] = []

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
    def num_live_blocks(self) -> int:
        """Blocks that are in use; sinks, which always are, aside."""
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
        return BlockStates(
            live=self.num_live_blocks + self.num_sink_blocks,
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
            elif residency is not None and block.block_id in residency.births:
                residency.on_evicted(block)
            assert block.ref_cnt == 0
            block.ref_cnt = 1
        if residency is not None:
            residency.on_taken(blocks)
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Reference blocks that were hit; those that were free leave the queue.

        Steps that a block was held back for may still read it: when it is free again, it
        is held back for them as before.
        """
        residency = self.residency
        for block in blocks:
            if block.ref_cnt == 0:
                if block.is_null:
                    continue
                self.free_queue.remove(block)
                if block.held_by is not None:
                    self._keep_holds(block)
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
        if without_hash:
            self.free_queue.prepend_n(without_hash)
        if with_hash:
            self.free_queue.append_n(with_hash)
            self.num_cached_blocks += len(with_hash)
        if view.last_use_step > view.completed_step:
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
                self._drop_content(block)  # it has grown beyond what its hash says
            block.block_hash = block_hash
            block.group = group
            block.extra = request.extra
            # The first copy is the usual case, which costs no call.
            if entries.setdefault(block_hash, block) is not block:
                index.insert(block_hash, block)
        if self.publish_events:
            self._keep_content(request, new_blocks, positions, block_size, group, hash_ratio)
        if self.enable_kv_cache_events:
            self._record_stored(
                request,
                range(num_cached_blocks, num_full_blocks),
                positions,
                block_size,
                group,
                hash_ratio,
            )
        if view.step > view.completed_step:
            view.add_pending(new_blocks)
        elif self.publish_events:
            self.confirm(new_blocks)

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
        block_hash = request.block_hashes[num_hashes - 1]
        index = self.indexes[group]
        if index.holds(block_hash, block):
            return block_hash
        if block.block_hash is None:
            self.num_cached_blocks += block.ref_cnt == 0
        covered = self.partial.num_tokens(block)
        if covered is not None and covered < num_tokens:
            self._drop_content(block)
        content = None
        if self.publish_events:
            last = num_hashes - 1
            content = self._stored_run(request, last, num_hashes, hash_block_size, group, 1)
        if block.block_hash is None:
            block.block_hash = block_hash
            block.group = group
            block.extra = request.extra
            block.content = content
            block.content_position = 0
            self.partial.set_primary(block, num_tokens)
            is_pending = view.step > view.completed_step
        else:
            self.partial.add_alias(block, block_hash, content)
            is_pending = block.pending_view is not None
        index.insert(block_hash, block)
        if self.enable_kv_cache_events:
            positions = range(num_hashes - 1, num_hashes)
            self._record_stored(request, positions, positions, hash_block_size, group, 1)
        if not is_pending:
            self._announce(block, block_hash, content)
        elif block.pending_view is None:
            view.add_pending([block])
        return block_hash

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
                is_first = indexes[block.group].entries.get(block_hash) is block
                if is_first or not self._has_ready(block, block_hash):
                    position = block.content_position
                    if content is not run or position != stop:
                        if run is not None:
                            self._feed.append(StoredBlocks(run, start, stop))
                        run, start = content, position
                    stop = position + 1
            if aliases_by_id and block.block_id in aliases_by_id:
                if run is not None:
                    self._feed.append(StoredBlocks(run, start, stop))
                    run = None
                for alias, alias_content in aliases_by_id[block.block_id].items():
                    self._announce(block, alias, alias_content)
            block.pending_view = None
        if run is not None:
            self._feed.append(StoredBlocks(run, start, stop))

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
        self.partial.clear()
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
            self._feed.append(AllBlocksCleared(generation))

    def take_events(self) -> list[Event]:
        """vLLM's feed since the last call."""
        events, self._events = self._events, []
        return events

    def take_feed(self) -> list[Entry]:
        """The truth feed since the last call."""
        if not self._feed:
            return []
        entries, self._feed = self._feed, []
        return entries

    def take_truth_events(self) -> list[Event]:
        """As take_feed, an event a block."""
        return list(events_of(self.take_feed()))

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
        """Blocks that ``view`` released while a step of it may use them, and others still do.

        Whoever releases one last may have completed its steps before that one has.
        """
        for block in blocks:
            if block.holds is None:
                block.holds = {}
                self.num_holds_kept += 1
            block.holds[view] = view.last_use_step
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

    def stored_event(self, block: KVCacheBlock, block_hash: bytes) -> BlockStored | None:
        """What the truth feed says of the block under one of its hashes.

        None if events are not published.
        """
        if block.block_hash == block_hash:
            run, position = block.content, block.content_position
        else:
            run, position = self.partial.aliases(block)[block_hash], 0
        return None if run is None else run.event(position)

    def _announce(self, block: KVCacheBlock, block_hash: bytes, content: StoredRun | None) -> None:
        """Tell the truth feed that content can be read, unless it could already."""
        if content is not None and not self._has_ready(block, block_hash):
            self._feed.append(StoredBlocks(content, 0, 1))

    def _has_ready(self, block: KVCacheBlock, block_hash: bytes) -> bool:
        """Whether another copy of the content is readable for everybody."""
        entry = self.indexes[block.group].entries.get(block_hash)
        if entry is None or entry is block:
            return False  # the usual case, for which no iterator is made
        copies = self.indexes[block.group].copies(block_hash)
        return any(copy is not block and copy.pending_view is None for copy in copies)

    def _drop_content(self, block: KVCacheBlock, reason: str = "evicted") -> None:
        block_hash = block.block_hash
        assert block_hash is not None
        residency = self.residency
        if residency is not None and block.block_id in residency.births:
            residency.on_evicted(block)
        index = self.indexes[block.group]
        copies_left = index.entries[block_hash] is not block
        if copies_left:
            index.remove(block_hash, block)
        else:
            del index.entries[block_hash]  # the usual case, without a call
        if self.enable_kv_cache_events:
            self._events.append(BlockRemoved([block_hash], block.group, MEDIUM, reason))
        was_readable = block.pending_view is None and block.content is not None
        if was_readable and not (copies_left and self._has_ready(block, block_hash)):
            self._record_removed(block_hash, block.group, reason)
        partial = self.partial
        if partial.num_tokens_by_id or partial.aliases_by_id:
            self._drop_partial(block, was_readable, reason)
        block.block_hash = None
        block.extra = None
        block.content = None
        block.pending_view = None

    def _drop_partial(self, block: KVCacheBlock, was_readable: bool, reason: str) -> None:
        for block_hash in self.partial.aliases(block):
            self.indexes[block.group].remove(block_hash, block)
            if self.enable_kv_cache_events:
                self._events.append(BlockRemoved([block_hash], block.group, MEDIUM, reason))
            if was_readable and not self._has_ready(block, block_hash):
                self._record_removed(block_hash, block.group, reason)
        self.partial.forget(block)

    def _record_removed(self, block_hash: bytes, group: int, reason: str) -> None:
        last = self._feed[-1] if self._feed else None
        if isinstance(last, RemovedBlocks) and last.group == group and last.reason == reason:
            last.hashes.append(block_hash)
        else:
            self._feed.append(RemovedBlocks([block_hash], group, self.medium, reason))

    def _keep_content(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        positions: Sequence[int],
        block_size: int,
        group: int,
        hash_ratio: int,
    ) -> None:
        """Remember, for events, what ``blocks`` hold, which stand at ``positions``."""
        start, num_blocks = 0, len(blocks)
        while start < num_blocks:
            first = positions[start]
            stop = min(start + RUN_BLOCKS_MAX, num_blocks)
            while positions[stop - 1] - first != stop - 1 - start:
                stop -= 1  # a run has no gaps
            run = self._stored_run(
                request, first, first + stop - start, block_size, group, hash_ratio
            )
            for position, block in enumerate(blocks[start:stop]):
                block.content = run
                block.content_position = position
            start = stop

    def _stored_run(
        self,
        request: Request,
        first: int,
        stop: int,
        block_size: int,
        group: int,
        hash_ratio: int,
    ) -> StoredRun:
        hashes = request.block_hashes
        spec = self.config.groups[group].spec
        return StoredRun(
            parent_hash=hashes[first * hash_ratio - 1] if first else None,
            hashes=hashes[(first + 1) * hash_ratio - 1 : stop * hash_ratio : hash_ratio],
            tokens=request.token_bytes(first * block_size, stop * block_size),
            block_size=block_size,
            extra_keys=(
                [request.extra_keys_of(position, block_size) for position in range(first, stop)]
                if request.has_extra_keys
                else None
            ),
            lora_id=request.lora_id,
            lora_name=request.extra.lora_name,
            group=group,
            spec_kind=spec.kind,
            sliding_window=spec.event_window,
            medium=self.medium,
        )

    def _record_stored(
        self,
        request: Request,
        span: range,
        positions: Sequence[int],
        block_size: int,
        group: int,
        hash_ratio: int,
    ) -> None:
        """vLLM's event of new hits at ``positions`` of a table, out of ``span``.

        It tells the tokens of the whole span, and may tell no block at all.
        """
        hashes = request.block_hashes
        first, stop = span.start, span.stop
        spec = self.config.groups[group].spec
        extra_keys = [request.extra_keys_of(position, block_size) for position in positions]
        self._events.append(
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
