"""Random sessions on one pool: every invariant after each call, a true mirror, and no hit
on what was computed before a reset."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from building import content, make_depot, token_bytes
from kvcore.block import KVCacheBlock
from kvcore.check import check
from kvcore.errors import FailedPrecondition
from kvcore.events import AllBlocksCleared, BlockRemoved, BlockStored
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
        self.depot = make_depot(14, BLOCK_SIZE)
        self.sessions: list[Session] = [self._open() for _ in range(NUM_SESSIONS)]
        self.steps = [(0, 0)] * NUM_SESSIONS
        self.mirror: set[bytes] = set()
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

    def _raise_floors(self, scope: ResetScope | None) -> None:
        """A reset is done."""
        self.seen_generation += 1
        assert self.depot.generation == self.seen_generation
        for lora_name in self.floors:
            if scope is None or scope.matches(ExtraKeys(lora_name=lora_name)):
                self.floors[lora_name] = self.seen_generation

    def _note_blocks(self, request: Request, session: Session, num_hit_blocks: int = 0) -> None:
        """What was allocated beyond the hit is written by this request."""
        generation = self.request_generations[request.handle]
        table = session.manager.get_block_ids(request.request_id)[0]
        for block_id in table[:num_hit_blocks]:
            assert self.block_generations[block_id] >= self.floors[request.extra.lora_name]
        for block_id in table[num_hit_blocks:]:
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
        external=st.booleans(),
        lora_name=st.sampled_from([None, None, "A"]),
    )
    def admit(
        self,
        who: int,
        name: str,
        prompt: tuple[int, int],
        chunk: int,
        external: bool,
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
                num_external_computed_tokens=2 if external else 0,
                delay_cache_blocks=external,
            ),
        )
        request = session.requests[name]
        held_off = drain is not None and drain.holds_off(request.extra)
        assert (result.outcome is Outcome.RESETTING) == held_off
        if result.outcome is Outcome.OK:
            self.request_generations[request.handle] = self.depot.generation
            self._note_blocks(request, session, result.num_new_computed_tokens // BLOCK_SIZE)
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
        for block_id in hit.blocks[0]:
            assert self.block_generations[block_id] >= self.floors[request.extra.lora_name]

    @rule(who=st.integers(0, NUM_SESSIONS - 1), name=st.sampled_from("abc"))
    def grow(self, who: int, name: str) -> None:
        session = self.sessions[who]
        request = session.requests.get(name)
        if request is None or request.status is not RequestStatus.RUNNING:
            return
        num_computed = min(request.num_tokens, session.num_slots(request))
        num_held_blocks = session.num_slots(request) // BLOCK_SIZE
        self.depot.allocate_slots(
            session,
            SlotRequest(
                name,
                content([who], request.num_tokens),
                num_computed_tokens=num_computed,
                num_new_tokens=1,
            ),
        )
        generation = self.request_generations[request.handle]
        for block_id in session.manager.get_block_ids(name)[0][num_held_blocks:]:
            self.block_generations[block_id] = generation

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
            yield from session.manager.get_blocks(name).blocks[0]
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
        session = self.depot.departed[data.draw(st.sampled_from(sorted(self.depot.departed)))]
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
                    if session.manager.get_block_ids(request.request_id)[0]
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
                assert block.extra is not None
                floor = self.floors[block.extra.lora_name]
                assert self.block_generations[block.block_id] >= floor

    @invariant()
    def nobody_holds_what_a_worker_may_write(self) -> None:
        assert self.written_by_workers.keys() == self.depot.departed.keys()
        for written in self.written_by_workers.values():
            for session in self.sessions:
                for name in session.requests:
                    assert not written.intersection(session.manager.get_block_ids(name)[0])

    @invariant()
    def followers_know_what_is_here(self) -> None:
        for event in self.depot.take_truth_events():
            if isinstance(event, AllBlocksCleared):
                self.mirror.clear()
            elif isinstance(event, BlockStored):
                assert not self.mirror.intersection(event.block_hashes)
                self.mirror.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert self.mirror.issuperset(event.block_hashes)
                self.mirror.difference_update(event.block_hashes)
        ready = [block_hash for event in self.depot.snapshot() for block_hash in event.block_hashes]
        assert sorted(ready) == sorted(self.mirror)

    @invariant()
    def nobody_reads_what_is_not_written(self) -> None:
        for session in self.sessions:
            for request_id in session.requests:
                for block in session.manager.get_blocks(request_id).blocks[0]:
                    assert block.pending_view in (None, session.view)


TestSessions = Sessions.TestCase
TestSessions.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
