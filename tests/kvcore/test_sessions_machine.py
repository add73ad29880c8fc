"""Random sessions on one pool: every invariant after each call, a true mirror, and no hit
on what was computed before a reset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from building import (
    content,
    full,
    groups_config,
    make_depot,
    mamba,
    token_bytes,
    truth_events,
    window,
)
from kvcore.block import KVCacheBlock
from kvcore.check import check
from kvcore.depot import Depot
from kvcore.errors import FailedPrecondition
from kvcore.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvcore.feed import events_of
from kvcore.hashing import ExtraKeys
from kvcore.operation import Content, FreeMode, Outcome, SlotRequest
from kvcore.request import Request, RequestStatus
from kvcore.reset import ResetMode, ResetScope
from kvcore.session import Session

BLOCK_SIZE = 2
NUM_SESSIONS = 3


class Sessions(RuleBasedStateMachine):
    """Schedulers that pipeline, share prompts, preempt, detach, die and reset.

    Their workers may outlive them. The model knows of every block under which
    generation's weights its bytes were computed: those of its request's admission.
    """

    def __init__(self) -> None:
        super().__init__()
        self.depot = self.make_depot()
        self.sessions: list[Session] = [self._open() for _ in range(NUM_SESSIONS)]
        self.steps = [(0, 0)] * NUM_SESSIONS
        self.mirror: set[tuple[int, bytes]] = set()
        # Oldest generation whose content may be read, by LoRA name.
        self.floors: dict[str | None, int] = {None: 0, "A": 0}
        self.seen_generation = 0
        self.drain_scope: ResetScope | None = None
        # By block id, and by handle.
        self.block_generations: dict[int, int] = {}
        self.request_generations: dict[int, int] = {}
        # Sessions by attached worker, and what the workers of departed ones may write.
        self.workers: list[Session] = []
        self.written_by_workers: dict[str, set[int]] = {}

    def make_depot(self) -> Depot:
        return make_depot(14, BLOCK_SIZE)

    def _raise_floors(self, scope: ResetScope | None) -> None:
        """A reset is done."""
        self.seen_generation += 1
        assert self.depot.generation == self.seen_generation
        for lora_name in self.floors:
            if scope is None or scope.matches(ExtraKeys(lora_name=lora_name)):
                self.floors[lora_name] = self.seen_generation

    def _check_hit(self, request: Request, hit: Iterable[Sequence[int]]) -> set[int]:
        """A hit is of no generation that a reset has ended; its blocks."""
        block_ids = set().union(*hit) - {0}
        for block_id in block_ids:
            assert self.block_generations[block_id] >= self.floors[request.extra.lora_name]
        return block_ids

    def _note_blocks(self, request: Request, session: Session, before: set[int]) -> None:
        """What was allocated beyond ``before`` is written by this request."""
        generation = self.request_generations[request.handle]
        for block_id in _held(session, request.request_id) - before:
            self.block_generations[block_id] = generation

    def _open(self) -> Session:
        return self.depot.open_session("")

    @rule(who=st.integers(0, NUM_SESSIONS - 1), lag=st.integers(0, 2))
    def next_step(self, who: int, lag: int) -> None:
        step, completed = self.steps[who]
        self.steps[who] = (step + 1, max(completed, step + 1 - lag))
        self.sessions[who].begin(*self.steps[who])

    @rule(
        who=st.integers(0, NUM_SESSIONS - 1),
        name=st.sampled_from("abc"),
        prompt=st.sampled_from([(0, 5), (0, 9), (0, 4), (7, 12)]),
        chunk=st.integers(1, 9),
        external=st.sampled_from([0, 0, 2, 4]),
        lora_name=st.sampled_from([None, None, "A"]),
    )
    def admit(
        self,
        who: int,
        name: str,
        prompt: tuple[int, int],
        chunk: int,
        external: int,
        lora_name: str | None,
    ) -> None:
        session = self.sessions[who]
        known = session.requests.get(name)
        if known is not None and session.holds_blocks(known):
            return
        introduced = None
        if known is None:
            tokens = token_bytes(range(*prompt))
            introduced = Content(tokens=tokens, extra=ExtraKeys(lora_name=lora_name))
        free_before = self.depot.pool.num_free_blocks(session.view)
        drain = self.depot.resets.drain
        result = self.depot.allocate_slots(
            session,
            SlotRequest(
                name,
                introduced,
                lookup=not external,
                max_new_tokens=chunk,
                num_new_tokens=0 if external else None,
                num_external_computed_tokens=external,
                delay_cache_blocks=external > 0,
            ),
        )
        request = session.requests[name]
        held_off = drain is not None and drain.holds_off(request.extra)
        assert (result.outcome is Outcome.RESETTING) == held_off
        if result.outcome is Outcome.OK:
            self.request_generations[request.handle] = self.depot.generation
            self._note_blocks(request, session, self._check_hit(request, result.hit_blocks))
            return
        assert result.outcome in (Outcome.NO_FIT, Outcome.RESETTING)
        assert self.depot.pool.num_free_blocks(session.view) == free_before
        if result.no_fit is not None:
            sizes = [holder.num_blocks for holder in result.no_fit.holders]
            assert sizes == sorted(sizes, reverse=True)

    @rule(who=st.integers(0, NUM_SESSIONS - 1), name=st.sampled_from("abc"))
    def look_up(self, who: int, name: str) -> None:
        session = self.sessions[who]
        request = session.requests.get(name)
        if request is None or session.holds_blocks(request):
            return
        hit = self.depot.get_computed_blocks(session, name, None)
        if self.depot.holds_off(request):
            assert hit.num_computed_tokens == 0
        self._check_hit(request, hit.blocks)

    @rule(who=st.integers(0, NUM_SESSIONS - 1), name=st.sampled_from("abc"))
    def grow(self, who: int, name: str) -> None:
        session = self.sessions[who]
        request = session.requests.get(name)
        if request is None or request.status is not RequestStatus.RUNNING:
            return
        num_computed = min(request.num_tokens, session.num_slots(request))
        before = _held(session, name)
        self.depot.allocate_slots(
            session,
            SlotRequest(
                name,
                content([who], request.num_tokens),
                num_computed_tokens=num_computed,
                num_new_tokens=1,
            ),
        )
        self._note_blocks(request, session, before)

    @rule(who=st.integers(0, NUM_SESSIONS - 1), name=st.sampled_from("abc"))
    def confirm(self, who: int, name: str) -> None:
        session = self.sessions[who]
        request = session.requests.get(name)
        if request is not None:
            self.depot.cache_blocks(session, name, None, request.num_computed_tokens)

    @rule(
        who=st.integers(0, NUM_SESSIONS - 1),
        name=st.sampled_from("abc"),
        mode=st.sampled_from(FreeMode),
        did_not_run=st.booleans(),
    )
    def free(self, who: int, name: str, mode: FreeMode, did_not_run: bool) -> None:
        self.depot.free(self.sessions[who], name, mode, did_not_run)

    @precondition(lambda self: any(session.tickets for session in self.sessions))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from([s for s in self.sessions if s.tickets]))
        self.depot.return_blocks(session, data.draw(st.sampled_from(sorted(session.tickets))))

    @rule(who=st.integers(0, NUM_SESSIONS - 1))
    def die(self, who: int) -> None:
        session = self.sessions[who]
        # What it shares with another session had been confirmed.
        shared = {
            block.block_id
            for other in self.sessions
            if other is not session
            for block in self._blocks_of(other)
        }
        unfinished = {
            block.block_id
            for block in self._blocks_of(session)
            if block.block_hash is None or block.pending_view is not None
        } - shared
        self.depot.close_session(session)
        if session in self.workers:
            self.written_by_workers[session.session_id] = unfinished
        self.sessions[who] = self._open()
        self.steps[who] = (0, 0)

    def _blocks_of(self, session: Session) -> Iterator[KVCacheBlock]:
        for name in session.requests:
            for table in session.manager.get_blocks(name).blocks:
                yield from (block for block in table if not block.is_null)
        for detached in session.tickets.values():
            yield from detached.blocks

    @rule(who=st.integers(0, NUM_SESSIONS - 1))
    def attach(self, who: int) -> None:
        if len(self.workers) < 4:
            self.depot.attach_worker(self.sessions[who])
            self.workers.append(self.sessions[who])

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def worker_ends(self, data: st.DataObject) -> None:
        session = self.workers.pop(data.draw(st.integers(0, len(self.workers) - 1)))
        self.depot.detach_worker(session)
        if session not in self.workers:
            self.written_by_workers.pop(session.session_id, None)

    @precondition(lambda self: self.depot.departed)
    @rule(data=st.data())
    def quarantine_is_over(self, data: st.DataObject) -> None:
        # In the order they left: session ids are random.
        departed = list(self.depot.departed.values())
        session = departed[data.draw(st.integers(0, len(departed) - 1))]
        assert self.depot.end_quarantine(session)
        self.written_by_workers.pop(session.session_id)

    @rule(
        mode=st.sampled_from(ResetMode),
        scope=st.sampled_from([None, ResetScope(lora_name="A"), ResetScope(lora_name="")]),
    )
    def reset(self, mode: ResetMode, scope: ResetScope | None) -> None:
        drain = self.depot.resets.drain
        try:
            result = self.depot.reset_prefix_cache(mode, scope)
        except FailedPrecondition:
            if mode is ResetMode.DRAIN:
                assert drain is not None
                assert drain.scope != scope
            else:
                assert mode is ResetMode.REFUSE
                assert self._num_in_use(scope)
            return
        if result.done:
            assert mode is ResetMode.FORCE or not self._num_in_use(scope)
            self._raise_floors(scope)
        else:
            assert result.holders
            self.drain_scope = scope

    def _num_in_use(self, scope: ResetScope | None) -> int:
        """Requests and tickets that hold blocks of the scope."""
        return sum(
            scope is None or scope.matches(extra)
            for session in self.sessions
            for extra in (
                *(
                    request.extra
                    for request in session.requests.values()
                    if _held(session, request.request_id)
                ),
                *(detached.extra for detached in session.tickets.values()),
            )
        )

    @precondition(lambda self: self.depot.resets.drain is not None)
    @rule()
    def the_drain_is_late(self) -> None:
        drain = self.depot.resets.drain
        assert drain is not None
        assert self.depot.abandon_drain(drain.drain_id)
        assert self.depot.drain_state(drain.drain_id).abandoned

    @rule(block_ids=st.sets(st.integers(1, 13), max_size=3))
    def evict(self, block_ids: set[int]) -> None:
        self.depot.pool.evict_blocks(block_ids)

    @invariant()
    def nothing_is_broken(self) -> None:
        assert check(self.depot) == []

    @invariant()
    def no_hit_is_older_than_a_reset(self) -> None:
        if self.depot.generation != self.seen_generation:
            self._raise_floors(self.drain_scope)  # the call freed what the drain waited for
        for block in self.depot.pool.blocks:
            if block.block_hash is not None:
                floor = self.floors[self.depot.pool.extra_of(block).lora_name]
                assert self.block_generations[block.block_id] >= floor

    @invariant()
    def nobody_holds_what_a_worker_may_write(self) -> None:
        assert self.written_by_workers.keys() == self.depot.departed.keys()
        for written in self.written_by_workers.values():
            for session in self.sessions:
                for name in session.requests:
                    assert not written & _held(session, name)

    @invariant()
    def followers_know_what_is_here(self) -> None:
        for event in truth_events(self.depot):
            if isinstance(event, AllBlocksCleared):
                self.mirror.clear()
            elif isinstance(event, BlockStored):
                assert not self.mirror.intersection(_names(event))
                self.mirror.update(_names(event))
            elif isinstance(event, BlockRemoved):
                assert self.mirror.issuperset(_names(event))
                self.mirror.difference_update(_names(event))
        ready = [name for event in events_of(self.depot.snapshot()) for name in _names(event)]
        assert sorted(ready) == sorted(self.mirror)

    @invariant()
    def nobody_reads_what_is_not_written(self) -> None:
        for session in self.sessions:
            for request_id in session.requests:
                for table in session.manager.get_blocks(request_id).blocks:
                    for block in table:
                        assert block.pending_view in (None, session.view)


def _held(session: Session, request_id: str) -> set[int]:
    return set().union(*session.manager.get_block_ids(request_id)) - {0}


def _names(event: BlockStored | BlockRemoved) -> list[tuple[int, bytes]]:
    return [(event.group, block_hash) for block_hash in event.block_hashes]


class WindowSessions(Sessions):
    """Beside full attention, a window in blocks of half the size, and a wider one."""

    def make_depot(self) -> Depot:
        specs = (full(2 * BLOCK_SIZE), window(4, BLOCK_SIZE), window(7, 2 * BLOCK_SIZE))
        return Depot(groups_config(14, *specs, max_model_len=256))


class StateSessions(Sessions):
    """Beside full attention, states at block boundaries, with one for a draft token."""

    def make_depot(self) -> Depot:
        states = mamba("align", BLOCK_SIZE, num_speculative_blocks=1)
        return Depot(groups_config(14, states, full(BLOCK_SIZE), max_model_len=256))


def _settings(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=60,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


TestSessions = Sessions.TestCase
TestSessions.settings = _settings(150)
TestWindowSessions = WindowSessions.TestCase
TestWindowSessions.settings = _settings(60)
TestStateSessions = StateSessions.TestCase
TestStateSessions.settings = _settings(60)
