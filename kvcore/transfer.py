"""Transfers: ready blocks that a peer reads, kept as they are until it is done.

A transfer pins blocks and belongs to no session: what it keeps outlives the request that
was named. Its lease is kept by whoever calls.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from kvcore.block import KVCacheBlock
from kvcore.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from kvcore.request import Request

if TYPE_CHECKING:
    from kvcore.depot import Depot
    from kvcore.session import Session

# Looked up, or let go of, before others have their turn: a millisecond or two.
_TURN_BLOCKS = 2048
ID_SHOWN = 8
"""An id is a capability: whoever knows it may read, so that only its start is shown."""


class BlockStatus(IntEnum):
    """Numbers are the wire's. PENDING: registered, its bytes not confirmed yet."""

    READY = 1
    PENDING = 2
    MISSING = 3


class GroupHashes(NamedTuple):
    """Blocks of one KV cache group, by hash."""

    group: int
    hashes: Sequence[bytes]


class BlockLimit(NamedTuple):
    """How many blocks a transfer may have on account of what else it asks for."""

    num_blocks: int
    error: Callable[[int], ResourceExhausted]


class TransferGroup(NamedTuple):
    """What was asked for of one group, and what of it is here: a block where READY."""

    group: int
    hashes: Sequence[bytes]
    statuses: bytes | bytearray
    blocks: Sequence[KVCacheBlock | None]

    @property
    def block_ids(self) -> list[int]:
        """One a status; 0 unless ready."""
        return [0 if block is None else block.block_id for block in self.blocks]


@dataclass(slots=True, eq=False)
class Transfer:
    """One open transfer. ``name``: of who reads."""

    transfer_id: str
    name: str
    groups: list[TransferGroup]
    # By id, each once, and the hash it was found under.
    pinned: dict[int, tuple[KVCacheBlock, bytes]] = field(default_factory=dict)
    # No longer open, though it may pin some yet.
    is_ending: bool = False

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """The blocks it pins."""
        return [block for block, _ in self.pinned.values()]


class Transfers:
    """The open transfers of one depot."""

    def __init__(self, depot: Depot) -> None:
        self._depot = depot
        self.by_id: dict[str, Transfer] = {}

    def open_hashes(
        self, name: str, wanted: Sequence[GroupHashes], *, limit: BlockLimit | None = None
    ) -> Transfer:
        """Pin the first ready copy of each hash; every hash is answered.

        InvalidArgument for what is no group or hash; ResourceExhausted for too many, by
        ``limit`` as well.
        """
        opening = self.opening_hashes(name, wanted, limit=limit)
        while True:
            try:
                next(opening)
            except StopIteration as done:
                transfer: Transfer = done.value
                return transfer

    def opening_hashes(
        self, name: str, wanted: Sequence[GroupHashes], *, limit: BlockLimit | None = None
    ) -> Generator[Transfer, None, Transfer]:
        """As open_hashes; pauses where others may have their turn, and gives the transfer then.

        It is open by then, and pins what was found so far. NotFound if it was ended meanwhile.
        """
        check_hashes(self._depot, wanted)
        self._require_room(sum(len(group.hashes) for group in wanted), limit)
        transfer = self._open(name, [])
        for group, hashes in wanted:
            statuses, blocks = bytearray(), list[KVCacheBlock | None]()
            transfer.groups.append(TransferGroup(group, hashes, statuses, blocks))
            for start in range(0, len(hashes), _TURN_BLOCKS):
                if start:
                    yield transfer
                    if transfer.is_ending:
                        raise _unknown()
                some = hashes[start : start + _TURN_BLOCKS]
                told, found = self._find_all(group, some)
                statuses += told
                blocks += found
                self._pin(transfer, found, some)
        return transfer

    def open_request(
        self, name: str, session: Session, request_id: str, *, limit: BlockLimit | None = None
    ) -> Transfer:
        """Pin the ready full blocks of a request, of every group that holds any.

        A place that its table does not keep, or keeps without hash, is MISSING.
        """
        request = find_named(session, request_id)
        groups = []
        for manager in session.manager.coordinator.token_managers:
            table = manager.req_to_blocks.get(request_id, ())
            hashes = hashes_of(request, len(table), manager.hash_ratio)
            found = [
                self._look_at(block) if block.block_hash == block_hash else (_MISSING, None)
                for block, block_hash in zip(table, hashes, strict=False)
            ]
            groups.append(_group(manager.group, hashes, found))
        self._require_room(sum(len(group.hashes) for group in groups), limit)
        transfer = self._open(name, groups)
        for group in groups:
            self._pin(transfer, group.blocks, group.hashes)
        return transfer

    def close(self, transfer_id: str) -> None:
        """End a transfer that is open, whose reader asks whether its bytes count.

        They do not, which is FailedPrecondition, if a block lost its content meanwhile, by
        a reset or because an operator evicted it; the transfer has ended all the same.
        """
        for _ in self.closing(transfer_id):
            pass

    def closing(self, transfer_id: str) -> Generator[None, None, None]:
        """As close; pauses where others may have their turn. It is not open from the start on."""
        transfer = self.by_id.get(transfer_id)
        if transfer is None or transfer.is_ending:
            raise _unknown()
        transfer.is_ending = True
        pinned, num_lost = transfer.pinned, 0
        while True:
            # The tails of chains are evicted first.
            some = [pinned.popitem()[1] for _ in range(min(_TURN_BLOCKS, len(pinned)))]
            num_lost += self._num_lost(some)
            self._depot.pool.pins.unpin([block for block, _ in some])
            if not pinned:
                del self.by_id[transfer_id]
            self._depot.resets.settle()
            if not pinned:
                break
            yield
        if num_lost:
            raise _dropped(num_lost)

    def require_content(self, transfer: Transfer) -> None:
        """FailedPrecondition if a block of it has lost its content, as close says.

        Costs time per block.
        """
        if num_lost := self._num_lost(transfer.pinned.values()):
            raise _dropped(num_lost)

    def _num_lost(self, pinned: Iterable[tuple[KVCacheBlock, bytes]]) -> int:
        indexes = self._depot.pool.indexes
        return sum(
            # The first copy is the usual case, which costs no call.
            indexes[block.group].entries.get(block_hash) is not block
            and not indexes[block.group].holds(block_hash, block)
            for block, block_hash in pinned
        )

    def keep_sums(self, transfer_id: str, block_ids: Sequence[int], sums: Sequence[int]) -> None:
        """Somebody has summed the bytes of blocks under a transfer.

        That counts only while it is open and they have their content: nobody wrote to them.
        A sum that is known stays: another one says that the bytes are no longer right.
        """
        transfer = self.by_id.get(transfer_id)
        if transfer is None:
            return
        pool = self._depot.pool
        kept, right = [], []
        for block_id, value in zip(block_ids, sums, strict=True):
            block, block_hash = transfer.pinned.get(block_id, _NOT_PINNED)
            # A block's partial hash says nothing of its last bytes.
            if (
                block.block_hash == block_hash
                and pool.partial.num_tokens(block) is None
                and not any(pool.sums.of([block]))
            ):
                kept.append(block)
                right.append(value)
        if kept:
            pool.sums.keep(kept, right)

    def end(self, transfer_id: str) -> None:
        """Unpin an open transfer's blocks; nobody reads them any more, or it does not count."""
        with suppress(FailedPrecondition):
            for _ in self.closing(transfer_id):
                pass

    def _open(self, name: str, groups: list[TransferGroup]) -> Transfer:
        transfer = Transfer(str(uuid.uuid4()), name, groups)
        self.by_id[transfer.transfer_id] = transfer
        return transfer

    def _pin(
        self,
        transfer: Transfer,
        blocks: Sequence[KVCacheBlock | None],
        hashes: Sequence[bytes],
    ) -> None:
        """Of ``blocks`` those that it does not pin yet."""
        pinned = transfer.pinned
        fresh = {
            block.block_id: (block, block_hash)
            for block, block_hash in zip(blocks, hashes, strict=True)
            if block is not None and block.block_id not in pinned
        }
        self._depot.pool.pins.pin([block for block, _ in fresh.values()])
        pinned.update(fresh)

    def _find_all(
        self, group: int, hashes: Sequence[bytes]
    ) -> tuple[bytes, list[KVCacheBlock | None]]:
        """Of each hash its status, and the block if it is ready."""
        entries = self._depot.pool.indexes[group].entries
        is_plain = self._depot.resets.drain is None
        statuses = bytearray(len(hashes))
        blocks: list[KVCacheBlock | None] = [None] * len(hashes)
        for number, entry in enumerate(map(entries.get, hashes)):
            # One ready copy is the usual case, which costs no call; none at all, too.
            if entry is None:
                statuses[number] = _MISSING
            elif is_plain and isinstance(entry, KVCacheBlock) and entry.pending is None:
                statuses[number] = _READY
                blocks[number] = entry
            else:
                statuses[number], blocks[number] = self._find(group, hashes[number])
        return bytes(statuses), blocks

    def _find(self, group: int, block_hash: bytes) -> tuple[BlockStatus, KVCacheBlock | None]:
        status = _MISSING
        for block in self._depot.pool.indexes[group].copies(block_hash):
            found = self._look_at(block)
            if found[0] is BlockStatus.READY:
                return found
            status = min(status, found[0])
        return status, None

    def _look_at(self, block: KVCacheBlock) -> tuple[BlockStatus, KVCacheBlock | None]:
        """A registered block's status. What a drain waits for is no hit for peers either."""
        drain = self._depot.resets.drain
        if drain is not None and drain.holds_off(self._depot.pool.extra_of(block)):
            return _MISSING, None
        if block.pending is not None:
            return BlockStatus.PENDING, None
        return BlockStatus.READY, block

    def _require_room(self, num_blocks: int, limit: BlockLimit | None) -> None:
        config = self._depot.config
        if len(self.by_id) >= config.max_transfers:
            raise ResourceExhausted(
                f"{len(self.by_id)} transfers are open, the maximum",
                reason="TOO_MANY_TRANSFERS",
                retryable=True,
            )
        require_few(num_blocks, config.max_transfer_blocks)
        if limit is not None and num_blocks > limit.num_blocks:
            raise limit.error(num_blocks)


_NOT_PINNED = KVCacheBlock(-1), b""
_READY, _MISSING = BlockStatus.READY, BlockStatus.MISSING


def _group(
    group: int,
    hashes: Sequence[bytes],
    found: Iterable[tuple[BlockStatus, KVCacheBlock | None]],
) -> TransferGroup:
    pairs = list(found)
    return TransferGroup(
        group, hashes, bytes(status for status, _ in pairs), [block for _, block in pairs]
    )


def _dropped(num_lost: int) -> FailedPrecondition:
    return FailedPrecondition(
        f"{num_lost} of the transfer's blocks were reset or evicted while it was open: what was "
        "read does not count",
        reason="CONTENT_DROPPED",
        field="transfer_id",
    )


def _unknown() -> NotFound:
    return NotFound("no such transfer is open", reason="UNKNOWN_TRANSFER", field="transfer_id")


def check_hashes(depot: Depot, wanted: Sequence[GroupHashes]) -> None:
    """InvalidArgument unless each names another group that holds blocks, and its hashes."""
    groups = depot.config.kv_cache.groups
    size = depot.scheme.digest_size
    seen = set()
    for position, (group, hashes) in enumerate(wanted):
        if group >= len(groups) or not groups[group].holds_blocks or group in seen:
            why = "is named twice" if group in seen else "holds no blocks here"
            raise InvalidArgument(f"group {group} {why}", field=f"groups[{position}].group")
        seen.add(group)
        if set(map(len, hashes)) <= {size}:
            continue
        for number, block_hash in enumerate(hashes):
            if len(block_hash) != size:
                raise InvalidArgument(
                    f"a hash has {size} bytes ({2 * size} hex digits), got {len(block_hash)}",
                    field=f"groups[{position}].block_hashes[{number}]",
                )


def require_few(num_blocks: int, maximum: int) -> None:
    """ResourceExhausted for more blocks than one transfer or import may have."""
    if num_blocks > maximum:
        raise ResourceExhausted(
            f"{num_blocks} blocks are more than {maximum} at a time",
            reason="TOO_MANY_BLOCKS",
            field="groups",
        )


def find_named(session: Session, request_id: str) -> Request:
    """A request of the session; NotFound if it is not known."""
    request = session.requests.get(request_id)
    if request is None:
        raise NotFound(
            f"request {request_id!r} is not known",
            reason="UNKNOWN_REQUEST",
            field="request.request_id",
        )
    return request


def hashes_of(request: Request, num_blocks: int, hash_ratio: int) -> list[bytes]:
    """The hashes of a table's first full blocks, ``num_blocks`` at most."""
    return request.block_hashes[hash_ratio - 1 : num_blocks * hash_ratio : hash_ratio]
