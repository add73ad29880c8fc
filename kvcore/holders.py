"""Who holds the blocks: by request, for a reset that must wait, and by session, for a
refused allocation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from kvcore.operation import SessionHold

if TYPE_CHECKING:
    from kvcore.depot import Depot
    from kvcore.reset import ResetScope

HOLDERS_MAX = 8


@dataclass(frozen=True, slots=True)
class BlockHolder:
    """Blocks in use by one request, or (``ticket`` not 0) detached."""

    session_id: str
    session_name: str
    request_id: str
    ticket: int
    num_blocks: int

    def __str__(self) -> str:
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


def session_holds(depot: Depot) -> tuple[SessionHold, ...]:
    """The sessions that keep the most blocks from the others, departed ones among them.

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
    return largest(holds)
