"""Resets and departures, without a wire: what is forgotten, what goes on, who is named."""

from __future__ import annotations

import pytest

from building import content, make_depot, token_bytes, truth_events
from kvcore.depot import Depot
from kvcore.errors import InvalidArgument, NotFound, ResourceExhausted
from kvcore.events import AllBlocksCleared, BlockRemoved
from kvcore.hashing import ExtraKeys
from kvcore.holders import HOLDERS_MAX
from kvcore.operation import Content, FreeMode, Grow, Outcome, SlotRequest, Step
from kvcore.reset import DRAINS_KEPT, ResetMode, ResetScope
from kvcore.session import Session

PROMPT = range(100, 113)  # three full blocks of 4, and one token


def admit(
    depot: Depot, session: Session, request_id: str, tokens: range, lora: str | None = None
) -> int:
    """Look up and allocate; the tokens of the hit."""
    introduced = Content(tokens=token_bytes(tokens), extra=ExtraKeys(lora_name=lora))
    session.begin(None, None)
    result = depot.allocate_slots(session, SlotRequest(request_id, introduced, lookup=True))
    assert result.outcome is Outcome.OK
    return result.num_new_computed_tokens


@pytest.mark.parametrize(
    ("scope", "extra", "matches"),
    [
        (ResetScope(lora_name="A"), ExtraKeys(lora_name="A", cache_salt="s"), True),
        (ResetScope(lora_name="A"), ExtraKeys(lora_name="B"), False),
        (ResetScope(lora_name="A"), ExtraKeys(), False),
        (ResetScope(lora_name=""), ExtraKeys(), True),
        (ResetScope(lora_name=""), ExtraKeys(lora_name="A"), False),
        (ResetScope(cache_salt="s"), ExtraKeys(lora_name="A", cache_salt="s"), True),
        (ResetScope(cache_salt=""), ExtraKeys(cache_salt=""), True),
        (ResetScope(cache_salt=""), ExtraKeys(cache_salt="s"), False),
        (ResetScope(lora_name="A", cache_salt="s"), ExtraKeys(lora_name="A"), False),
    ],
)
def test_scopes(scope: ResetScope, extra: ExtraKeys, matches: bool) -> None:
    assert scope.matches(extra) is matches


def test_a_scope_names_something() -> None:
    with pytest.raises(InvalidArgument, match="whole pool"):
        ResetScope()


def test_force_goes_over_pinned_pending_detached_and_free_blocks() -> None:
    depot = make_depot(30)
    session, other = depot.open_session(""), depot.open_session("")
    admit(depot, session, "free", range(8))
    session.begin(None, None)
    depot.free(session, "free", FreeMode.FINISH, did_not_run=False)
    admit(depot, session, "detached", range(20, 28))
    session.begin(None, None)
    ticket = depot.free(session, "detached", FreeMode.DETACH, did_not_run=False).ticket
    admit(depot, session, "running", PROMPT)
    session.begin(None, None)
    admit(depot, other, "shares", PROMPT)
    admit(depot, session, "pending", range(40, 48))
    truth_events(depot)

    before = depot.pool.states()
    reset = depot.reset_prefix_cache(ResetMode.FORCE)
    assert reset.generation == 1
    # The full blocks of the detached, the running (whose hits "shares" has) and the pending one.
    assert reset.num_blocks_cleared == before.cached + 2 + 3 + 2
    holders = {(holder.request_id, holder.ticket): holder.num_blocks for holder in reset.holders}
    assert holders == {
        ("", ticket): 2,
        ("running", 0): 4,
        ("shares", 0): 4,
        ("pending", 0): 2,
    }
    assert depot.audit() == []
    after = depot.pool.states()
    assert (after.live, after.cached) == (before.live, 0)
    assert truth_events(depot) == [AllBlocksCleared(1)]
    assert depot.snapshot() == []

    # None of them comes back, whatever their holders do.
    session.begin(None, None)
    other.begin(None, None)
    depot.cache_blocks(session, "running", None, 12)
    depot.cache_blocks(session, "pending", None, 8)
    depot.return_blocks(session, ticket)
    for one, name in ((session, "running"), (other, "shares"), (session, "pending")):
        depot.free(one, name, FreeMode.FINISH, did_not_run=False)
    assert truth_events(depot) == []
    assert depot.pool.states().cached == 0
    assert depot.audit() == []
    for position, tokens in enumerate((range(8), range(20, 28), PROMPT, range(40, 48))):
        assert admit(depot, session, f"new {position}", tokens) == 0


@pytest.mark.parametrize("by_step", [False, True], ids=["call", "Step"])
def test_what_outlives_a_reset_registers_nothing_until_admitted_anew(by_step: bool) -> None:
    depot = make_depot(30)
    session = depot.open_session("")
    admit(depot, session, "a", PROMPT)
    request = session.requests["a"]
    depot.reset_prefix_cache(ResetMode.FORCE)
    assert request.outlived_reset
    # Growth, in whatever way, and even what is cut off and written anew.
    for offset in (13, 17, 13):
        session.begin(None, None)
        tokens = token_bytes(range(offset, offset + 4))
        if by_step:
            numbers = (request.handle, offset, 4, offset, 4)
            columns = [number.to_bytes(4, "little") for number in numbers]
            assert not depot.step(session, Step([(2, 1)], grow=Grow(*columns, tokens))).errors
        else:
            depot.allocate_slots(
                session,
                SlotRequest(
                    "a", Content(offset, tokens), num_computed_tokens=offset, num_new_tokens=4
                ),
            )
        depot.cache_blocks(session, "a", None, offset + 4)
        assert all(not index.entries for index in depot.pool.indexes)
        assert depot.audit() == []

    depot.free(session, "a", FreeMode.PREEMPT, did_not_run=False)
    assert not request.outlived_reset
    session.begin(None, None)
    depot.allocate_slots(session, SlotRequest("a", lookup=True))
    assert sum(len(index.entries) for index in depot.pool.indexes) == 4


def test_waiting_requests_know_of_no_reset() -> None:
    depot = make_depot(30)
    session = depot.open_session("")
    depot.get_computed_blocks(session, "waits", content(PROMPT))
    admit(depot, session, "external", range(50, 59))
    depot.free(session, "external", FreeMode.PREEMPT, did_not_run=False)
    session.begin(None, None)
    # One that waits for bytes from elsewhere holds blocks, and their content is old.
    depot.allocate_slots(
        session,
        SlotRequest(
            "external", num_new_tokens=0, num_external_computed_tokens=8, delay_cache_blocks=True
        ),
    )
    depot.reset_prefix_cache(ResetMode.FORCE)
    outlived = {name: request.outlived_reset for name, request in session.requests.items()}
    assert outlived == {"waits": False, "external": True}
    depot.cache_blocks(session, "external", None, 8)
    assert depot.pool.states().cached == 0
    assert admit(depot, session, "waits", PROMPT) == 0
    assert depot.audit() == []


def test_a_scoped_reset_says_what_is_gone_once() -> None:
    """Two copies of a content are one content."""
    depot = make_depot(30)
    session = depot.open_session("")
    for name in ("first", "second"):
        session.begin(None, None)
        introduced = Content(tokens=token_bytes(range(8)), extra=ExtraKeys(lora_name="A"))
        depot.allocate_slots(session, SlotRequest(name, introduced))
    admit(depot, session, "base", range(8))
    session.begin(None, None)
    truth_events(depot)
    depot.reset_prefix_cache(ResetMode.FORCE, ResetScope(lora_name="A"))
    removed = truth_events(depot)
    assert [type(event) for event in removed] == [BlockRemoved, BlockRemoved]
    assert {event.reason for event in removed if isinstance(event, BlockRemoved)} == {"reset"}
    assert depot.pool.num_evictions == 0
    assert depot.audit() == []
    assert admit(depot, session, "base again", range(9)) == 8


def test_drains_are_remembered_for_a_while() -> None:
    depot = make_depot(4)
    first = depot.reset_prefix_cache(ResetMode.DRAIN)
    assert first.done
    for _ in range(DRAINS_KEPT):
        last = depot.reset_prefix_cache(ResetMode.DRAIN)
    assert depot.drain_state(last.drain_id).generation == DRAINS_KEPT + 1
    with pytest.raises(NotFound):
        depot.drain_state(first.drain_id)
    assert not depot.abandon_drain(last.drain_id)


def test_a_refusal_names_the_largest_holders_cheaply() -> None:
    depot = make_depot(100)
    sessions = [depot.open_session(f"{number}") for number in range(12)]
    for number, session in enumerate(sessions):
        admit(depot, session, "a", range(1000 * number, 1000 * number + 4 * (number + 1)))
    session = depot.open_session("idle")
    result = depot.allocate_slots(session, SlotRequest("large", content(range(200)), lookup=True))
    assert result.no_fit is not None
    held = [(hold.name, hold.num_blocks) for hold in result.no_fit.holders]
    assert held == [(f"{number}", number + 1) for number in range(11, 11 - HOLDERS_MAX, -1)]


def test_only_a_steps_first_refusal_names_holders() -> None:
    depot = make_depot(4)
    session = depot.open_session("")
    handle = depot.get_computed_blocks(session, "a", content(range(12))).handle
    admit(depot, session, "a", range(12))
    large = [SlotRequest(name, content(range(50)), lookup=True) for name in "bc"]
    numbers = (handle, 12, 1)
    grow = Grow(*(number.to_bytes(4, "little") for number in numbers))
    for runs, first in (([(1, 2), (2, 1)], "b"), ([(2, 1), (1, 2)], "a")):
        result = depot.step(session, Step(runs, on_no_fit_stop=False, admissions=large, grow=grow))
        refusals = {"a": result.no_fit} | {
            name: admission.no_fit for name, admission in zip("bc", result.admissions, strict=True)
        }
        named = {name for name, refusal in refusals.items() if refusal and refusal.holders}
        assert named == {first}


def test_sessions_and_requests_are_listed() -> None:
    depot = make_depot(30)
    first, second = depot.open_session("first"), depot.open_session("second")
    admit(depot, first, "a", PROMPT, lora="A")
    admit(depot, second, "b", range(8))
    depot.get_computed_blocks(second, "c", content(range(3)))
    depot.attach_worker(second)
    depot.close_session(second)
    one, two = depot.list_sessions()
    assert (one.name, one.num_requests, one.num_blocks, one.departed) == ("first", 1, 4, False)
    assert (two.name, two.num_requests, two.num_quarantined_blocks) == ("second", 0, 2)
    assert (two.num_workers, two.departed) == (1, True)
    (info,) = depot.list_requests()
    assert (info.request_id, info.status, info.lora_name) == ("a", "RUNNING", "A")
    assert (info.num_tokens, info.num_blocks) == (13, 4)
    with pytest.raises(NotFound):
        depot.list_requests("nobody")
    assert [holder.request_id for holder in depot.holders()] == ["a"]


def test_evicted_by_an_operator() -> None:
    depot = make_depot(30)
    session = depot.open_session("")
    admit(depot, session, "a", PROMPT)
    session.begin(None, None)
    truth_events(depot)
    assert depot.evict_blocks([2, 3, 4, 2]) == 2
    assert len(truth_events(depot)) == 2
    assert admit(depot, session, "b", PROMPT) == 4
    with pytest.raises(InvalidArgument):
        depot.evict_blocks([30])
    assert depot.audit() == []


def test_a_workers_end_before_and_after_its_sessions() -> None:
    depot = make_depot(10, max_workers_per_session=2)
    gone, stays = depot.open_session("gone"), depot.open_session("stays")
    depot.attach_worker(gone)
    depot.attach_worker(gone)
    with pytest.raises(ResourceExhausted):
        depot.attach_worker(gone)
    depot.detach_worker(gone)
    # Nothing is in flight by the scheduler's word; its worker may hang all the same.
    gone.begin(1, 1)
    depot.allocate_slots(gone, SlotRequest("a", content(PROMPT), lookup=True))
    gone.begin(2, 2)
    depot.close_session(gone)
    assert depot.audit() == []
    assert depot.pool.states().quarantined == 4
    assert depot.pool.num_free_blocks(stays.view) == 5
    depot.detach_worker(gone)
    assert depot.pool.num_free_blocks(stays.view) == 9
    assert not depot.end_quarantine(gone)
    assert depot.audit() == []


def test_quarantined_hits_cost_nobody_a_free_block() -> None:
    """All that is free is quarantined, and the hit is part of it: it fits all the same."""
    depot = make_depot(5)
    gone, stays = depot.open_session("gone"), depot.open_session("stays")
    depot.attach_worker(gone)
    admit(depot, gone, "a", range(12))
    gone.begin(None, None)
    depot.close_session(gone)
    assert depot.pool.num_free_blocks(stays.view) == 1
    assert admit(depot, stays, "b", range(13)) == 12
    assert depot.pool.num_free_blocks(stays.view) == 0
    assert depot.audit() == []
