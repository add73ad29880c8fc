"""One pool shared by sessions: every operation of the service, as plain calls.

Each operation either does all it says or raises and has changed nothing (but what
tokens the request holds). Expected outcomes are values.
"""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass

from kvcore.block import KVCacheBlock
from kvcore.block_pool import BlockPool
from kvcore.check import check
from kvcore.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from kvcore.events import BlockStored, Event
from kvcore.hashing import make_scheme
from kvcore.manager import KVCacheBlocks, KVCacheManager
from kvcore.operation import (
    Content,
    FreeMode,
    FreeResult,
    Hit,
    Outcome,
    SlotRequest,
    SlotResult,
    Step,
    StepResult,
)
from kvcore.request import NO_EXTRA_KEYS, Request, RequestStatus
from kvcore.residency import ResidencySampler
from kvcore.session import REQUEST_ID_BYTES_MAX, Session, check_tokens
from kvcore.spec import DepotConfig
from kvcore.step import apply_step

HANDLE_MAX = (1 << 31) - 1
HOLDERS_NAMED = 5


@dataclass(frozen=True, slots=True)
class DepotStats:
    """Where the pool stands. Token counts are since the start."""

    num_blocks: int
    live: int
    cached: int
    quarantined: int
    free: int
    usage: float
    num_sessions: int
    num_requests: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preempted_queries: int
    preempted_hits: int
    evictions: int
    refusals: int
    generation: int


class Depot:
    """The state of one server's life; single-threaded, and it never waits."""

    def __init__(self, config: DepotConfig) -> None:
        try:
            self.scheme = make_scheme(config.hash_scheme, config.hash_seed)
        except ValueError as error:
            raise InvalidArgument(str(error), field="hash_scheme") from None
        self.config = config
        self.epoch = secrets.token_hex(8)
        # Counts resets.
        self.generation = 0
        rate = config.residency_sample_rate
        self.residency = ResidencySampler(rate) if rate > 0 else None
        self.pool = BlockPool(
            config.kv_cache,
            enable_caching=config.enable_caching,
            publish_events=config.publish_events,
            residency=self.residency,
        )
        self.sessions: dict[str, Session] = {}
        self.num_refusals = 0
        self._last_handle = 0
        self._last_ticket = 0
        # Lookups of sessions that are closed: queries, hits, and both of preempted ones.
        self._past_lookups = [0, 0, 0, 0]

    # --- sessions ---------------------------------------------------------------------

    def open_session(self, name: str, fingerprint: str = "") -> Session:
        """A new session. A fingerprint that is not the pool's is FailedPrecondition."""
        if fingerprint and fingerprint != self.config.fingerprint:
            raise FailedPrecondition(
                f"the pool's fingerprint is {self.config.fingerprint}, not {fingerprint}: model, "
                "dtype, block size or hash scheme differ",
                reason="FINGERPRINT_MISMATCH",
                field="fingerprint",
            )
        if len(self.sessions) >= self.config.max_sessions:
            raise ResourceExhausted(
                f"{len(self.sessions)} sessions are open, the maximum",
                reason="TOO_MANY_SESSIONS",
                retryable=True,
            )
        manager = KVCacheManager(
            self.config, self.pool, self.pool.open_view(), track_new_block_ids=False
        )
        session = Session(str(uuid.uuid4()), name, manager=manager, config=self.config)
        self.sessions[session.session_id] = session
        return session

    def session(self, session_id: str, epoch: str) -> Session:
        """An open session. One of another epoch is FailedPrecondition."""
        if epoch and epoch != self.epoch:
            raise FailedPrecondition(
                "the session belongs to an earlier life of the server; its state is gone: "
                "open a new one",
                reason="STALE_EPOCH",
                field="context.epoch",
                current_epoch=self.epoch,
            )
        session = self.sessions.get(session_id)
        if session is None:
            raise NotFound(
                f"session {session_id!r} is not open",
                reason="UNKNOWN_SESSION",
                field="context.session_id",
            )
        return session

    def close_session(self, session: Session) -> int:
        """Free all that the session holds; the number of its requests.

        Content that was confirmed stays and can be hit; what was not, is forgotten.
        """
        session.view.forget_pending()
        for request in session.requests.values():
            session.manager.free(request)
        for blocks in session.tickets.values():
            session.manager.return_blocks(blocks)
        session.tickets.clear()
        self.pool.close_view(session.view)
        del self.sessions[session.session_id]
        self._past_lookups = self._lookups(session, self._past_lookups)
        return len(session.requests)

    # --- operations -------------------------------------------------------------------

    def get_computed_blocks(
        self, session: Session, request_id: str, content: Content | None
    ) -> Hit:
        """Look up the longest cached prefix that the session may read."""
        request = self._request(session, request_id, content)
        if session.holds_blocks(request):
            raise InvalidArgument(
                f"request {request_id!r} holds blocks already; only a waiting or preempted "
                "one looks up",
                field="request_id",
            )
        blocks, num_tokens = session.manager.get_computed_blocks(request)
        request.remembered_hit_tokens = num_tokens
        return Hit(num_tokens, blocks.block_ids, request.handle)

    def allocate_slots(
        self, session: Session, slots: SlotRequest, budget: int | None = None
    ) -> SlotResult:
        """Slots for one request, with its hit; see operation.SlotRequest.

        ``budget`` is what a Step leaves to schedule, in tokens.
        """
        request = self._request(session, slots.request_id, slots.content)
        return self._allocate(session, request, slots, budget)

    def cache_blocks(
        self, session: Session, request_id: str, content: Content | None, num_computed_tokens: int
    ) -> bool:
        """Register and confirm the full blocks within ``num_computed_tokens``.

        False, and nothing is done, if the request is not known (any more).
        """
        request = session.requests.get(request_id)
        if request is None:
            return False
        if content is not None:
            session.write_tokens(request, content.token_offset, content.tokens)
        self.confirm_computed(session, request, num_computed_tokens)
        return True

    def confirm_computed(
        self, session: Session, request: Request, num_computed_tokens: int
    ) -> None:
        """As cache_blocks, of a known request."""
        for limit, name in (
            (request.num_tokens, "tokens"),
            (session.num_slots(request), "token slots"),
        ):
            if not 0 <= num_computed_tokens <= limit:
                raise InvalidArgument(
                    f"num_computed_tokens {num_computed_tokens}: the request has {limit} {name}",
                    field="num_computed_tokens",
                )
        session.manager.cache_blocks(request, num_computed_tokens)
        session.confirm(request, num_computed_tokens)

    def free(
        self, session: Session, request_id: str, mode: FreeMode, did_not_run: bool
    ) -> FreeResult:
        """End or preempt a request. An unknown one is a no-op."""
        request = session.requests.get(request_id)
        if request is None:
            return FreeResult(known=False)
        return FreeResult(known=True, ticket=self.free_request(session, request, mode, did_not_run))

    def free_request(
        self, session: Session, request: Request, mode: FreeMode, did_not_run: bool
    ) -> int:
        """As free, of a known request; the ticket, or 0."""
        if did_not_run:
            session.forget_unwritten(request)
        if mode is FreeMode.PREEMPT:
            session.manager.free(request)
            request.status = RequestStatus.PREEMPTED
            request.num_preemptions += 1
            request.forget_progress()
            return 0
        session.remove(request)
        if mode is FreeMode.FINISH:
            session.manager.free(request)
            return 0
        blocks = session.manager.pop_blocks_for_free(request)
        if not blocks:
            return 0
        self._last_ticket += 1
        session.tickets[self._last_ticket] = blocks
        return self._last_ticket

    def return_blocks(self, session: Session, ticket: int) -> int:
        """Give back the blocks of a detached request; how many they are."""
        blocks = session.tickets.pop(ticket, None)
        if blocks is None:
            raise NotFound(
                f"ticket {ticket} is not outstanding", reason="UNKNOWN_TICKET", field="ticket"
            )
        session.manager.return_blocks(blocks)
        return len(blocks)

    def reset_prefix_cache(self) -> int:
        """Forget all content; the new generation. FailedPrecondition while blocks are in use."""
        if not self.pool.reset(self.generation + 1):
            raise FailedPrecondition(
                f"blocks are in use: {self._holders()}",
                reason="BLOCKS_IN_USE",
                retryable=True,
            )
        self.generation += 1
        return self.generation

    def step(self, session: Session, step: Step) -> StepResult:
        """All operations of one scheduler step, in order."""
        return apply_step(self, session, step)

    # --- what is here -----------------------------------------------------------------

    def take_truth_events(self) -> list[Event]:
        """Content that everybody can read now, or no longer, since the last call."""
        return self.pool.take_truth_events()

    def snapshot(self) -> list[BlockStored]:
        """All readable content, a block each, a parent before its children."""
        ready: dict[tuple[int, bytes], KVCacheBlock] = {}
        for group, index in enumerate(self.pool.indexes):
            for block_hash in index.entries:
                for block in index.copies(block_hash):
                    if block.pending_view is None and block.content is not None:
                        ready[group, block_hash] = block
                        break
        events: list[BlockStored] = []
        emitted: set[tuple[int, bytes]] = set()
        for key in ready:
            chain: list[KVCacheBlock] = []
            at: tuple[int, bytes] | None = key
            while at is not None and at in ready and at not in emitted:
                emitted.add(at)
                block = ready[at]
                chain.append(block)
                assert block.content is not None
                parent = block.content[0]
                at = None if parent is None else (block.group, parent)
            events.extend(self.pool.stored_event(block) for block in reversed(chain))
        return events

    def locate(self, block_hash: bytes, group: int) -> tuple[str, int]:
        """ "ready", "pending" or "missing", and the block id (0 if missing)."""
        pending = 0
        for block in self.pool.indexes[group].copies(block_hash):
            if block.pending_view is None:
                return "ready", block.block_id
            pending = block.block_id
        return ("pending", pending) if pending else ("missing", 0)

    def stats(self) -> DepotStats:
        """Costs time per session, and per block held back."""
        states = self.pool.states()
        lookups = self._past_lookups
        for session in self.sessions.values():
            lookups = self._lookups(session, lookups)
        return DepotStats(
            num_blocks=len(self.pool.blocks),
            live=states.live,
            cached=states.cached,
            quarantined=states.quarantined,
            free=states.free,
            usage=self.pool.usage,
            num_sessions=len(self.sessions),
            num_requests=sum(len(session.requests) for session in self.sessions.values()),
            prefix_cache_queries=lookups[0],
            prefix_cache_hits=lookups[1],
            preempted_queries=lookups[2],
            preempted_hits=lookups[3],
            evictions=self.pool.num_evictions,
            refusals=self.num_refusals,
            generation=self.generation,
        )

    def audit(self) -> list[str]:
        """Every invariant that is broken. Costs time per block."""
        return check(self)

    # --- inside -----------------------------------------------------------------------

    def _request(self, session: Session, request_id: str, content: Content | None) -> Request:
        """The request, introduced or extended by ``content``."""
        request = session.requests.get(request_id)
        if request is not None:
            if content is not None:
                if content.extra is not None and content.extra != request.extra:
                    raise AlreadyExists(
                        f"request {request_id!r} is in use with other extra keys",
                        reason="REQUEST_EXISTS",
                        field="content.extra_keys",
                    )
                if content.token_offset == 0:
                    self._check_same_start(request, content)
                session.write_tokens(request, content.token_offset, content.tokens)
            return request
        if not request_id or len(request_id.encode()) > REQUEST_ID_BYTES_MAX:
            raise InvalidArgument(
                f"a request id has 1 to {REQUEST_ID_BYTES_MAX} bytes", field="request_id"
            )
        if content is None or content.token_offset != 0:
            raise NotFound(
                f"request {request_id!r} is not known; introduce it with its tokens",
                reason="UNKNOWN_REQUEST",
                field="request_id",
            )
        return self._introduce(session, request_id, content)

    @staticmethod
    def _check_same_start(request: Request, content: Content) -> None:
        num_bytes = min(len(content.tokens), len(request.tokens))
        with memoryview(request.tokens) as held:
            if held[:num_bytes] != content.tokens[:num_bytes]:
                raise AlreadyExists(
                    f"request {request.request_id!r} is in use with other tokens; free it first",
                    reason="REQUEST_EXISTS",
                    field="content.tokens",
                )

    def _introduce(self, session: Session, request_id: str, content: Content) -> Request:
        check_tokens(content.tokens)
        if not content.tokens:
            raise InvalidArgument("a request begins with a token", field="content.tokens")
        num_prompt_tokens = content.num_prompt_tokens
        if num_prompt_tokens is not None and not (
            0 < num_prompt_tokens <= self.config.max_request_tokens
        ):
            raise InvalidArgument(
                f"num_prompt_tokens {num_prompt_tokens} is not in "
                f"1..{self.config.max_request_tokens}",
                field="content.num_prompt_tokens",
            )
        if self._last_handle == HANDLE_MAX:
            raise ResourceExhausted("no handles are left in this epoch", reason="NO_HANDLES")
        extra = NO_EXTRA_KEYS if content.extra is None else content.extra
        request = Request(
            request_id,
            hash_chain=(
                self.scheme.chain(self.config.block_size, extra)
                if self.config.enable_caching
                else None
            ),
            extra=extra,
            lora_id=content.lora_id,
            num_prompt_tokens=num_prompt_tokens,
            skip_reading_prefix_cache=content.skip_reading_prefix_cache,
            handle=self._last_handle + 1,
        )
        session.write_tokens(request, 0, content.tokens)
        session.add(request)
        self._last_handle += 1
        return request

    def _allocate(
        self, session: Session, request: Request, slots: SlotRequest, budget: int | None
    ) -> SlotResult:
        manager = session.manager
        running = session.holds_blocks(request)
        held_slots = session.num_slots(request) if running else 0
        if slots.num_computed_tokens > min(held_slots, request.num_tokens):
            raise InvalidArgument(
                f"num_computed_tokens {slots.num_computed_tokens}: the request has "
                f"{request.num_tokens} tokens and {held_slots} slots",
                field="num_computed_tokens",
            )
        claimed = slots.num_new_computed_tokens
        if running and (claimed or slots.lookup):
            raise InvalidArgument(
                "a request that holds blocks has no new hit",
                field="lookup" if slots.lookup else "num_new_computed_tokens",
            )

        hit: KVCacheBlocks | None = None
        if slots.lookup:
            hit, claimed = manager.get_computed_blocks(request)
        elif claimed:
            if claimed > request.remembered_hit_tokens or claimed % self.config.block_size:
                raise InvalidArgument(
                    f"num_new_computed_tokens {claimed}: the last lookup answered "
                    f"{request.remembered_hit_tokens}, and a hit is whole blocks",
                    field="num_new_computed_tokens",
                )
            hit, num_found = manager.find_computed_blocks(request)
            if num_found < claimed:
                request.remembered_hit_tokens = num_found
                return SlotResult(
                    Outcome.HIT_CHANGED,
                    num_new_computed_tokens=num_found,
                    hit_blocks=hit.block_ids,
                    handle=request.handle,
                )
            if num_found > claimed:
                hit = KVCacheBlocks(
                    tuple(group[: claimed // self.config.block_size] for group in hit.blocks)
                )

        num_external = slots.num_external_computed_tokens
        if running and num_external:
            raise InvalidArgument(
                "external tokens are given when the request is admitted",
                field="num_external_computed_tokens",
            )
        num_computed = slots.num_computed_tokens + claimed + num_external
        if num_computed > request.num_tokens:
            raise InvalidArgument(
                f"{num_computed} tokens computed, of {request.num_tokens}",
                field="num_external_computed_tokens",
            )
        num_new = self._num_new_tokens(request, slots, num_computed, budget)
        if num_new is None:
            return SlotResult(
                Outcome.NO_BUDGET, num_new_computed_tokens=claimed, handle=request.handle
            )
        if num_computed + num_new > self.config.max_model_len:
            raise InvalidArgument(
                f"{num_computed} + {num_new} tokens exceed max_model_len "
                f"{self.config.max_model_len}",
                field="num_new_tokens",
            )

        new_blocks = session.allocate(
            request,
            slots.num_computed_tokens,
            num_new,
            claimed,
            hit,
            num_lookahead_tokens=slots.num_lookahead_tokens,
            num_external_computed_tokens=num_external,
            delay_cache_blocks=slots.delay_cache_blocks,
            full_sequence_must_fit=slots.full_sequence_must_fit,
            reserved_blocks=slots.reserved_blocks,
            has_scheduled_reqs=slots.has_scheduled_reqs,
        )
        if new_blocks is None:
            self.num_refusals += 1
            return SlotResult(
                Outcome.NO_FIT,
                num_new_computed_tokens=claimed,
                handle=request.handle,
                no_fit=manager.last_refusal,
            )
        request.num_computed_tokens = num_computed
        request.remembered_hit_tokens = 0
        if not slots.delay_cache_blocks:
            # Until external bytes are here the request still waits, as in vLLM.
            request.status = RequestStatus.RUNNING
        return SlotResult(
            Outcome.OK,
            num_new_computed_tokens=claimed,
            num_new_tokens=num_new,
            hit_blocks=manager.empty_kv_cache_blocks.block_ids if hit is None else hit.block_ids,
            # Of external tokens too: all that is new in the table.
            new_blocks=(
                self._table_from(session, request, claimed)
                if num_external
                else new_blocks.block_ids
            ),
            handle=request.handle,
        )

    @staticmethod
    def _num_new_tokens(
        request: Request, slots: SlotRequest, num_computed: int, budget: int | None
    ) -> int | None:
        """The tokens to compute; None if the budget leaves none."""
        if slots.num_new_tokens is not None:
            if slots.num_new_tokens == 0 and slots.num_external_computed_tokens == 0:
                raise InvalidArgument(
                    "num_new_tokens must be greater than 0 without external tokens",
                    field="num_new_tokens",
                )
            fits = budget is None or slots.num_new_tokens <= budget
            return slots.num_new_tokens if fits else None
        num_left = request.num_tokens - num_computed
        if num_left == 0 and slots.num_external_computed_tokens == 0:
            raise InvalidArgument("every token is computed already", field="num_computed_tokens")
        num_new = num_left
        for limit in (slots.max_new_tokens, budget):
            if limit is not None:
                num_new = min(num_new, limit)
        if num_new < num_left and slots.new_tokens_alignment > 1:
            num_new -= num_new % slots.new_tokens_alignment
        return num_new if num_new > 0 or num_left == 0 else None

    def _table_from(
        self, session: Session, request: Request, num_tokens: int
    ) -> tuple[list[int], ...]:
        first = num_tokens // self.config.block_size
        tables = session.manager.get_block_ids(request.request_id)
        return tuple([table[first:] for table in tables])

    def _holders(self) -> str:
        holders = [
            f"session {session.name or session.session_id} request {request.request_id} "
            f"({num_blocks} blocks)"
            for session in self.sessions.values()
            for request in session.requests.values()
            if (num_blocks := sum(map(len, session.manager.get_block_ids(request.request_id))))
        ]
        holders += [
            f"session {session.name or session.session_id} ticket {ticket} ({len(blocks)} blocks)"
            for session in self.sessions.values()
            for ticket, blocks in session.tickets.items()
        ]
        named = "; ".join(holders[:HOLDERS_NAMED])
        rest = len(holders) - HOLDERS_NAMED
        return f"{named}; and {rest} more" if rest > 0 else named

    @staticmethod
    def _lookups(session: Session, before: list[int]) -> list[int]:
        stats = session.manager.prefix_cache_stats
        counts = (stats.queries, stats.hits, stats.preempted_queries, stats.preempted_hits)
        return [past + count for past, count in zip(before, counts, strict=True)]
