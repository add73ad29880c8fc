"""Lookups and admissions of requests that do not run yet, and whatever growth cannot ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvclient.facade.growth import LazyGrowth
from kvclient.facade.known import KnownRequest
from kvclient.facade.offers import Offers
from kvclient.facade.outbox import Outbox
from kvclient.session import Session
from kvclient.session_tables import SessionTables
from kvclient.values import (
    BlockTables,
    Content,
    FreeMode,
    Hit,
    Outcome,
    SlotRequest,
    SlotResult,
    StepMark,
)


class Admissions:
    """What was offered, or else is asked for; and the tables that begin with it.

    ``content`` gives what the server does not have of a request's tokens.
    """

    def __init__(
        self,
        session: Session,
        tables: SessionTables,
        outbox: Outbox,
        known: dict[str, KnownRequest],
        growth: LazyGrowth | None,
        offers: Offers | None,
        *,
        content: Callable[[Any], Content | None],
        mark: Callable[[], StepMark | None],
    ) -> None:
        self._session = session
        self._sizes = session.pool.table_block_sizes
        self._tables = tables
        self._outbox = outbox
        self._known = known
        self._growth = growth
        self._offers = offers
        self._content = content
        self._mark = mark

    def look_up(self, request: Any, num_scheduled: int) -> Hit:
        """The longest cached prefix; ``num_scheduled`` tokens are in the step so far."""
        request_id = request.request_id
        if self._offers is not None:
            offered = self._offers.look_up(
                request, num_running=self._tables.num_requests, num_scheduled=num_scheduled
            )
            if offered is not None:
                num_tokens = offered.num_new_computed_tokens
                return Hit(num_tokens, offered.hit_blocks, offered.handle)
            self._offers.settle(request_id)
        self._outbox.flush()
        hit = self._session.get_computed_blocks(
            request_id, self._content(request), mark=self._mark()
        )
        self._note(request, hit.handle).was_offered = False
        return hit

    def admit(self, request: Any, slots: SlotRequest, num_scheduled: int) -> BlockTables | None:
        """The blocks that are new in the request's tables, None if there are no slots for it."""
        offers = self._offers
        if offers is None:
            return self._ask(request, slots)
        offered = offers.take(request.request_id, slots, num_scheduled)
        if offered is not None:
            new_blocks = self._begin(request, self._known[request.request_id], slots, offered)
        else:
            offers.settle(request.request_id)
            new_blocks = self._ask(request, slots)
        if new_blocks is not None:
            offers.admitted(request.request_id, num_scheduled + (slots.num_new_tokens or 0))
        return new_blocks

    def _note(self, request: Any, handle: int) -> KnownRequest:
        known = self._known.get(request.request_id)
        if known is None:
            known = self._known[request.request_id] = KnownRequest(handle)
        known.num_tokens = request.num_tokens
        return known

    def _ask(self, request: Any, slots: SlotRequest) -> BlockTables | None:
        """Waits for the answer."""
        self._outbox.hear()  # of what went unheard, before this is asked: it may say it again
        known = self._known.get(request.request_id)
        asked = replace(slots, content=self._content(request))
        if known is not None:
            self._outbox.wait_for(known)
            if known.was_offered and slots.num_new_computed_tokens:
                # What the server looked up with the offer went back with it.
                asked = replace(asked, lookup=True, num_new_computed_tokens=0)
        result = self._outbox.exchange(asked).admissions[0]
        if result.outcome is Outcome.NO_BUDGET:
            return None  # the server has not looked at it
        known = self._note(request, result.handle)
        if (
            asked.lookup
            and result.outcome is Outcome.OK
            and result.num_new_computed_tokens != slots.num_new_computed_tokens
        ):
            self._outbox.give_back(result.handle, FreeMode.PREEMPT)
            return None  # the hit has changed
        return self._begin(request, known, slots, result)

    def _begin(
        self, request: Any, known: KnownRequest, slots: SlotRequest, result: SlotResult
    ) -> BlockTables | None:
        """Of an answer that is here."""
        num_external = slots.num_external_computed_tokens
        num_computed = slots.num_computed_tokens + slots.num_new_computed_tokens + num_external
        if known.tables is not None:
            known.tables.skip(num_computed)
        if result.outcome is not Outcome.OK:
            return None
        known.running = known.running or not slots.delay_cache_blocks
        known.was_offered = known.was_refused = False
        new_blocks = result.new_blocks
        num_held = [len(blocks) for blocks in result.hit_blocks] or [0] * len(self._sizes)
        if known.tables is None:
            known.tables = self._tables.begin(
                request.num_prompt_tokens,
                result.hit_blocks,
                new_blocks,
                num_computed,
                num_external,
            )
        else:
            # Those held ahead come first in the server's table.
            if any(known.reserve):
                known.hold(new_blocks)
                new_blocks, known.reserve = known.reserve, ()
            self._tables.grow(known.tables, new_blocks)
        if self._growth is not None and known.running:
            self._growth.begin(
                request,
                known,
                num_computed,
                slots.num_new_tokens or 0,
                slots.num_lookahead_tokens,
            )
        if num_external == 0:
            return new_blocks
        # Blocks for external tokens are in the table; new ones are those for what follows.
        return tuple(
            blocks[max(0, -(-num_computed // block_size) - held) :]
            for blocks, block_size, held in zip(new_blocks, self._sizes, num_held, strict=True)
        )
