"""Who holds the blocks: by request, for a reset that must wait, and by session, for a
refused allocation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import nlargest
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from kvcore.operation import NoFit, SessionHold
from kvcore.transfer import ID_SHOWN

if TYPE_CHECKING:
    from kvcore.depot import Depot
    from kvcore.reset import ResetScope

HOLDERS_MAX = 8


@dataclass(frozen=True, slots=True)
class BlockHolder:
    """Blocks in use by one request, or (``ticket`` not 0) detached, or (``transfer``, the
    start of its id) kept by a transfer or an import, whose name is then the session's.
    """

    session_id: str
    session_name: str
    request_id: str
    ticket: int
    num_blocks: int
    transfer: str = ""

    def __str__(self) -> str:
        if self.transfer:
            who = f" of {self.session_name}" if self.session_name else ""
            return f"transfer {self.transfer}{who} ({self.num_blocks} blocks)"
        what = f"ticket {self.ticket}" if self.ticket else f"request {self.request_id}"
        return f"session {self.session_name or self.session_id} {what} ({self.num_blocks} blocks)"


Holder = TypeVar("Holder", BlockHolder, SessionHold)


def largest(holders: Iterable[Holder], count: int = HOLDERS_MAX) -> tuple[Holder, ...]:
    """The ``count`` that hold the most, the most first."""
    return tuple(nlargest(count, holders, key=attrgetter("num_blocks")))


def block_holders(depot: Depot, scope: ResetScope | None = None) -> Iterator[BlockHolder]:
    """Every holder of blocks, of the scope's content only when there is one."""
    for session in depot.sessions.values():
        for request in session.requests.values():
            if scope is not None and not scope.matches(request.extra):
                continue
            tables = session.manager.coordinator.get_blocks(request.request_id)
            num_blocks = sum(not block.is_null for table in tables for block in table)
            if num_blocks:
                yield BlockHolder(
                    session.session_id, session.name, request.request_id, 0, num_blocks
                )
        for ticket, detached in session.tickets.items():
            if scope is None or scope.matches(detached.extra):
                yield BlockHolder(
                    session.session_id, session.name, "", ticket, len(detached.blocks)
                )
    for transfer in depot.transfers.by_id.values():
        num_blocks = sum(
            scope is None
            or (block.block_hash is not None and scope.matches(depot.pool.extra_of(block)))
            for block in transfer.blocks
        )
        if num_blocks:
            shown = transfer.transfer_id[:ID_SHOWN]
            yield BlockHolder("", transfer.name, "", 0, num_blocks, shown)
    for found in depot.imports.by_id.values():
        # What hashes are of is not known before it is here.
        extra = None if found.request is None else found.request.extra
        num_blocks = len(found.blocks)
        if num_blocks and (scope is None or extra is None or scope.matches(extra)):
            yield BlockHolder("", found.peer, "", 0, num_blocks, found.import_id[:ID_SHOWN])


def explained(depot: Depot, refusal: NoFit) -> NoFit:
    """The refusal, with who holds the blocks: the sessions that keep the most of them from
    the others, departed ones among them, and what transfers and imports keep.

    Costs time per request, little: refusals are an everyday answer.
    """
    holds = [
        SessionHold(session.session_id, session.name, num_blocks)
        for session in depot.sessions.values()
        if (num_blocks := session.num_blocks + session.view.num_held_blocks)
    ]
    holds += [
        SessionHold(session.session_id, session.name, num_blocks, departed=True)
        for session in depot.departed.values()
        if (num_blocks := session.view.num_held_blocks)
    ]
    pins = depot.pool.pins
    num_filling = len(pins.idle & pins.filling)
    return replace(
        refusal,
        holders=largest(holds),
        pinned_blocks=len(pins.idle) - num_filling,
        in_transfer_blocks=num_filling,
    )
