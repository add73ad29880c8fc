"""Admissions: slots for requests that do not run yet, and for whatever growth cannot ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvclient.facade.growth import LazyGrowth
from kvclient.facade.known import KnownRequest
from kvclient.facade.outbox import Outbox
from kvclient.session_tables import SessionTables
from kvclient.values import (
    BlockTables,
    Content,
    FreeMode,
    Outcome,
    PoolDescription,
    SlotRequest,
    SlotResult,
)


class Admissions:
    """AllocateSlots as it is asked for, and the tables that begin with its answer.

    ``content`` gives what the server does not have of a request's tokens.
    """

    def __init__(
        self,
        pool: PoolDescription,
        tables: SessionTables,
        outbox: Outbox,
        known: dict[str, KnownRequest],
        growth: LazyGrowth | None,
        content: Callable[[Any], Content | None],
    ) -> None:
        self._sizes = pool.table_block_sizes
        self._tables = tables
        self._outbox = outbox
        self._known = known
        self._growth = growth
        self._content = content

    def ask(self, request: Any, slots: SlotRequest) -> BlockTables | None:
        """Slots, waited for; the blocks that are new in the request's tables, None for none."""
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
        known = self._known.get(request.request_id)
        if known is None:
            known = self._known[request.request_id] = KnownRequest(result.handle)
        known.num_tokens = request.num_tokens
        if (
            asked.lookup
            and result.outcome is Outcome.OK
            and result.num_new_computed_tokens != slots.num_new_computed_tokens
        ):
            self._outbox.give_back(result.handle, FreeMode.PREEMPT)
            return None  # the hit has changed
        return self.begin(request, known, slots, result)

    def begin(
        self, request: Any, known: KnownRequest, slots: SlotRequest, result: SlotResult
    ) -> BlockTables | None:
        """As ``ask``, of an answer that is here."""
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
