"""One pool shared by sessions: every operation of the service, as plain calls.

Each operation either does all it says or raises and has changed nothing (but what
tokens the request holds). Expected outcomes are values.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Sequence

from kvcore.admission import admit
from kvcore.check import check
from kvcore.content import find_request, write_tokens
from kvcore.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from kvcore.feed import Entry, StoredBlocks
from kvcore.hashing import SCHEMES, make_scheme
from kvcore.holders import BlockHolder, block_holders, explained, largest
from kvcore.imports import Imports, import_running
from kvcore.listing import RequestInfo, SessionInfo, list_requests, list_sessions
from kvcore.manager import KVCacheManager
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
from kvcore.poison import make_block_pool
from kvcore.request import Request, RequestStatus
from kvcore.reset import ResetMode, ResetResult, Resets, ResetScope
from kvcore.residency import ResidencySampler
from kvcore.session import DetachedBlocks, Session
from kvcore.single_type import manager_class_for
from kvcore.snapshot import snapshot
from kvcore.spec import DepotConfig
from kvcore.stats import DepotStats, add_lookups, depot_stats
from kvcore.step import apply_step
from kvcore.transfer import Transfers

NAME_BYTES_MAX = 1024


def check_name(name: str) -> None:
    """InvalidArgument if the name of a session or a worker is too long to be shown."""
    if len(name.encode()) > NAME_BYTES_MAX:
        raise InvalidArgument(f"a name has at most {NAME_BYTES_MAX} bytes", field="name")


class Depot:
    """The state of one server's life; single-threaded, and it never waits.

    ``poison`` fills blocks, by id, before they are handed out; see PoisoningBlockPool.
    """

    def __init__(
        self, config: DepotConfig, *, poison: Callable[[Sequence[int]], None] | None = None
    ) -> None:
        try:
            self.scheme = make_scheme(config.hash_scheme, config.hash_seed)
        except ValueError as error:
            field = "hash_seed" if config.hash_scheme in SCHEMES else "hash_scheme"
            raise InvalidArgument(str(error), field=field) from None
        for group in config.kv_cache.groups:
            manager_class_for(group.manager_spec)  # or refuse it here
        self.config = config
        self.epoch = secrets.token_hex(8)
        self.resets = Resets(self)
        rate = config.residency_sample_rate
        self.residency = ResidencySampler(rate) if rate > 0 else None
        self.pool = make_block_pool(
            config.kv_cache,
            poison,
            publish_events=True,
            medium=config.medium,
            residency=self.residency,
        )
        self.transfers = Transfers(self)
        self.imports = Imports(self)
        self.sessions: dict[str, Session] = {}
        # Sessions that are over while workers attached under them remain. They hold no
        # blocks, but their views hold back what they freed.
        self.departed: dict[str, Session] = {}
        self.num_refusals = 0
        self.last_handle = 0
        self._last_ticket = 0
        # Lookups of sessions that are closed: queries, hits, and both of preempted ones.
        self.past_lookups = [0, 0, 0, 0]

    # --- sessions ---------------------------------------------------------------------

    def open_session(self, name: str, fingerprint: str = "") -> Session:
        """A new session. A fingerprint that is not the pool's is FailedPrecondition."""
        check_name(name)
        self.require_fingerprint(fingerprint)
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

    def require_fingerprint(self, fingerprint: str) -> None:
        """FailedPrecondition unless it is the pool's, or empty."""
        if fingerprint and fingerprint != self.config.fingerprint:
            raise FailedPrecondition(
                f"the pool's fingerprint is {self.config.fingerprint}, not {fingerprint}: model, "
                "dtype, block size or hash scheme differ",
                reason="FINGERPRINT_MISMATCH",
                field="fingerprint",
            )

    @property
    def generation(self) -> int:
        """Counts resets."""
        return self.resets.generation

    def session(self, session_id: str, epoch: str, within: str = "context.") -> Session:
        """An open session. One of another epoch is FailedPrecondition.

        ``within`` is where, in the caller's request, the two fields are.
        """
        if epoch and epoch != self.epoch:
            raise FailedPrecondition(
                "the session belongs to an earlier life of the server; its state is gone: "
                "open a new one",
                reason="STALE_EPOCH",
                field=f"{within}epoch",
                current_epoch=self.epoch,
            )
        session = self.sessions.get(session_id)
        if session is None:
            raise NotFound(
                f"session {session_id!r} is not open",
                reason="UNKNOWN_SESSION",
                field=f"{within}session_id",
            )
        return session

    def close_session(self, session: Session) -> int:
        """Free all that the session holds; the number of its requests.

        Content that was confirmed stays and can be hit, and is evicted last; what was
        not, is forgotten. While workers are attached under the session they may still
        write: until the last is detached, or end_quarantine, its blocks are held back
        from the other sessions.
        """
        num_requests = len(session.requests)
        view = session.view
        view.forget_pending()
        if session.num_workers:
            view.depart()
        for request in session.requests.values():
            session.manager.free(request)
        for detached in session.tickets.values():
            session.manager.return_blocks(detached.blocks)
        session.forget_all()
        del self.sessions[session.session_id]
        if session.num_workers:
            self.departed[session.session_id] = session
        else:
            self.pool.close_view(view)
        self.past_lookups = add_lookups(session, self.past_lookups)
        self.resets.settle()
        return num_requests

    def attach_worker(self, session: Session) -> None:
        """One more worker writes under an open session."""
        if session.num_workers >= self.config.max_workers_per_session:
            raise ResourceExhausted(
                f"{session.num_workers} workers are attached under the session, its maximum",
                reason="TOO_MANY_WORKERS",
                retryable=True,
            )
        session.num_workers += 1

    def detach_worker(self, session: Session) -> None:
        """A worker is gone, and writes no more. The last one's end ends a quarantine."""
        session.num_workers -= 1
        assert session.num_workers >= 0
        if not session.num_workers:
            self.end_quarantine(session)

    def end_quarantine(self, session: Session) -> bool:
        """What a departed session held is everybody's; False if it is not (any more) one."""
        if self.departed.pop(session.session_id, None) is None:
            return False
        self.pool.close_view(session.view)
        return True

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
        if self.holds_off(request):
            request.remembered_hit_tokens = 0
            return Hit(0, session.manager.empty_kv_cache_blocks.block_ids, request.handle)
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
        self,
        session: Session,
        slots: SlotRequest,
        budget: int | None = None,
        *,
        name_holders: bool = True,
    ) -> SlotResult:
        """Slots for one request, with its hit; see operation.SlotRequest.

        ``budget`` is what a Step leaves to schedule, in tokens. ``name_holders``: a
        refusal says who holds the blocks.
        """
        request = find_request(self, session, slots.request_id, slots.content)
        result = admit(self, session, request, slots, budget)
        if name_holders and result.outcome is Outcome.NO_FIT:
            assert result.no_fit is not None
            return result._replace(no_fit=explained(self, result.no_fit))
        return result

    def holds_off(self, request: Request) -> bool:
        """Whether a reset waits for the request's content to be out of use."""
        drain = self.resets.drain
        return drain is not None and drain.holds_off(request.extra)

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
        if request.importing is not None:
            raise import_running(request)
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
        ticket = self.free_request(session, request, mode, did_not_run)
        self.resets.settle()
        return FreeResult(known=True, ticket=ticket)

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
        session.tickets[self._last_ticket] = DetachedBlocks(blocks, request.extra)
        return self._last_ticket

    def return_blocks(self, session: Session, ticket: int) -> int:
        """Give back the blocks of a detached request; how many they are."""
        detached = session.tickets.pop(ticket, None)
        if detached is None:
            raise NotFound(
                f"ticket {ticket} is not outstanding", reason="UNKNOWN_TICKET", field="ticket"
            )
        session.manager.return_blocks(detached.blocks)
        self.resets.settle()
        return len(detached.blocks)

    def reset_prefix_cache(
        self, mode: ResetMode = ResetMode.REFUSE, scope: ResetScope | None = None
    ) -> ResetResult:
        """Forget all content, or the scope's; a new generation begins.

        While blocks (of the scope) are in use, REFUSE raises FailedPrecondition, and
        names the holders. DRAIN answers that it is pending: nothing is admitted (in
        the scope) and no lookup hits until the call that frees the last block, which
        resets. FORCE resets all the same: what holds blocks goes on with them, but
        registers none any more until preempted and admitted anew.
        """
        return self.resets.reset(mode, scope)

    def drain_state(self, drain_id: int) -> ResetResult:
        """How a drain stands. NotFound if it is not known (any more)."""
        return self.resets.state(drain_id)

    def abandon_drain(self, drain_id: int) -> bool:
        """Give up a drain; False if it is not pending."""
        return self.resets.abandon(drain_id)

    def evict_blocks(self, block_ids: Sequence[int]) -> int:
        """Make blocks no hits any more; how many were. InvalidArgument if one is no block."""
        blocks = self.pool.blocks
        hits = {i for i in block_ids if 0 <= i < len(blocks) and blocks[i].block_hash is not None}
        self.pool.evict_blocks(block_ids)
        return len(hits)

    def step(self, session: Session, step: Step) -> StepResult:
        """All operations of one scheduler step, in order."""
        result = self.answer_step(session, step)
        self.finish_step(session)
        return result

    def answer_step(self, session: Session, step: Step) -> StepResult:
        """As ``step``, but for what no answer depends on: finish_step must come next."""
        return apply_step(self, session, step)

    def finish_step(self, session: Session) -> None:
        """The rest of a Step."""
        session.finish_growth()
        self.resets.settle()

    # --- what is here -----------------------------------------------------------------

    def take_feed(self) -> list[Entry]:
        """Content that everybody can read now, or no longer, since the last call."""
        return self.pool.truth_feed.take()

    def snapshot(self) -> list[StoredBlocks]:
        """All readable content, a parent before its children. Costs time per block."""
        return snapshot(self.pool)

    def stats(self) -> DepotStats:
        """Costs time per session, and per block held back."""
        return depot_stats(self)

    def list_sessions(self) -> list[SessionInfo]:
        """Every session, open ones first, oldest first. Costs time per request."""
        return list_sessions(self)

    def list_requests(
        self, session_id: str | None = None, limit: int = 1000, after_handle: int = 0
    ) -> list[RequestInfo]:
        """At most ``limit`` requests after a handle, of one session or of all, oldest first."""
        return list_requests(self, session_id, limit, after_handle)

    def holders(self, limit: int = 100) -> tuple[BlockHolder, ...]:
        """Who has blocks in use, the most first. Costs time per block in use."""
        return largest(block_holders(self), limit)

    def audit(self) -> list[str]:
        """Every invariant that is broken. Costs time per block."""
        return check(self)
