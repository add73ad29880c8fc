"""Every invariant of a pool, checked: after each step of each test, and behind Audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvcore.block import KVCacheBlock
from kvcore.block_pool import BlockPool
from kvcore.holders import block_holders
from kvcore.manager import KVCacheManager

if TYPE_CHECKING:
    from kvcore.depot import Depot


def check(subject: KVCacheManager | Depot) -> list[str]:
    """What is broken, a line each; empty when all is well. Costs time per block.

    Of a manager alone the references held by popped blocks are not known, so its
    blocks may have more references than its tables show; a depot's may not.
    """
    if not isinstance(subject, KVCacheManager):
        managers = [session.manager for session in subject.sessions.values()]
        detached = [
            block
            for session in subject.sessions.values()
            for ticket in session.tickets.values()
            for block in ticket.blocks
        ]
        return [
            *_check_pool(subject.pool, subject.pool.free_queue.block_ids()),
            *_check_tables(subject.pool, managers),
            *_check_references(subject.pool, managers, detached, exact=True),
            *_check_pins(subject),
            *_check_depot(subject),
        ]
    pool = subject.block_pool
    return [
        *_check_pool(pool, pool.free_queue.block_ids()),
        *_check_tables(pool, [subject]),
        *_check_references(pool, [subject], (), exact=False),
    ]


def _check_pool(pool: BlockPool, free_ids: list[int]) -> Iterable[str]:
    free = set(free_ids)
    if len(free) != len(free_ids):
        yield "free queue: a block is in it twice"
    if len(free_ids) != pool.free_queue.num_free_blocks:
        yield f"free queue: counts {pool.free_queue.num_free_blocks}, holds {len(free_ids)}"
    indexed: Counter[int] = Counter()
    for group, index in enumerate(pool.indexes):
        for block_hash, entry in index.entries.items():
            copies = [entry] if isinstance(entry, KVCacheBlock) else list(entry.values())
            if not copies:
                yield f"index: group {group} has an empty entry"
            for block in copies:
                aliases = pool.partial.aliases(block)
                if block.block_hash == block_hash or block_hash not in aliases:
                    indexed[block.block_id] += 1
                named = block.block_hash == block_hash or block_hash in aliases
                if not named or block.group != group:
                    yield f"index: block {block.block_id} is under a hash that it does not have"
    for block_id, value in enumerate(pool.sums.by_id):
        if value and pool.blocks[block_id].block_hash is None:
            yield f"block {block_id}: has a checksum, and no content"
    held: Counter[int] = Counter()
    holds, pins = pool.holds.by_block, pool.pins
    for block in pool.blocks:
        name = f"block {block.block_id}"
        if block.ref_cnt < 0:
            yield f"{name}: ref_cnt {block.ref_cnt}"
        if block.is_null:
            if block.block_id in free or block.block_hash is not None or block.ref_cnt:
                yield f"{name}: the null block is free, cached or counted"
            continue
        if pool.is_free(block) != (block.block_id in free):
            yield (
                f"{name}: ref_cnt {block.ref_cnt}, pinned: {block.block_id in pins.counts}, "
                f"in the free queue: {block.block_id in free}"
            )
        if (block.block_id in pins.counts and block.ref_cnt == 0) != (block.block_id in pins.idle):
            yield (
                f"{name}: ref_cnt {block.ref_cnt}, pinned: {block.block_id in pins.counts}, "
                f"counts as idle: {block.block_id in pins.idle}"
            )
        if indexed[block.block_id] != (block.block_hash is not None):
            yield f"{name}: has a hash: {block.block_hash is not None}, is in the index: " + str(
                indexed[block.block_id]
            )
        for alias in pool.partial.aliases(block):
            if not pool.indexes[block.group].holds(alias, block):
                yield f"{name}: an alias of it is not in the index"
        if block.block_hash is None and (
            block.content or block.pending or block.block_id in pool.extras
        ):
            yield f"{name}: has content or is pending without a hash"
        if block.pending_view is not None and block.pending_view not in pool.views:
            yield f"{name}: pending for a view that is closed"
        if block.held_by is not None:
            held[id(block.held_by)] += 1
            if block.block_id not in free or (
                block.held_by not in pool.views and block.held_by is not pool.holds.several
            ):
                yield f"{name}: held back, but not free or for a view that is closed"
        if (
            block.block_id in holds
            and block.block_id in free
            and block.held_by is not pool.holds.several
        ):
            yield f"{name}: is free, and remembers who held it back before"
    num_kept = sum(block_id not in free for block_id in holds)
    if pool.holds.num_kept != num_kept:
        yield f"pool: counts {pool.holds.num_kept} kept holds, holds {num_kept}"
    num_cached = sum(pool.blocks[block_id].block_hash is not None for block_id in free)
    if pool.num_cached_blocks != num_cached:
        yield f"pool: counts {pool.num_cached_blocks} cached free blocks, holds {num_cached}"
    for view in (*pool.views, pool.holds.several):
        if view.num_held_blocks != held[id(view)]:
            yield f"view: counts {view.num_held_blocks} held blocks, holds {held[id(view)]}"
    if pool.num_held_blocks != held.total():
        yield f"pool: counts {pool.num_held_blocks} held blocks, holds {held.total()}"


def _check_tables(pool: BlockPool, managers: list[KVCacheManager]) -> Iterable[str]:
    for manager in managers:
        for group in manager.coordinator.managers:
            for request_id, num_cached in group.num_cached_blocks.items():
                table = group.req_to_blocks.get(request_id, [])
                if num_cached > len(table):
                    yield f"request {request_id}: {num_cached} cached of {len(table)} blocks"
            for request_id, table in group.req_to_blocks.items():
                real = [block.block_id for block in table if not block.is_null]
                if len(set(real)) != len(real):
                    yield f"request {request_id}: a block is in its table twice"


def _check_references(
    pool: BlockPool,
    managers: list[KVCacheManager],
    detached: Iterable[KVCacheBlock],
    *,
    exact: bool,
) -> Iterable[str]:
    references = Counter(block.block_id for block in detached)
    references.update(block.block_id for blocks in pool.sink_blocks for block in blocks)
    for manager in managers:
        for group in manager.coordinator.managers:
            for table in group.req_to_blocks.values():
                references.update([block.block_id for block in table if not block.is_null])
    for block in pool.blocks:
        counted = references[block.block_id]
        if block.ref_cnt < counted or (exact and block.ref_cnt != counted):
            yield f"block {block.block_id}: ref_cnt {block.ref_cnt}, {counted} references"


def _check_pins(depot: Depot) -> Iterable[str]:
    pins = depot.pool.pins
    counted: Counter[int] = Counter()
    for transfer in depot.transfers.by_id.values():
        counted.update([block.block_id for block in transfer.blocks])
    filling: set[int] = set()
    for found in depot.imports.by_id.values():
        counted.update([block.block_id for block in found.blocks])
        ids = [block.block_id for block in found.filling]
        if filling & set(ids) or len(set(ids)) != len(ids):
            yield f"import {found.import_id[:8]}: fills a block that is being filled already"
        filling.update(ids)
    for block_id in pins.counts.keys() | counted.keys():
        count = pins.counts.get(block_id, 0)
        if count != counted[block_id]:
            yield f"block {block_id}: {count} pins, {counted[block_id]} transfers keep it"
    for block_id in filling:
        if depot.pool.blocks[block_id].block_hash is not None:
            yield f"block {block_id}: is being filled, and has a hash already"
    if pins.filling != filling:
        yield f"pool: {len(pins.filling)} blocks are being filled, by imports {len(filling)}"


def _check_depot(depot: Depot) -> Iterable[str]:
    for session in depot.sessions.values():
        by_handle = {request.handle: request for request in session.requests.values()}
        if by_handle != session.by_handle:
            yield f"session {session.session_id}: handles and requests disagree"
        for group in session.manager.coordinator.managers:
            for request_id in group.req_to_blocks:
                if request_id not in session.requests:
                    yield f"session {session.session_id}: blocks of unknown request {request_id}"
        num_tokens = sum(request.num_tokens for request in session.requests.values())
        if session.num_tokens != num_tokens:
            yield (
                f"session {session.session_id}: counts {session.num_tokens} tokens, "
                f"holds {num_tokens}"
            )
        for request in session.requests.values():
            found = request.importing
            if found is not None and depot.imports.by_id.get(found.import_id) is not found:
                yield f"request {request.request_id}: waits for an import that has ended"
            if request.outlived_reset and not session.holds_blocks(request):
                yield f"request {request.request_id}: outlived a reset without blocks"
    views = [session.view for session in (*depot.sessions.values(), *depot.departed.values())]
    if set(map(id, views)) != set(map(id, depot.pool.views)):
        yield f"pool: {len(depot.pool.views)} views, of {len(views)} sessions"
    for session in depot.departed.values():
        name = f"departed session {session.session_id}"
        if session.session_id in depot.sessions or not session.num_workers:
            yield f"{name}: is open, or has no worker"
        if session.requests or session.num_blocks:
            yield f"{name}: holds requests or blocks"
    drain = depot.resets.drain
    if drain is not None and not any(block_holders(depot, drain.scope)):
        yield f"drain {drain.drain_id}: waits for nobody"
    total = sum(depot.pool.states())
    if total != len(depot.pool.blocks) - 1:
        yield f"pool: the states of {len(depot.pool.blocks) - 1} blocks sum to {total}"
