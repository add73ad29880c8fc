"""vLLM's KVCacheManager over a session. A vLLM 0.25.1 Scheduler takes it as its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from kvclient.errors import BlocksInUse, InvalidArgument, KVDepotError, NotFound
from kvclient.facade.admission import Admissions
from kvclient.facade.blocks import BlockPool, DetachedBlock, KVCacheBlocks
from kvclient.facade.books import Books
from kvclient.facade.growth import LazyGrowth, is_certain
from kvclient.facade.known import KnownRequest
from kvclient.facade.offers import Offers
from kvclient.facade.operation import Ask
from kvclient.facade.outbox import Outbox
from kvclient.facade.stats import Coordinator
from kvclient.introduce import introduction
from kvclient.session import Session
from kvclient.values import (
    BlockTables,
    Content,
    FreeMode,
    Outcome,
    ResetMode,
    SlotRequest,
    SlotResult,
    StepMark,
)


class KVCacheManager(Books):
    """The cache of one scheduler, kept by a server.

    ``request`` is a vLLM Request or has its attributes. Block tables, common prefixes and
    statistics are this side's.

    ``strict``: every call is sent and waited for, and every decision is vLLM's. Otherwise
    (lazy) a running request's growth is answered from blocks that were asked for a step
    ahead, in one message a step; a growth that the pool refused ahead is asked for again,
    and waited for, when it is needed. A lookup is waited for, and takes the slots that the
    scheduler is expected to ask for next, so that an admission is one message; frees and
    confirmations go with the next message. What then differs from vLLM:

    - A running request holds the next step's block, at most one a group, from the end of
      the step before on; one whose prompt is computed in parts, the next part's, at most the
      token budget's. So blocks are taken in another order, and in a short pool
      somebody may be preempted, or admitted, a step sooner or later.
    - Blocks that leave an attention window are free when their request is next heard of:
      at most one block a group later.
    - Full blocks become hits before the next lookup or at the end of the step, whichever
      comes first; in a short pool, or when the tokens are known late (asynchronous
      scheduling), with the step after.
    - A request that was looked up holds its hit and its slots, as many as the step's token
      budget has room for, until it is admitted. If something else is asked for it is admitted
      so, in a second message; if nothing is, what it holds is free with the next message, and
      none of it is a hit. So blocks are evicted in another order. The server counts its
      next lookup as one after a preemption.
    - ``usage`` is that of the last answer, and blocks held ahead count.

    Groups of states, of encoder tokens, and of kinds that are none of vLLM's make all
    growth and all admissions strict.

    ``max_num_batched_tokens`` and ``max_num_seqs`` are the scheduler's own limits. Without
    the first a budget is guessed from what it asks for. ``prefetch`` tells of requests
    that wait: then all that a step admits, within these limits, is one message.

    ``steps_in_flight`` is how many steps the scheduler runs ahead (1: synchronous, 2:
    vLLM's AsyncScheduler), each begun by ``new_step_starts``; other sessions and peers read
    a block when its step has ended. None: each call ends what was before it, which only a
    scheduler may say whose workers write what a call gave before the next one is made; then
    no slots are taken with a lookup.

    CacheLost passes through: make a new one over the reopened session, and admit the
    requests again. It is raised as well by all calls after a message was refused that held
    more than the caller's own admission: what the requests hold is then not known.

    Not here: events come from the server's stream, so ``take_events`` has none;
    ``coordinator`` has only what a Scheduler without connectors reads.
    """

    def __init__(
        self,
        session: Session,
        *,
        strict: bool = False,
        log_stats: bool = True,
        steps_in_flight: int | None = 1,
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int | None = None,
    ) -> None:
        if steps_in_flight is not None and steps_in_flight < 1:
            raise InvalidArgument("at least one step is in flight", field="steps_in_flight")
        super().__init__(session, log_stats=log_stats)
        self.strict = strict
        self.block_pool = BlockPool(self.return_ticket)
        self.coordinator = Coordinator()
        self._stream = session.step_stream()
        self._steps_in_flight = steps_in_flight
        self._step = 1
        # Tokens of the present step so far.
        self._num_scheduled = 0
        self._detached: dict[int, BlockTables] = {}
        # Handles and tables of what was popped and whose ticket is not heard of yet.
        self._popped: dict[str, list[tuple[int, BlockTables]]] = {}
        self._growth: LazyGrowth | None = None
        self._outbox = Outbox(
            self._stream,
            self._mark,
            self._answered,
            self._unheard,
            step_operations_max=session.step_operations_max,
        )
        self._offers: Offers | None = None
        if not strict and is_certain(session.pool):
            self._growth = LazyGrowth(session.pool, self._tables, self._outbox)
            if steps_in_flight is not None:
                self._offers = Offers(
                    session.pool,
                    self._outbox,
                    self._known,
                    self._content,
                    max_num_batched_tokens=max_num_batched_tokens,
                    max_num_seqs=max_num_seqs,
                )
        self._admissions = Admissions(
            session,
            self._tables,
            self._outbox,
            self._known,
            self._growth,
            self._offers,
            content=self._content,
            mark=self._mark,
        )

    def close(self) -> None:
        """Sends what is queued, if the server can be reached, and ends the stream.

        The session, and what it holds, stay.
        """
        with contextlib.suppress(KVDepotError):
            self._outbox.settle()
        self._stream.close()

    # --- what is sent -----------------------------------------------------------------

    def new_step_starts(self) -> None:
        """The next scheduler step begins. What the one before asked ahead is sent by now."""
        self._outbox.flush()
        self._outbox.collect()
        self._num_scheduled = 0
        if self._growth is not None and self._offers is not None:
            self._growth.part_max = self._offers.budget or 0
        self._step += 1

    def flush(self) -> None:
        """Sends what is queued; a Scheduler need not, it calls something that does."""
        self._outbox.flush()

    def settle(self) -> None:
        """As ``flush``, and waits until all that was sent is answered."""
        self._outbox.settle()

    def prefetch(self, request: Any) -> None:
        """A hint: the request waits, behind those that were hinted at before.

        Its tokens go to the server with a message that nobody waits for, and what a step
        admits of hinted requests is one message. Nothing else changes; ``free`` ends it.
        """
        if self._offers is not None:
            self._offers.hint(request)

    def get_computed_blocks(self, request: Any) -> tuple[KVCacheBlocks, int]:
        """The longest cached prefix, at most ``num_tokens - 1``. Takes no reference."""
        hit = self._admissions.look_up(request, self._num_scheduled)
        self.coordinator.num_uncached_common_prefix_tokens = hit.num_uncached_common_prefix_tokens
        num_tokens = hit.num_computed_tokens
        stats = self.prefix_cache_stats
        if stats is not None and self.enable_caching and not request.skip_reading_prefix_cache:
            stats.record(request.num_tokens, num_tokens, request.num_preemptions > 0)
        return self._blocks(hit.blocks), num_tokens

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        *,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> KVCacheBlocks | None:
        """The new blocks, or None when they do not fit now.

        None as well when the hit has changed meanwhile, or a reset waits for what runs.
        """
        known = self._known.get(request.request_id)
        if known is not None and not (
            num_external_computed_tokens
            or delay_cache_blocks
            or full_sequence_must_fit
            or reserved_blocks
            or num_encoder_tokens
        ):
            if (
                request.num_computed_tokens + num_new_tokens < known.quiet_end
                and num_lookahead_tokens == known.lookahead
            ):
                self._num_scheduled += num_new_tokens
                return self.empty_kv_cache_blocks
            if known.running:
                self._num_scheduled += num_new_tokens
                growth = self._growth
                if growth is None:
                    return self._grow(request, known, num_new_tokens, num_lookahead_tokens)
                new_blocks = growth.grow(request, known, num_new_tokens, num_lookahead_tokens)
                if new_blocks is growth.nothing:
                    return self.empty_kv_cache_blocks
                return None if new_blocks is None else KVCacheBlocks(new_blocks)
        slots = SlotRequest(
            request.request_id,
            num_computed_tokens=request.num_computed_tokens,
            num_new_tokens=num_new_tokens,
            num_new_computed_tokens=num_new_computed_tokens if new_computed_blocks else 0,
            num_lookahead_tokens=num_lookahead_tokens,
            num_external_computed_tokens=num_external_computed_tokens,
            delay_cache_blocks=delay_cache_blocks,
            full_sequence_must_fit=full_sequence_must_fit,
            reserved_blocks=reserved_blocks,
            has_scheduled_reqs=has_scheduled_reqs,
            num_encoder_tokens=num_encoder_tokens,
        )
        new_blocks = self._admissions.admit(request, slots, self._num_scheduled)
        if new_blocks is None:
            return None
        self._num_scheduled += num_new_tokens
        return self._blocks(new_blocks)

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Makes the full blocks within ``num_computed_tokens`` hits, as written."""
        known = self._known.get(request.request_id)
        if known is None:
            return
        if self._growth is not None and known.running:
            if num_computed_tokens < known.confirm_end:
                return
            if self._growth.confirm(known, num_computed_tokens):
                return
        content = self._content(request)
        if content is not None:
            self._outbox.flush()
            self.session.cache_blocks(
                request.request_id, num_computed_tokens, content, mark=self._mark()
            )
            self._sent(request, known.handle)
            return
        self._outbox.cache(known, num_computed_tokens)
        self._outbox.exchange()

    def free(self, request: Any) -> None:
        """Gives the blocks back. A request that has not finished keeps its tokens there."""
        mode = FreeMode.FINISH if request.is_finished() else FreeMode.PREEMPT
        if self._offers is not None:
            self._offers.forget(request.request_id)
        known = self._known.get(request.request_id)
        if known is None:
            return
        if known.num_asked:
            self._outbox.collect()  # what was refused ahead registers its full blocks first
        self._outbox.free(known, mode)
        if mode is FreeMode.FINISH:
            del self._known[request.request_id]
        self._tables.drop(self._end_table(known))
        # Last, as it may raise: what is queued is done all the same.
        if self.strict:
            self._outbox.exchange()
        elif self._tables.num_requests == 0:
            # Nothing runs, so no message need follow that would carry it.
            self._outbox.flush()

    def pop_blocks_for_free(self, request: Any) -> list[DetachedBlock]:
        """Ends the request, and keeps its blocks off the pool until they are freed.

        After an error, asked again: it answers what it would have answered.
        """
        request_id = request.request_id
        if self._offers is not None:
            self._offers.forget(request_id)
        known = self._known.get(request_id)
        if known is not None:
            if known.num_asked:
                self._outbox.collect()
            self._outbox.free(known, FreeMode.DETACH)
            del self._known[request_id]
            ended = known.handle, self._end_table(known)
            self._popped.setdefault(request_id, []).append(ended)
        if request_id not in self._popped:
            return []
        self._outbox.exchange()
        blocks = []
        for handle, table in self._popped.pop(request_id):
            ticket = self._outbox.tickets.pop(handle, 0)
            if not ticket:
                self._tables.drop(table)
            else:
                self._detached[ticket] = table
                blocks += [DetachedBlock(block_id, ticket) for group in table for block_id in group]
        return blocks

    def return_ticket(self, ticket: int) -> None:
        """Gives popped blocks back to the pool, tail first; a no-op if that was done.

        After an error, asked again: they are given back once.
        """
        if ticket not in self._detached:
            return
        self._outbox.flush()
        try:
            self.session.return_blocks(ticket, mark=self._mark())
        except NotFound as error:
            # It was done, and that was not heard.
            if error.reason != "UNKNOWN_TICKET":
                raise
        self._tables.drop(self._detached.pop(ticket))
        self._outbox.forget_free_blocks()

    def reset_prefix_cache(
        self, mode: ResetMode | str = ResetMode.REFUSE, timeout_s: float | None = None
    ) -> bool:
        """Empties the prefix cache; False, and nothing is done, while blocks are in use.

        See ``Session.reset_prefix_cache`` for the other modes; a drain that takes longer
        than ``timeout_s`` answers False too.
        """
        self._outbox.settle()
        try:
            self.session.reset_prefix_cache(mode, timeout_s=timeout_s, mark=self._mark())
        except BlocksInUse:
            return False
        self._outbox.forget_free_blocks()
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Takes these blocks out of the prefix cache; who holds one keeps it."""
        self._outbox.settle()
        # The null block has no content, and is in tables all the same.
        self.session.client.evict_blocks(block_id for block_id in block_ids if block_id)

    @property
    def usage(self) -> float:
        """Share of the pool that is in use, from 0 to 1, at the last Step's answer."""
        num_free = self._outbox.num_free_blocks
        if num_free is None:
            num_free = self._outbox.exchange().free_blocks
        return 1.0 - num_free / (self.session.pool.num_blocks - 1)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Leading blocks that all this session's requests share, by group.

        None where blocks leave the tables of running requests. A Scheduler asks this when it
        has scheduled a step: what the step asks ahead is sent now.
        """
        self._outbox.flush()
        known = self._known.get(running_request_id)
        if known is None or known.tables is None:
            return [0] * self.num_kv_cache_groups
        return self._tables.num_common_prefix_blocks(known.tables.blocks)

    # --- inside -----------------------------------------------------------------------

    def _grow(
        self, request: Any, known: KnownRequest, num_new_tokens: int, num_lookahead_tokens: int
    ) -> KVCacheBlocks | None:
        """Growth that is sent and waited for."""
        content = self._content(request) or Content(token_offset=known.num_tokens)
        assert isinstance(content.tokens, bytes)
        ask = Ask(
            known,
            request.num_computed_tokens,
            num_new_tokens,
            num_lookahead_tokens,
            content.token_offset,
            content.tokens,
        )
        self._outbox.grow(ask)
        self._outbox.exchange()
        self._sent(request, known.handle)
        assert known.tables is not None
        known.tables.skip(request.num_computed_tokens)
        if ask.outcome is not Outcome.OK:
            return None
        new_blocks, known.reserve = known.reserve, ()
        self._tables.grow(known.tables, new_blocks)
        return self._blocks(new_blocks)

    def _answered(self, asks: list[Ask]) -> None:
        if self._growth is not None:
            self._growth.answered(asks)
            return
        for ask in asks:
            if ask.outcome is Outcome.OK and ask.life == ask.known.life:
                ask.known.hold(ask.new_blocks)

    def _unheard(self, result: SlotResult) -> None:
        """Its caller knows nothing of it, and may ask again: it must find all as it was."""
        if result.outcome is not Outcome.OK:
            return
        known = next((k for k in self._known.values() if k.handle == result.handle), None)
        if known is not None and known.tables is not None:
            known.hold(result.new_blocks)
        else:
            mode = FreeMode.FINISH if known is None else FreeMode.PREEMPT
            self._outbox.give_back(result.handle, mode)
            if known is not None:
                known.was_offered = True  # the server remembers its lookup no more

    def _mark(self) -> StepMark | None:
        if self._steps_in_flight is None:
            return None
        return StepMark(self._step, max(0, self._step - self._steps_in_flight))

    def _content(self, request: Any) -> Content | None:
        """What the server does not have of the request's tokens."""
        known = self._known.get(request.request_id)
        return introduction(
            request,
            None if known is None else known.num_tokens,
            self.session.pool.hash_block_size,
        )

    def _sent(self, request: Any, handle: int) -> None:
        known = self._known.get(request.request_id)
        if known is None:
            known = self._known[request.request_id] = KnownRequest(handle)
        known.num_tokens = request.num_tokens

    def _end_table(self, known: KnownRequest) -> BlockTables:
        tables = known.tables
        known.end()
        return self.empty_kv_cache_blocks.blocks if tables is None else self._tables.end(tables)
