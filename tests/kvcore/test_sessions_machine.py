"""Random sessions on one pool: every invariant after each call, and a true mirror."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from building import content, full, groups_config, make_depot, mamba, window
from kvcore.check import check
from kvcore.depot import Depot
from kvcore.errors import FailedPrecondition
from kvcore.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvcore.operation import FreeMode, Outcome, SlotRequest
from kvcore.request import RequestStatus
from kvcore.session import Session

BLOCK_SIZE = 2
NUM_SESSIONS = 3


class Sessions(RuleBasedStateMachine):
    """Schedulers that pipeline, share prompts, preempt, detach, die and reset."""

    def __init__(self) -> None:
        super().__init__()
        self.depot = self.make_depot()
        self.sessions: list[Session] = [self._open() for _ in range(NUM_SESSIONS)]
        self.steps = [(0, 0)] * NUM_SESSIONS
        self.mirror: set[tuple[int, bytes]] = set()

    def make_depot(self) -> Depot:
        return make_depot(14, BLOCK_SIZE)

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
        external=st.booleans(),
    )
    def admit(
        self, who: int, name: str, prompt: tuple[int, int], chunk: int, external: bool
    ) -> None:
        session = self.sessions[who]
        known = session.requests.get(name)
        if known is not None and session.holds_blocks(known):
            return
        free_before = self.depot.pool.num_free_blocks(session.view)
        result = self.depot.allocate_slots(
            session,
            SlotRequest(
                name,
                content(range(*prompt)) if known is None else None,
                lookup=not external,
                max_new_tokens=chunk,
                num_new_tokens=0 if external else None,
                num_external_computed_tokens=2 if external else 0,
                delay_cache_blocks=external,
            ),
        )
        assert result.outcome in (Outcome.OK, Outcome.NO_FIT)
        if result.outcome is Outcome.NO_FIT:
            assert self.depot.pool.num_free_blocks(session.view) == free_before

    @rule(who=st.integers(0, NUM_SESSIONS - 1), name=st.sampled_from("abc"))
    def grow(self, who: int, name: str) -> None:
        session = self.sessions[who]
        request = session.requests.get(name)
        if request is None or request.status is not RequestStatus.RUNNING:
            return
        num_computed = min(request.num_tokens, session.num_slots(request))
        self.depot.allocate_slots(
            session,
            SlotRequest(
                name,
                content([who], request.num_tokens),
                num_computed_tokens=num_computed,
                num_new_tokens=1,
            ),
        )

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
        self.depot.close_session(self.sessions[who])
        self.sessions[who] = self._open()
        self.steps[who] = (0, 0)

    @rule()
    def reset(self) -> None:
        busy = self.depot.pool.states().live > 0
        try:
            self.depot.reset_prefix_cache()
            assert not busy
        except FailedPrecondition:
            assert busy

    @rule(block_ids=st.sets(st.integers(1, 13), max_size=3))
    def evict(self, block_ids: set[int]) -> None:
        self.depot.pool.evict_blocks(block_ids)

    @invariant()
    def nothing_is_broken(self) -> None:
        assert check(self.depot) == []

    @invariant()
    def followers_know_what_is_here(self) -> None:
        for event in self.depot.take_truth_events():
            if isinstance(event, AllBlocksCleared):
                self.mirror.clear()
            elif isinstance(event, BlockStored):
                assert not self.mirror.intersection(_names(event))
                self.mirror.update(_names(event))
            elif isinstance(event, BlockRemoved):
                assert self.mirror.issuperset(_names(event))
                self.mirror.difference_update(_names(event))
        ready = [name for event in self.depot.snapshot() for name in _names(event)]
        assert sorted(ready) == sorted(self.mirror)

    @invariant()
    def nobody_reads_what_is_not_written(self) -> None:
        for session in self.sessions:
            for request_id in session.requests:
                for table in session.manager.get_blocks(request_id).blocks:
                    for block in table:
                        assert block.pending_view in (None, session.view)


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
