"""Imports: blocks of this pool that are filled with a peer's bytes.

While an import runs it pins the blocks, so that nobody is given one in which bytes may
still land, whatever becomes of the request that it is for. Whoever calls says when none
can land any more: ``finish``.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from kvcore.block import KVCacheBlock
from kvcore.errors import FailedPrecondition, ResourceExhausted
from kvcore.import_job import (
    Filled,
    Import,
    ImportGroup,
    ImportResult,
    ImportStatus,
    Ready,
)
from kvcore.imported import register_imported
from kvcore.request import Request, RequestStatus
from kvcore.single_type.base import SingleTypeKVCacheManager
from kvcore.transfer import GroupHashes, check_hashes, find_named, hashes_of, require_few

if TYPE_CHECKING:
    from kvcore.depot import Depot
    from kvcore.session import Session


# Plain numbers, as a status of each block is compared.
_IMPORTED, _PRESENT, _FAILED, _NO_FIT, _NOT_ATTEMPTED = map(
    int,
    (
        ImportStatus.IMPORTED,
        ImportStatus.PRESENT,
        ImportStatus.FAILED,
        ImportStatus.NO_FIT,
        ImportStatus.NOT_ATTEMPTED,
    ),
)
_BLOCK_ID = attrgetter("block_id")
# Before others have their turn: a millisecond or two.
_TURN_BLOCKS = 2048
# Of a group: enough to see what is wrong, and little to send.
MISSING_PARENTS_MAX = 64
_NOTHING_FILLED = Filled(0, b"")
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
                    bytearray(len(positions)),
                    [*blocks],
                    range(len(positions)),
                )
            )
        self._require_room(sum(len(group.hashes) for group in groups))
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
        beginning = self.beginning_hashes(peer, wanted)
        while True:
            try:
                next(beginning)
            except StopIteration as done:
                found: Import = done.value
                return found

    def beginning_hashes(
        self, peer: str, wanted: Sequence[GroupHashes]
    ) -> Generator[Import, None, Import]:
        """As begin_hashes; pauses where others may have their turn, and gives the import then.

        It has begun by then, and is to be finished whatever happens.
        """
        self._require_caching()
        check_hashes(self._depot, wanted)
        if self._depot.resets.drain is not None:
            raise FailedPrecondition(
                "a reset is pending: nothing is imported meanwhile",
                reason="RESET_PENDING",
                retryable=True,
            )
        self._require_room(sum(len(group.hashes) for group in wanted))
        groups = [
            ImportGroup(
                group,
                hashes,
                range(len(hashes)),
                bytearray(len(hashes)),
                [None] * len(hashes),
                (),
            )
            for group, hashes in wanted
        ]
        found = self._begin(peer, groups)
        for group in groups:
            for start in range(0, len(group.hashes), _TURN_BLOCKS):
                if start:
                    yield found
                some = self._all_ready(group.group, group.hashes[start : start + _TURN_BLOCKS])
                here = [(start + at, block) for at, block in enumerate(some) if block is not None]
                for number, block in here:
                    group.statuses[number] = _PRESENT
                    group.blocks[number] = block
                self._depot.pool.pins.pin([block for _, block in here])
            group.asked = group.running if any(group.statuses) else range(len(group.hashes))
        return found

    def take(self, found: Import, ready: Mapping[int, Ready]) -> dict[int, list[int]]:
        """Take blocks for what the peer has, as many as fit above the watermark.

        ``ready``, by group: of some of the hashes that were asked for, or all. Answers a
        block id for each of them, 0 where there is none; a repeat, the same. Blocks are
        evicted for them, but none of those that were here and asked for.
        """
        pool = self._depot.pool
        numbers, absent = {}, []
        for group in found.groups:
            first, is_ready = ready.get(group.group, _NONE_READY)
            asked = numbers[group.group] = group.asked[first : first + len(is_ready)]
            statuses, blocks = group.statuses, group.blocks
            absent += [
                (group, number)
                for number, has in zip(asked, is_ready, strict=False)
                if has and not statuses[number] and blocks[number] is None
            ]
        config = self._depot.config
        watermark = int(config.watermark * config.kv_cache.num_blocks)
        num_blocks = min(len(absent), max(0, pool.pins.num_takable - watermark))
        is_void = self.is_void(found)
        if is_void:
            num_blocks = 0
        refused: list[tuple[ImportGroup, int]] = []
        if num_blocks < len(absent):
            # If not all fit, the first part of every group: a hit needs them all.
            absent.sort(key=lambda entry: (entry[1] + 1) / len(entry[0].hashes))
            absent, refused = absent[:num_blocks], absent[num_blocks:]
            absent.sort(key=lambda entry: (entry[0].group, entry[1]))
        # What follows each other lies together, as far as it can: it is copied at once.
        taken = sorted(pool.pins.take(num_blocks), key=_BLOCK_ID)
        for (group, number), block in zip(absent, taken, strict=True):
            group.blocks[number] = block
        for group, number in refused:
            group.statuses[number] = _FAILED if is_void else _NO_FIT
        return {
            group.group: [
                0 if block is None else block.block_id
                for block in map(group.blocks.__getitem__, numbers[group.group])
            ]
            for group in found.groups
        }

    def is_void(self, found: Import) -> bool:
        """Whether nothing more of it can become a hit: a reset has come, or waits."""
        if found.request is not None:
            return False
        return self._depot.resets.drain is not None or found.generation != self._depot.generation

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

    def _require_room(self, num_blocks: int) -> None:
        config = self._depot.config
        if len(self.by_id) >= config.max_imports:
            raise ResourceExhausted(
                f"{len(self.by_id)} imports are running, the maximum",
                reason="TOO_MANY_IMPORTS",
                retryable=True,
            )
        require_few(num_blocks, config.max_transfer_blocks)

    # --- fill and finish --------------------------------------------------------------

    def fill(self, found: Import, filled: Mapping[int, Filled]) -> None:
        """What of some of the hashes, by group, has come: no byte lands in their blocks any more.

        Of a request nothing is registered. Of hashes, those that came are, each if its parent
        is here: all ready for everybody. Not after a reset.
        """
        for group in found.groups:
            told = filled.get(group.group, _NOTHING_FILLED)
            asked = group.asked[told.first : told.first + len(told.statuses)]
            came = []
            for number, status in zip(asked, told.statuses, strict=True):
                if status == _IMPORTED:
                    came.append(number)
                elif not group.statuses[number]:
                    group.statuses[number] = status
            if found.request is None:
                register_imported(self._depot, found, group, came, told.contents)
                continue
            for number in came:
                if not group.statuses[number]:
                    has_block = group.blocks[number] is not None
                    group.statuses[number] = _IMPORTED if has_block else _FAILED

    def finish(self, found: Import) -> ImportResult:
        """No byte can land in any of its blocks any more: they are unpinned.

        Evicted children first. What was not filled has failed; of hashes, what a reset or an
        operator has taken meanwhile, too.
        """
        for _ in self.release(found):
            pass
        return self.end(found)

    def release(self, found: Import) -> Iterator[None]:
        """As finish, all but the result; pauses where others may have their turn. Then ``end``."""
        pins, indexes = self._depot.pool.pins, self._depot.pool.indexes
        for group in found.groups:
            entries = indexes[group.group].entries
            hashes, statuses, blocks = group.hashes, group.statuses, group.blocks
            for stop in range(len(hashes), 0, -_TURN_BLOCKS):
                start = max(0, stop - _TURN_BLOCKS)
                released = []
                for number in range(stop - 1, start - 1, -1):
                    block = blocks[number]
                    if block is None:
                        if not statuses[number] or statuses[number] == _IMPORTED:
                            statuses[number] = _FAILED
                        continue
                    released.append(block)
                    blocks[number] = None
                    if not statuses[number]:
                        statuses[number] = _FAILED
                    elif found.request is None and statuses[number] <= _PRESENT:
                        # The usual case costs no call.
                        is_here = entries.get(hashes[number]) is block
                        if not is_here and indexes[group.group].ready_copy(hashes[number]) is None:
                            statuses[number] = _FAILED  # reset or evicted meanwhile
                pins.filling.difference_update([block.block_id for block in released])
                pins.unpin(released)
                if start:
                    yield

    def end(self, found: Import) -> ImportResult:
        """The import is over; its blocks were released."""
        del self.by_id[found.import_id]
        num_tokens = 0
        if found.request is not None:
            if found.request.importing is found:
                found.request.importing = None
                num_tokens = self._num_verified_tokens(found)
        elif found.generation != self._depot.generation:
            for group in found.groups:  # it may have been reset between two pauses
                index = self._depot.pool.indexes[group.group]
                for number, status in enumerate(group.statuses):
                    if status <= _PRESENT and index.ready_copy(group.hashes[number]) is None:
                        group.statuses[number] = _FAILED
        size = self._depot.scheme.digest_size  # a peer may say anything
        missing_parents: dict[int, Sequence[bytes]] = {}
        for group in found.groups:
            asked = set(group.hashes) if group.absent else ()
            others = (h for h in group.absent if h not in asked and len(h) == size)
            if first := list(islice(others, MISSING_PARENTS_MAX)):
                missing_parents[group.group] = first
        self._depot.resets.settle()
        return ImportResult(
            {group.group: bytes(group.statuses) for group in found.groups},
            num_tokens,
            missing_parents,
        )

    def _all_ready(self, group: int, hashes: Sequence[bytes]) -> list[KVCacheBlock | None]:
        """One a hash; what is not here costs no call."""
        index = self._depot.pool.indexes[group]
        return [index.ready_copy(h) if h in index.entries else None for h in hashes]

    def _num_verified_tokens(self, found: Import) -> int:
        """The longest prefix, ending where a hit can, with which the request can go on."""
        session, request = found.session, found.request
        assert session is not None
        assert request is not None
        missing = {
            group.group: [
                position
                for position, status in zip(group.positions, group.statuses, strict=True)
                if status != _IMPORTED
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
