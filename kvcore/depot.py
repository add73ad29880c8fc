"""One pool shared by sessions: every operation of the service, as plain calls.

Each operation either does all it says or raises and has changed nothing (but what
tokens the request holds). Expected outcomes are values.
"""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass

from kvcore.admission import admit
from kvcore.block import KVCacheBlock
from kvcore.block_pool import BlockPool
from kvcore.check import check
from kvcore.content import find_request, write_tokens
from kvcore.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from kvcore.events import BlockStored, Event
from kvcore.hashing import make_scheme
from kvcore.manager import KVCacheManager
from kvcore.operation import (
    Content,
    FreeMode,
    FreeResult,
    Hit,
    SlotRequest,
    SlotResult,
    Step,
    StepResult,
)
from kvcore.request import Request, RequestStatus
from kvcore.residency import ResidencySampler
from kvcore.session import Session
from kvcore.single_type import manager_class_for
from kvcore.spec import DepotConfig
from kvcore.step import apply_step

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
        for group in config.kv_cache.groups:
            manager_class_for(group.manager_spec)  # or refuse it here
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
        self.last_handle = 0
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
        request = find_request(self, session, request_id, content)
        if session.holds_blocks(request):
            raise InvalidArgument(
                f"request {request_id!r} holds blocks already; only a waiting or preempted "
                "one looks up",
                field="request_id",
            )
        blocks, num_tokens = session.manager.get_computed_blocks(request)
        request.remembered_hit_tokens = num_tokens
        coordinator = session.manager.coordinator
        return Hit(
            num_tokens,
            blocks.block_ids,
            request.handle,
            0
            if request.skip_reading_prefix_cache
            else coordinator.num_uncached_common_prefix_tokens,
        )

    def allocate_slots(
        self, session: Session, slots: SlotRequest, budget: int | None = None
    ) -> SlotResult:
        """Slots for one request, with its hit; see operation.SlotRequest.

        ``budget`` is what a Step leaves to schedule, in tokens.
        """
        request = find_request(self, session, slots.request_id, slots.content)
        return admit(self, session, request, slots, budget)

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
            write_tokens(session, request, content.token_offset, content.tokens)
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
        popped = session.manager.pop_blocks_for_free(request)
        blocks = [block for block in popped if not block.is_null]
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
                    content = self.pool.content_of(block, block_hash)
                    if block.pending_view is None and content is not None:
                        ready[group, block_hash] = block
                        break
        events: list[BlockStored] = []
        emitted: set[tuple[int, bytes]] = set()
        for key in ready:
            chain: list[tuple[KVCacheBlock, bytes]] = []
            at: tuple[int, bytes] | None = key
            while at is not None and at in ready and at not in emitted:
                emitted.add(at)
                block = ready[at]
                chain.append((block, at[1]))
                content = self.pool.content_of(block, at[1])
                assert content is not None
                parent = content[0]
                at = None if parent is None else (block.group, parent)
            events.extend(
                self.pool.stored_event(block, block_hash) for block, block_hash in reversed(chain)
            )
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

    def _holders(self) -> str:
        holders = [
            f"session {session.name or session.session_id} request {request.request_id} "
            f"({num_blocks} blocks)"
            for session in self.sessions.values()
            for request in session.requests.values()
            if (num_blocks := session.num_blocks(request))
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
