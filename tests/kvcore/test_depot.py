"""Several sessions on one pool: what each sees, holds, and gives back."""

from __future__ import annotations

import pytest

from building import content, make_depot, token_bytes, truth_events
from kvcore.depot import Depot
from kvcore.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    KVDepotError,
    NotFound,
    ResourceExhausted,
)
from kvcore.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvcore.feed import events_of
from kvcore.hashing import ExtraKeys
from kvcore.operation import Content, FreeMode, Outcome, SlotRequest, SlotResult
from kvcore.reset import ResetMode
from kvcore.session import Session
from kvcore.transfer import GroupHashes

PROMPT = range(100, 113)  # three full blocks of 4, and one token


def admit(
    depot: Depot, session: Session, request_id: str, tokens: range, step: int | None = None
) -> SlotResult:
    """Look up and allocate in one call of ``step``, with the one before completed."""
    session.begin(step, None if step is None else step - 1)
    result = depot.allocate_slots(session, SlotRequest(request_id, content(tokens), lookup=True))
    assert depot.audit() == []
    return result


def test_hit_is_capped_and_shared() -> None:
    depot = make_depot(20)
    one, two = depot.open_session("one"), depot.open_session("two")
    assert admit(depot, one, "a", PROMPT).new_blocks == ([1, 2, 3, 4],)
    # The bytes of a's step are written once its session calls again.
    one.begin(None, None)
    result = admit(depot, two, "b", PROMPT)
    assert result.num_new_computed_tokens == 12
    assert result.hit_blocks == ([1, 2, 3],)
    assert result.new_blocks == ([5],)
    # A prompt of whole blocks leaves one token to compute, so its last block is no hit.
    assert admit(depot, two, "c", PROMPT[:12]).num_new_computed_tokens == 8


def test_scheduler_two_steps_ahead() -> None:
    depot = make_depot(20)
    ahead, other = depot.open_session("ahead"), depot.open_session("other")
    for step in (1, 2):
        ahead.begin(step, 0)
        depot.allocate_slots(ahead, SlotRequest(f"r{step}", content(PROMPT), lookup=True))
    # Its own blocks are hits at once: r2 shares r1's.
    assert ahead.manager.get_block_ids("r2")[0][:3] == [1, 2, 3]
    assert truth_events(depot) == []
    assert admit(depot, other, "x", PROMPT).num_new_computed_tokens == 0
    other.begin(None, None)
    depot.free(other, "x", FreeMode.FINISH, did_not_run=True)

    ahead.begin(3, 1)
    stored = truth_events(depot)
    # x was said not to have run, so of its copies nothing is left.
    assert [type(event) for event in stored][-3:] == [BlockStored] * 3
    assert admit(depot, other, "y", PROMPT).num_new_computed_tokens == 12


def test_released_blocks_wait_for_their_last_step() -> None:
    depot = make_depot(6)
    ahead, other = depot.open_session("ahead"), depot.open_session("other")
    ahead.begin(1, 0)
    depot.allocate_slots(ahead, SlotRequest("a", content(range(20)), lookup=True))
    ahead.begin(2, 0)
    depot.free(ahead, "a", FreeMode.FINISH, did_not_run=False)
    states = depot.pool.states()
    assert (states.live, states.quarantined, states.free) == (0, 5, 0)
    # Itself may take them at once, another session may not.
    refused = admit(depot, other, "x", range(4))
    assert refused.outcome is Outcome.NO_FIT
    assert refused.no_fit is not None
    assert refused.no_fit.free_blocks == 0
    ahead.begin(2, 2)
    assert admit(depot, other, "x", range(4)).outcome is Outcome.OK


def test_hit_changed_between_lookup_and_allocation() -> None:
    depot = make_depot(6)
    one, two = depot.open_session("one"), depot.open_session("two")
    admit(depot, one, "a", PROMPT)
    one.begin(None, None)
    depot.free(one, "a", FreeMode.FINISH, did_not_run=False)
    one.begin(None, None)

    two.begin(None, None)
    assert depot.get_computed_blocks(two, "b", content(PROMPT)).num_computed_tokens == 12
    # Another session takes blocks that were in the hit: a's tail goes first.
    assert admit(depot, one, "c", range(12)).outcome is Outcome.OK
    before = depot.pool.states()
    result = depot.allocate_slots(
        two, SlotRequest("b", num_new_tokens=1, num_new_computed_tokens=12)
    )
    assert result.outcome is Outcome.HIT_CHANGED
    assert result.num_new_computed_tokens == 8
    assert depot.pool.states() == before
    one.begin(None, None)
    depot.free(one, "c", FreeMode.FINISH, did_not_run=False)
    one.begin(None, None)
    result = depot.allocate_slots(
        two, SlotRequest("b", num_new_tokens=1, num_new_computed_tokens=8)
    )
    assert result.outcome is Outcome.OK
    assert result.hit_blocks == ([1, 2],)
    assert depot.audit() == []


def test_a_snapshot_is_few_objects_until_it_is_read() -> None:
    """Nobody else has a turn while it is taken."""
    depot = make_depot(200)
    session = depot.open_session("")
    for name, first in (("a", 0), ("b", 1)):
        admit(depot, session, name, range(first, first + 4 * 64))
        session.begin(None, None)
    entries = depot.snapshot()
    assert [len(entry) for entry in entries] == [32, 32, 32, 32]
    # What it says was so when it was taken.
    told = list(events_of(entries))
    depot.free(session, "a", FreeMode.FINISH, did_not_run=False)
    depot.reset_prefix_cache(ResetMode.FORCE)
    assert list(events_of(entries)) == told
    assert depot.snapshot() == []


def test_duplicate_content_is_told_once() -> None:
    depot = make_depot(20)
    session = depot.open_session("")
    session.begin(1, 0)
    # Both miss what is not registered yet when they look up: two copies of one content.
    depot.get_computed_blocks(session, "a", content(PROMPT))
    depot.get_computed_blocks(session, "b", content(PROMPT))
    for request_id in ("a", "b"):
        depot.allocate_slots(session, SlotRequest(request_id, num_new_tokens=13))
    session.begin(2, 2)
    assert len(truth_events(depot)) == 3
    depot.pool.evict_blocks([1, 2, 3])
    assert truth_events(depot) == []
    first = GroupHashes(0, session.requests["a"].block_hashes[:1])
    assert depot.transfers.open_hashes("", [first]).groups[0].block_ids == [5]
    depot.pool.evict_blocks([5])
    (removed,) = truth_events(depot)
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == [session.requests["a"].block_hashes[0]]
    assert depot.audit() == []


def test_snapshot_has_parents_first() -> None:
    depot = make_depot(20)
    session = depot.open_session("")
    admit(depot, session, "a", range(40))
    session.begin(None, None)
    # The root is registered again, behind its children.
    depot.pool.evict_blocks([1])
    depot.free(session, "a", FreeMode.FINISH, did_not_run=False)
    admit(depot, session, "b", range(5))
    session.begin(None, None)
    seen: set[bytes] = set()
    for event in events_of(depot.snapshot()):
        assert event.parent_block_hash is None or event.parent_block_hash in seen
        seen.update(event.block_hashes)
    assert len(seen) == 10


def test_freed_before_it_ran_leaves_no_hit() -> None:
    depot = make_depot(20)
    session = depot.open_session("")
    session.begin(1, 0)
    depot.allocate_slots(session, SlotRequest("a", content(PROMPT), lookup=True))
    # b builds on what a was to write.
    depot.allocate_slots(session, SlotRequest("b", content(range(100, 120)), lookup=True))
    depot.free(session, "a", FreeMode.FINISH, did_not_run=True)
    assert depot.audit() == []
    session.begin(2, 1)
    assert truth_events(depot) == []
    assert admit(depot, session, "c", PROMPT, step=3).num_new_computed_tokens == 0


def test_what_was_confirmed_stays_a_hit() -> None:
    depot = make_depot(20)
    session = depot.open_session("")
    session.begin(1, 0)
    depot.allocate_slots(session, SlotRequest("a", content(PROMPT), lookup=True))
    depot.cache_blocks(session, "a", None, 8)
    depot.free(session, "a", FreeMode.FINISH, did_not_run=True)
    (both,) = depot.snapshot()
    assert len(both) == 2
    assert depot.audit() == []


def test_cache_blocks_confirms_at_once() -> None:
    depot = make_depot(20)
    session, other = depot.open_session("one"), depot.open_session("two")
    session.begin(5, 0)
    depot.allocate_slots(
        session,
        SlotRequest(
            "a", content(PROMPT), num_new_tokens=0, num_external_computed_tokens=12,
            delay_cache_blocks=True,
        ),
    )  # fmt: skip
    assert depot.snapshot() == []
    assert depot.cache_blocks(session, "a", None, 8)
    assert len(truth_events(depot)) == 2
    assert admit(depot, other, "x", PROMPT).num_new_computed_tokens == 8
    assert not depot.cache_blocks(session, "gone", None, 8)


def test_detached_blocks_come_back_in_order() -> None:
    depot = make_depot(20)
    session = depot.open_session("")
    admit(depot, session, "a", PROMPT)
    session.begin(None, None)
    freed = depot.free(session, "a", FreeMode.DETACH, did_not_run=False)
    assert depot.pool.states().live == 4
    # The id is free for another request meanwhile.
    assert admit(depot, session, "a", range(4)).new_blocks == ([5],)
    assert depot.return_blocks(session, freed.ticket) == 4
    assert depot.pool.free_queue.block_ids()[:1] == [4]
    assert depot.pool.free_queue.block_ids()[-3:] == [3, 2, 1]
    with pytest.raises(NotFound):
        depot.return_blocks(session, freed.ticket)
    assert depot.audit() == []


def test_preempted_request_comes_back() -> None:
    depot = make_depot(20)
    session = depot.open_session("")
    handle = admit(depot, session, "a", PROMPT).handle
    session.begin(None, None)
    depot.free(session, "a", FreeMode.PREEMPT, did_not_run=False)
    session.begin(None, None)
    result = depot.allocate_slots(session, SlotRequest("a", lookup=True))
    assert (result.handle, result.num_new_computed_tokens) == (handle, 12)
    stats = depot.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (13, 0)
    assert (stats.preempted_queries, stats.preempted_hits) == (13, 12)


def test_reset_names_the_holders() -> None:
    depot = make_depot(20)
    session = depot.open_session("engine")
    admit(depot, session, "a", PROMPT)
    with pytest.raises(FailedPrecondition, match=r"engine request a \(4 blocks\)"):
        depot.reset_prefix_cache()
    session.begin(None, None)
    depot.free(session, "a", FreeMode.FINISH, did_not_run=False)
    truth_events(depot)
    assert depot.reset_prefix_cache().generation == 1
    assert truth_events(depot) == [AllBlocksCleared(1)]
    assert admit(depot, session, "a", PROMPT).num_new_computed_tokens == 0


def test_closed_session_leaves_confirmed_content_only() -> None:
    depot = make_depot(30)
    gone, stays = depot.open_session("gone"), depot.open_session("stays")
    admit(depot, gone, "a", PROMPT, step=1)
    admit(depot, gone, "b", range(8), step=2)
    depot.free(gone, "a", FreeMode.DETACH, did_not_run=False)
    assert depot.close_session(gone) == 1
    assert depot.audit() == []
    assert depot.pool.states().live == 0
    assert admit(depot, stays, "a", PROMPT).num_new_computed_tokens == 12
    assert admit(depot, stays, "b", range(8)).num_new_computed_tokens == 0
    with pytest.raises(NotFound):
        depot.session(gone.session_id, depot.epoch)


def test_common_prefix_is_the_sessions_own() -> None:
    depot = make_depot(30)
    one, two = depot.open_session("one"), depot.open_session("two")
    admit(depot, one, "a", PROMPT)
    one.begin(None, None)
    admit(depot, one, "b", PROMPT)
    admit(depot, two, "x", PROMPT)
    assert one.manager.get_num_common_prefix_blocks("a") == [3]
    assert two.manager.get_num_common_prefix_blocks("x") == [4]


def test_tokens_are_absolute() -> None:
    depot = make_depot(30)
    session = depot.open_session("")
    admit(depot, session, "a", range(10))
    request = session.requests["a"]

    def write(tokens: range, offset: int) -> None:
        session.begin(None, None)
        depot.cache_blocks(session, "a", content(tokens, offset), 0)
        assert depot.audit() == []

    hashes = list(request.block_hashes)
    write(range(8, 12), 8)
    write(range(8, 12), 8)  # a repeat changes nothing
    assert request.num_tokens == 12
    assert len(request.block_hashes) == 3
    write(range(50, 51), 9)  # other content from 9 on: cut off, and written anew
    assert request.num_tokens == 10
    assert request.block_hashes == hashes
    with pytest.raises(InvalidArgument, match="token_offset"):
        write(range(1), 11)
    # Cut back into a block that is a hit: it is one no longer.
    write(range(60, 66), 4)
    assert request.num_tokens == 10
    assert [block.block_hash is None for block in session.manager.get_blocks("a").blocks[0]] == [
        False,
        True,
        True,
    ]


def test_shared_block_is_not_rewritten() -> None:
    depot = make_depot(30)
    session = depot.open_session("")
    admit(depot, session, "a", PROMPT)
    session.begin(None, None)
    admit(depot, session, "b", PROMPT)
    with pytest.raises(FailedPrecondition, match="shares"):
        depot.cache_blocks(session, "a", content(range(4), 4), 0)
    assert session.requests["a"].num_tokens == 13
    assert depot.audit() == []


def _allocate(**fields: object) -> object:
    return lambda depot, session: depot.allocate_slots(
        session,
        SlotRequest("a", **fields),  # type: ignore[arg-type]
    )


def _introduce(tokens: bytes, **fields: object) -> object:
    return lambda depot, session: depot.get_computed_blocks(
        session,
        fields.pop("request_id", "new"),
        Content(tokens=tokens, **fields),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("call", "error", "field"),
    [
        pytest.param(_introduce(b""), InvalidArgument, "content.tokens", id="no-tokens"),
        pytest.param(_introduce(b"abc"), InvalidArgument, "content.tokens", id="part-of-a-token"),
        pytest.param(
            _introduce(token_bytes([1]), request_id=""), InvalidArgument, "request_id", id="no-id"
        ),
        pytest.param(
            _introduce(token_bytes([1]), request_id="x" * 1025),
            InvalidArgument,
            "request_id",
            id="long-id",
        ),
        pytest.param(
            _introduce(token_bytes([1]), token_offset=4), NotFound, "request_id", id="unknown"
        ),
        pytest.param(
            _introduce(token_bytes([1]), num_prompt_tokens=0),
            InvalidArgument,
            "content.num_prompt_tokens",
            id="empty-prompt",
        ),
        pytest.param(
            _introduce(token_bytes(range(201))), ResourceExhausted, "content.tokens", id="too-long"
        ),
        pytest.param(
            _introduce(token_bytes([7]), request_id="a"),
            AlreadyExists,
            "content.tokens",
            id="other-tokens",
        ),
        pytest.param(
            _introduce(token_bytes(PROMPT), request_id="a", extra=ExtraKeys(cache_salt="x")),
            AlreadyExists,
            "content.extra_keys",
            id="other-salt",
        ),
        pytest.param(
            _introduce(token_bytes(PROMPT), request_id="a"),
            InvalidArgument,
            "request_id",
            id="lookup-while-running",
        ),
        pytest.param(_allocate(lookup=True), InvalidArgument, "lookup", id="second-hit"),
        pytest.param(
            _allocate(num_new_tokens=1, num_new_computed_tokens=4),
            InvalidArgument,
            "num_new_computed_tokens",
            id="claims-while-running",
        ),
        pytest.param(
            _allocate(num_computed_tokens=13, num_new_tokens=0),
            InvalidArgument,
            "num_new_tokens",
            id="nothing-new",
        ),
        pytest.param(
            _allocate(num_computed_tokens=13), InvalidArgument, "num_computed_tokens", id="all-done"
        ),
        pytest.param(
            _allocate(num_computed_tokens=99, num_new_tokens=1),
            InvalidArgument,
            "num_computed_tokens",
            id="computed-beyond",
        ),
        pytest.param(
            _allocate(num_computed_tokens=13, num_new_tokens=4_000_000_000),
            InvalidArgument,
            "num_new_tokens",
            id="huge",
        ),
        pytest.param(
            _allocate(num_new_tokens=1, num_external_computed_tokens=4),
            InvalidArgument,
            "num_external_computed_tokens",
            id="external-while-running",
        ),
        pytest.param(
            lambda depot, session: depot.cache_blocks(session, "a", None, 17),
            InvalidArgument,
            "num_computed_tokens",
            id="cache-beyond",
        ),
        pytest.param(
            lambda depot, session: depot.return_blocks(session, 9), NotFound, "ticket", id="ticket"
        ),
        pytest.param(
            lambda depot, session: session.begin(7, None),
            InvalidArgument,
            "context.completed_step",
            id="half-a-step",
        ),
        pytest.param(
            lambda depot, session: session.begin(7, 8),
            InvalidArgument,
            "context.completed_step",
            id="completed-beyond",
        ),
        pytest.param(
            lambda depot, session: session.begin(0, 0),
            InvalidArgument,
            "context.step",
            id="step-back",
        ),
        pytest.param(
            lambda depot, session: depot.session(session.session_id, "old"),
            FailedPrecondition,
            "context.epoch",
            id="epoch",
        ),
        pytest.param(
            lambda depot, session: depot.open_session("", "other"),
            FailedPrecondition,
            "fingerprint",
            id="fingerprint",
        ),
        pytest.param(
            lambda depot, session: depot.pool.evict_blocks([1, 99]),
            InvalidArgument,
            "block_ids",
            id="block-id",
        ),
    ],
)
def test_refused_and_unchanged(call: object, error: type[KVDepotError], field: str) -> None:
    depot = make_depot(20, max_model_len=100, max_request_tokens=200)
    session = depot.open_session("")
    admit(depot, session, "a", PROMPT)
    before = (depot.stats(), depot.pool.free_queue.block_ids(), list(session.requests))
    assert callable(call)
    with pytest.raises(error) as caught:
        call(depot, session)
    assert caught.value.field == field
    assert (depot.stats(), depot.pool.free_queue.block_ids(), list(session.requests)) == before
    assert depot.audit() == []


def test_limits() -> None:
    depot = make_depot(20, max_sessions=1, max_requests_per_session=1)
    session = depot.open_session("")
    with pytest.raises(ResourceExhausted):
        depot.open_session("")
    admit(depot, session, "a", PROMPT)
    with pytest.raises(ResourceExhausted):
        admit(depot, session, "b", PROMPT)
    assert list(session.requests) == ["a"]


def test_a_running_request_delays_registration_too() -> None:
    depot = make_depot(20)
    session = depot.open_session("")
    depot.allocate_slots(session, SlotRequest("a", content(range(12)), num_new_tokens=4))
    more = SlotRequest("a", num_computed_tokens=4, num_new_tokens=8, delay_cache_blocks=True)
    assert depot.allocate_slots(session, more).outcome is Outcome.OK
    assert [block.block_hash is not None for block in depot.pool.blocks[1:4]] == [
        True,
        False,
        False,
    ]
    depot.cache_blocks(session, "a", None, 12)
    assert all(block.block_hash is not None for block in depot.pool.blocks[1:4])
