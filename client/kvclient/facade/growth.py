"""Lazy growth: blocks are asked for a step ahead, and handed over without asking.

A request's step is told to the server when it fills a block, or when the next step will
need one: with the tokens since the last time, and one block a group more than the step
itself needs. The answer comes while the step runs.
"""

from __future__ import annotations

import math
from typing import Any

from kvclient.description import PoolDescription
from kvclient.facade.known import NEVER, KnownRequest
from kvclient.facade.operation import Ask
from kvclient.facade.outbox import Outbox
from kvclient.session_tables import SessionTables
from kvclient.values import BlockTables, Outcome, token_bytes

_KINDS = (
    "full_attention",
    "mla_attention",
    "sliding_window",
    "sliding_window_mla",
    "chunked_local_attention",
)
_OK = Outcome.OK


def is_certain(pool: PoolDescription) -> bool:
    """Whether tokens alone say which blocks a request has, in every group.

    Not so of states, of encoder tokens, and of kinds that are none of vLLM's.
    """
    return bool(pool.groups) and all(group.kind in _KINDS for group in pool.groups)


class LazyGrowth:
    """Growth of running requests, answered here as far as their blocks are here."""

    def __init__(self, pool: PoolDescription, tables: SessionTables, outbox: Outbox) -> None:
        self._sizes = pool.table_block_sizes
        self._max_model_len = pool.max_model_len
        self._caches = pool.enable_prefix_caching
        # A full block of some group ends only at a multiple of this.
        self._unit = math.gcd(*self._sizes)
        # Of the only group, if there is but one: then all is simpler.
        self._size = self._sizes[0] if len(self._sizes) == 1 else 0
        # Drafts beyond this are not asked ahead: never more than one block a group.
        self._ahead_max = min(self._sizes)
        self._tables = tables
        self._outbox = outbox
        # Of a prompt that is computed in parts, the next part is asked ahead, up to this.
        self.part_max = 0
        self.nothing: BlockTables = tuple([] for _ in self._sizes)

    def begin(
        self, request: Any, known: KnownRequest, num_computed: int, num_new: int, lookahead: int
    ) -> None:
        """The request was admitted, or its growth sent: what it holds is in its tables."""
        assert known.tables is not None
        known.reserve = tuple([] for _ in self._sizes)
        sizes = zip(known.tables.blocks, self._sizes, strict=True)
        held_end = self._unless_last(min([len(table) * size for table, size in sizes]))
        known.table_end = known.held_end = known.asked_end = held_end
        end = min(num_computed + num_new, request.num_tokens)
        known.register_end = (end // self._unit + 1) * self._unit if self._caches else NEVER
        known.confirm_end = (num_computed // self._unit + 1) * self._unit
        known.skip_end = known.tables.next_skip(num_computed)
        self._plan(request, known, num_computed, num_new, lookahead)

    def grow(
        self, request: Any, known: KnownRequest, num_new: int, lookahead: int
    ) -> BlockTables | None:
        """The blocks that are new in the request's table; None when they do not fit now."""
        num_computed: int = request.num_computed_tokens
        if num_computed >= known.skip_end:
            assert known.tables is not None
            known.tables.skip(num_computed)
            known.skip_end = known.tables.next_skip(num_computed)
        need = num_computed + num_new + lookahead
        if need > self._max_model_len:
            need = self._max_model_len
        new_blocks = self.nothing
        if need > known.table_end:
            if need > known.held_end and known.num_asked:
                self._outbox.wait_for(known)
            if need > known.held_end:
                ask = self._ask(request, known, num_computed, num_new, lookahead)
                self._outbox.grow(ask)
                self._outbox.exchange(with_ahead=False)
                if need > known.held_end:
                    return None
            new_blocks = self._hand_over(known, need)
        self._plan(request, known, num_computed, num_new, lookahead)
        return new_blocks

    def confirm(self, known: KnownRequest, num_tokens: int) -> bool:
        """Queues that the full blocks within ``num_tokens`` are written.

        False, and nothing is done, if their tokens were not sent.
        """
        full = num_tokens // self._unit * self._unit
        if full > known.num_tokens:
            return False
        if self._outbox.has_ahead(known):
            self._outbox.flush()
        self._outbox.cache(known, full)
        known.confirm_end = full + self._unit
        return True

    def answered(self, asks: list[Ask]) -> None:
        """The server answered: the blocks are the requests', if they still are the same."""
        for ask in asks:
            known = ask.known
            if known.life != ask.life:
                continue
            known.num_asked -= 1
            if ask.outcome is not _OK:
                self._refused(ask)
                continue
            for held, new in zip(known.reserve, ask.new_blocks, strict=True):
                held += new
            if ask.end > known.held_end:
                known.held_end = ask.end

    def _refused(self, ask: Ask) -> None:
        known = ask.known
        if known.num_asked == 0:
            known.asked_end = known.held_end
        # It is asked again when it is needed, and then waited for.
        known.quiet_end = 0
        if ask.is_ahead and ask.registers:
            # What fits in any case: the full blocks of the step become hits.
            again = Ask(known, ask.num_computed, ask.num_scheduled, ask.lookahead, 0, b"")
            known.num_asked += 1
            self._outbox.grow(again)

    def _hand_over(self, known: KnownRequest, end: int) -> BlockTables:
        """From the reserve into the tables, as far as ``end`` tokens need it."""
        tables = known.tables
        assert tables is not None
        if size := self._size:
            table, reserve = tables.blocks[0], known.reserve[0]
            missing = -(-end // size) - len(table)
            given = reserve[:missing]
            del reserve[:missing]
            self._tables.extend(tables, 0, given)
            end = len(table) * size
            known.table_end = end if end < self._max_model_len else NEVER
            return (given,)
        new_blocks, table_end = [], NEVER
        for group, (table, size) in enumerate(zip(tables.blocks, self._sizes, strict=True)):
            missing = -(-end // size) - len(table)
            given = []
            if missing > 0:
                reserve = known.reserve[group]
                given = reserve[:missing]
                del reserve[:missing]
                self._tables.extend(tables, group, given)
            new_blocks.append(given)
            if len(table) * size < table_end:
                table_end = len(table) * size
        known.table_end = self._unless_last(table_end)
        return tuple(new_blocks)

    def _plan(
        self, request: Any, known: KnownRequest, num_computed: int, num_new: int, lookahead: int
    ) -> None:
        """Queues what the server must hear of this step, and says until when all is quiet."""
        end = registrable = num_computed + num_new
        num_ahead = 0
        num_tokens = request.num_tokens
        if end >= num_tokens:
            registrable = num_tokens
            num_ahead = num_new if num_new <= self._ahead_max else 1
        registers = registrable >= known.register_end
        if registers or end + num_ahead + lookahead > known.asked_end:
            num_asked = num_new + num_ahead
            if num_asked > self._max_model_len - num_computed:
                num_asked = self._max_model_len - num_computed
            if registers or num_asked > num_new:
                ask = self._ask(request, known, num_computed, num_asked, lookahead)
                ask.is_ahead = num_asked > num_new
                ask.num_scheduled = num_new
                ask.registers = registers
                self._outbox.ask_ahead(ask)
        if self.part_max and end < num_tokens:
            self._ask_part(request, known, num_computed, num_new, lookahead)
        known.lookahead = lookahead
        quiet_end = known.asked_end - num_ahead
        if quiet_end > known.table_end:
            quiet_end = known.table_end
        quiet_end -= lookahead
        if quiet_end > known.skip_end:
            quiet_end = known.skip_end
        quiet_end += 1
        if quiet_end > known.register_end:
            quiet_end = known.register_end
        known.quiet_end = quiet_end

    def _ask_part(
        self, request: Any, known: KnownRequest, num_computed: int, num_new: int, lookahead: int
    ) -> None:
        """Queues slots for the next part of a prompt, as lookahead: nothing of it is a hit."""
        end = num_computed + num_new
        lookahead += min(request.num_tokens - end, self.part_max)
        if end + lookahead > known.asked_end and self._outbox.takes_part(lookahead):
            ask = self._ask(request, known, num_computed, num_new, lookahead)
            ask.is_ahead = True
            self._outbox.ask_part(ask)

    def _ask(
        self, request: Any, known: KnownRequest, num_computed: int, num_new: int, lookahead: int
    ) -> Ask:
        num_sent, num_tokens = known.num_tokens, request.num_tokens
        # Tokens that went away are cut off.
        offset = num_sent if num_sent < num_tokens else num_tokens
        tokens = b""
        if offset < num_tokens:
            tokens = token_bytes(request.all_token_ids[offset:num_tokens])
        known.num_tokens = num_tokens
        ask = Ask(known, num_computed, num_new, lookahead, offset, tokens)
        end = num_computed + num_new
        registrable = end if end < num_tokens else num_tokens
        if registrable >= known.register_end:
            known.register_end = (registrable // self._unit + 1) * self._unit
        end += lookahead
        if size := self._size:
            end = -(-end // size) * size
        else:
            end = min([-(-end // size) * size for size in self._sizes])
        ask.end = end = end if end < self._max_model_len else NEVER
        if end > known.asked_end:
            known.asked_end = end
        known.num_asked += 1
        return ask

    def _unless_last(self, end: int) -> int:
        """``end``; beyond all tokens once no request can be longer."""
        return end if end < self._max_model_len else NEVER
