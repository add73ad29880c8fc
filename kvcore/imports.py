"""Imports: blocks of this pool that are filled with a peer's bytes.

While an import runs it pins the blocks, so that nobody is given one in which bytes may
still land, whatever becomes of the request that it is for. Whoever calls says when none
can land any more: ``finish``.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from kvcore.block import KVCacheBlock
from kvcore.errors import FailedPrecondition, ResourceExhausted
from kvcore.feed import RUN_BLOCKS_MAX
from kvcore.hashing import ExtraKeys
from kvcore.import_job import (
    Filled,
    Import,
    ImportedContent,
    ImportGroup,
    ImportResult,
    ImportStatus,
    Ready,
)
from kvcore.request import TOKEN_BYTES, Request, RequestStatus
from kvcore.single_type.base import SingleTypeKVCacheManager
from kvcore.spec import FullAttentionSpec
from kvcore.transfer import GroupHashes, check_hashes, find_named, hashes_of, require_few

if TYPE_CHECKING:
    from kvcore.depot import Depot
    from kvcore.session import Session


_RUNNING, _IMPORTED, _PRESENT, _FAILED, _NO_FIT, _NOT_ATTEMPTED = (
    ImportStatus.RUNNING,
    ImportStatus.IMPORTED,
    ImportStatus.PRESENT,
    ImportStatus.FAILED,
    ImportStatus.NO_FIT,
    ImportStatus.NOT_ATTEMPTED,
)
# Of a group: enough to see what is wrong, and little to send.
MISSING_PARENTS_MAX = 64
_NOTHING = Filled(_FAILED)
_NONE_READY = Ready(0, ())


class Imports:
    """The imports of one depot that run."""

    def __init__(self, depot: Depot) -> None:
        self._depot = depot
        self.by_id: dict[str, Import] = {}

    # --- begin ------------------------------------------------------------------------

    def begin_request(self, peer: str, session: Session, request_id: str) -> Import:
        """Fill the blocks that a request was given for external tokens.

        Of each group those that are full and that its attention keeps. The request must
        have been allocated with ``delay_cache_blocks``; while the import runs it cannot be
        allocated more, nor confirmed. Bytes do not wait for the session's steps, as its
        workers do: none of the blocks may be in use by a step in flight.
        """
        request = find_named(session, request_id)
        if request.importing is not None:
            raise import_running(request)
        if request.status is RequestStatus.RUNNING or not session.holds_blocks(request):
            raise FailedPrecondition(
                f"request {request_id!r} waits for no external tokens: give it slots with "
                "delay_cache_blocks first",
                reason="NOT_DELAYED",
                field="request.request_id",
            )
        self._require_caching()
        groups = []
        for manager in session.manager.coordinator.token_managers:
            table = manager.req_to_blocks.get(request_id, [])
            start = manager.num_cached_blocks.get(request_id, 0)
            hashes = hashes_of(
                request, request.num_computed_tokens // manager.block_size, manager.hash_ratio
            )
            positions = [p for p in range(start, len(hashes)) if not table[p].is_null]
            blocks = [table[p] for p in positions]
            pinned = self._depot.pool.pins.counts
            if any(b.block_id in pinned or b.block_hash is not None for b in blocks):
                raise FailedPrecondition(
                    f"blocks of request {request_id!r} are in use by a transfer",
                    reason="SHARED_BLOCK",
                    field="request.request_id",
                    retryable=True,
                )
            if any(b.block_id in session.view.retaken for b in blocks):
                raise FailedPrecondition(
                    f"a step in flight may still use blocks of request {request_id!r}, which the "
                    "session freed in it and took again: import once it has completed",
                    reason="STEP_IN_FLIGHT",
                    field="request.request_id",
                    retryable=True,
                )
            groups.append(
                ImportGroup(
                    manager.group,
                    [hashes[p] for p in positions],
                    positions,
                    [_RUNNING] * len(positions),
                    [*blocks],
                    range(len(positions)),
                )
            )
        self._require_room(groups)
        found = self._begin(peer, groups)
        found.session, found.request = session, request
        found.num_tokens = request.num_computed_tokens
        request.importing = found
        pins = self._depot.pool.pins
        pins.pin(found.blocks)
        pins.filling.update([block.block_id for block in found.blocks])
        return found

    def begin_hashes(self, peer: str, wanted: Sequence[GroupHashes]) -> Import:
        """Ask the peer for what is not here. No block is taken before it says what it has."""
        self._require_caching()
        check_hashes(self._depot, wanted)
        if self._depot.resets.drain is not None:
            raise FailedPrecondition(
                "a reset is pending: nothing is imported meanwhile",
                reason="RESET_PENDING",
                retryable=True,
            )
        groups = [
            ImportGroup(
                group,
                hashes,
                range(len(hashes)),
                [_RUNNING] * len(hashes),
                [self._ready(group, block_hash) for block_hash in hashes],
                (),
            )
            for group, hashes in wanted
        ]
        self._require_room(groups)
        for group in groups:
            for position, block in enumerate(group.blocks):
                if block is not None:
                    group.statuses[position] = _PRESENT
            group.asked = group.running
        found = self._begin(peer, groups)
        self._depot.pool.pins.pin(found.blocks)
        return found

    def take(self, found: Import, ready: Mapping[int, Ready]) -> dict[int, list[int]]:
        """Take blocks for what the peer has, as many as fit above the watermark.

        ``ready``, by group: of some of the hashes that were asked for, or all. Answers a
        block id for each of them, 0 where there is none; a repeat, the same. Blocks are
        evicted for them, but none of those that were here and asked for.
        """
        pool = self._depot.pool
        absent = []
        numbers = {}
        for group in found.groups:
            first, is_ready = ready.get(group.group, _NONE_READY)
            numbers[group.group] = group.asked[first : first + len(is_ready)]
            for number, has in zip(numbers[group.group], is_ready, strict=False):
                if has and group.statuses[number] is _RUNNING and group.blocks[number] is None:
                    absent.append(((number + 1) / len(group.hashes), group, number))
        # If not all fit, the first part of every group: a hit needs them all.
        absent.sort(key=lambda entry: entry[0])
        config = self._depot.config
        watermark = int(config.watermark * config.kv_cache.num_blocks)
        num_blocks = min(len(absent), max(0, pool.pins.num_takable - watermark))
        # Then nothing of it could become a hit.
        is_void = self._depot.resets.drain is not None or (
            found.generation != self._depot.generation
        )
        if is_void:
            num_blocks = 0
        # What follows each other lies together, as far as it can: it is copied at once.
        fitting = sorted(absent[:num_blocks], key=lambda entry: (entry[1].group, entry[2]))
        taken = sorted(pool.pins.take(num_blocks), key=lambda block: block.block_id)
        for (_, group, number), block in zip(fitting, taken, strict=True):
            group.blocks[number] = block
        for _, group, number in absent[num_blocks:]:
            group.statuses[number] = _FAILED if is_void else _NO_FIT
        return {
            group.group: [
                0 if block is None else block.block_id
                for block in map(group.blocks.__getitem__, numbers[group.group])
            ]
            for group in found.groups
        }

    def _begin(self, peer: str, groups: Sequence[ImportGroup]) -> Import:
        found = Import(str(uuid.uuid4()), peer, groups, self._depot.generation)
        self.by_id[found.import_id] = found
        return found

    def _require_caching(self) -> None:
        if not self._depot.config.enable_caching:
            raise FailedPrecondition(
                "blocks are named by their hashes, and prefix caching is off",
                reason="NO_PREFIX_CACHE",
            )

    def _require_room(self, groups: Sequence[ImportGroup]) -> None:
        config = self._depot.config
        if len(self.by_id) >= config.max_imports:
            raise ResourceExhausted(
                f"{len(self.by_id)} imports are running, the maximum",
                reason="TOO_MANY_IMPORTS",
                retryable=True,
            )
        require_few(sum(len(group.hashes) for group in groups), config.max_transfer_blocks)

    # --- finish -----------------------------------------------------------------------

    def finish(self, found: Import, filled: Mapping[int, Sequence[Filled]] | None) -> ImportResult:
        """No byte can land in the import's blocks any more: they are unpinned.

        ``filled``, by group, has one entry a hash that was asked for; None: none came. Of a
        request nothing is registered. Of hashes, those that came are, each if its parent
        is here; all ready for everybody, and evicted children first. Not after a reset.
        """
        del self.by_id[found.import_id]
        came: list[dict[int, Filled]] = []
        for group in found.groups:
            asked = group.asked
            entries = [_NOTHING] * len(asked) if filled is None else filled.get(group.group, ())
            came.append(dict(zip(asked, entries, strict=True)))
            for number, entry in came[-1].items():
                if group.statuses[number] is _RUNNING:
                    has_come = entry.status is not _IMPORTED or group.blocks[number] is not None
                    group.statuses[number] = entry.status if has_come else _FAILED
        num_tokens = 0
        missing_parents: dict[int, list[bytes]] = {}
        if found.request is not None:
            if found.request.importing is found:
                found.request.importing = None
                num_tokens = self._num_verified_tokens(found)
        else:
            for group, entries_by_number in zip(found.groups, came, strict=True):
                absent = self._register(found, group, entries_by_number)
                if absent:
                    missing_parents[group.group] = absent
        pins = self._depot.pool.pins
        pins.filling.difference_update([block.block_id for block in found.blocks])
        for group in found.groups:
            pins.unpin([block for block in reversed(group.blocks) if block is not None])
        self._depot.resets.settle()
        return ImportResult(
            {group.group: bytes(group.statuses) for group in found.groups},
            num_tokens,
            missing_parents,
        )

    def _register(
        self, found: Import, group: ImportGroup, came: Mapping[int, Filled]
    ) -> list[bytes]:
        """Make what came hits for everybody. Answers the first parents that nobody asked for."""
        pool, config = self._depot.pool, self._depot.config
        spec = config.kv_cache.groups[group.group].manager_spec
        block_size = spec.block_size * config.context_parallel_size
        needs_parents = isinstance(spec, FullAttentionSpec)
        index = pool.indexes[group.group]
        registered: list[tuple[KVCacheBlock, ImportedContent]] = []
        generation, num_token_bytes = self._depot.generation, block_size * TOKEN_BYTES
        last_hash: bytes | None = None  # registered here, and so ready
        absent: dict[bytes, None] = {}
        for position, block_hash in enumerate(group.hashes):
            status = group.statuses[position]
            if status is not _IMPORTED and status is not _PRESENT:
                continue
            block = group.blocks[position]
            assert block is not None
            if status is _PRESENT:
                if not index.holds(block_hash, block):
                    group.statuses[position] = _FAILED  # reset or evicted meanwhile
                continue
            content = came[position].content
            if (
                content is None
                or len(content.tokens) != num_token_bytes
                or found.generation != generation
            ):
                group.statuses[position] = _FAILED
            elif (
                needs_parents
                and content.parent_hash is not None
                and content.parent_hash != last_hash
                and self._ready(group.group, content.parent_hash) is None
            ):
                group.statuses[position] = _NOT_ATTEMPTED
                absent[content.parent_hash] = None
            elif self._ready(group.group, block_hash) is not None:
                group.statuses[position] = _PRESENT  # another has brought it meanwhile
            else:
                block.block_hash = last_hash = block_hash
                block.group = group.group
                if content.lora_name is not None or content.cache_salt is not None:
                    pool.extras[block.block_id] = ExtraKeys(
                        lora_name=content.lora_name, cache_salt=content.cache_salt
                    )
                index.insert(block_hash, block)
                registered.append((block, content))
        if pool.publish_events:
            for run in _runs(registered):
                blocks = [block for block, _ in run]
                pool.truth_feed.keep_imported(
                    blocks, [content for _, content in run], block_size=block_size
                )
        pool.confirm([block for block, _ in registered])
        asked = set(group.hashes) if absent else ()
        size = self._depot.scheme.digest_size  # a peer may say anything
        others = (h for h in absent if h not in asked and len(h) == size)
        return list(islice(others, MISSING_PARENTS_MAX))

    def _ready(self, group: int, block_hash: bytes) -> KVCacheBlock | None:
        for block in self._depot.pool.indexes[group].copies(block_hash):
            if block.pending is None:
                return block
        return None

    def _num_verified_tokens(self, found: Import) -> int:
        """The longest prefix, ending where a hit can, with which the request can go on."""
        session, request = found.session, found.request
        assert session is not None
        assert request is not None
        missing = {
            group.group: [
                position
                for position, status in zip(group.positions, group.statuses, strict=True)
                if status is not _IMPORTED
            ]
            for group in found.groups
        }
        size = self._depot.config.scheduler_block_size
        num_tokens = found.num_tokens // size * size
        managers = session.manager.coordinator.token_managers
        while num_tokens > 0:
            shorter = min(
                _num_usable_tokens(manager, request, num_tokens, missing[manager.group])
                for manager in managers
            )
            if shorter == num_tokens:
                break
            num_tokens = shorter // size * size
        return num_tokens


def import_running(request: Request) -> FailedPrecondition:
    """What an import that runs forbids."""
    return FailedPrecondition(
        f"an import fills blocks of request {request.request_id!r}: wait for its end",
        reason="IMPORT_RUNNING",
        field="request_id",
        retryable=True,
    )


def _num_usable_tokens(
    manager: SingleTypeKVCacheManager, request: Request, num_tokens: int, missing: list[int]
) -> int:
    """``num_tokens``, or fewer, of which what one group's attention looks at is here."""
    if manager.has_released(request.request_id, num_tokens, request.num_prompt_tokens):
        return 0  # and so it is for fewer
    first = max(0, manager.get_num_skipped_tokens(num_tokens)) // manager.block_size
    at = bisect_left(missing, first)
    if at < len(missing):
        return min(num_tokens, missing[at] * manager.block_size)
    return num_tokens


def _runs(
    registered: Sequence[tuple[KVCacheBlock, ImportedContent]],
) -> Iterator[list[tuple[KVCacheBlock, ImportedContent]]]:
    """Cut where a block does not follow the one before it."""
    run: list[tuple[KVCacheBlock, ImportedContent]] = []
    for block, content in registered:
        if run:
            last_block, last = run[-1]
            follows = content.parent_hash == last_block.block_hash and (
                content.lora_id,
                content.lora_name,
            ) == (last.lora_id, last.lora_name)
            if not follows or len(run) == RUN_BLOCKS_MAX:
                yield run
                run = []
        run.append((block, content))
    if run:
        yield run
