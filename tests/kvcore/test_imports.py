"""Blocks that are filled with a peer's bytes: nobody's until none can land any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

import kvcore.imports
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
from importing import Entry, filled_runs, finish
from kvcore.check import check
from kvcore.content_run import ContentRun
from kvcore.depot import Depot
from kvcore.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from kvcore.events import BlockStored
from kvcore.feed import events_of
from kvcore.hashing import ExtraKeys
from kvcore.import_job import Import, ImportStatus, Ready
from kvcore.operation import FreeMode, Outcome, SlotRequest
from kvcore.reset import ResetMode, ResetScope
from kvcore.session import Session
from kvcore.spec import KVCacheSpec
from kvcore.transfer import GroupHashes

IMPORTED, PRESENT, MISSING, FAILED, NO_FIT, NOT_ATTEMPTED = (
    ImportStatus.IMPORTED,
    ImportStatus.PRESENT,
    ImportStatus.MISSING,
    ImportStatus.FAILED,
    ImportStatus.NO_FIT,
    ImportStatus.NOT_ATTEMPTED,
)
SIZE = 4


def chain(depot: Depot, tokens: Iterable[int]) -> tuple[list[bytes], list[ContentRun]]:
    """The hashes of a prompt, and what a peer would say of its blocks."""
    ids = list(tokens)
    hashes = depot.scheme.chain(SIZE, ExtraKeys())
    hashes.extend(token_bytes(ids), len(ids))
    contents = [
        ContentRun(
            1, hashes.hashes[i - 1] if i else None, token_bytes(ids[i * SIZE : (i + 1) * SIZE])
        )
        for i in range(len(hashes.hashes))
    ]
    return hashes.hashes, contents


def begin(depot: Depot, hashes: Sequence[bytes], group: int = 0) -> Import:
    found = depot.imports.begin_hashes("peer", [GroupHashes(group, hashes)])
    take_all(depot, found)
    return found


def take_all(depot: Depot, found: Import) -> None:
    """As of a peer that has everything."""
    ready = {group.group: Ready(0, [True] * len(group.asked)) for group in found.groups}
    depot.imports.take(found, ready)


def filled(contents: Iterable[ContentRun]) -> dict[int, list[Entry]]:
    return {0: [Entry(IMPORTED, content) for content in contents]}


def bring(depot: Depot, tokens: Iterable[int]) -> list[bytes]:
    """An import of a prompt in which everything goes well."""
    hashes, contents = chain(depot, tokens)
    finish(depot, begin(depot, hashes), filled(contents))
    return hashes


def delay(depot: Depot, session: Session, name: str, tokens: Sequence[int], external: int) -> None:
    """Slots for external tokens, behind what is here."""
    hit = depot.get_computed_blocks(session, name, content(tokens))
    result = depot.allocate_slots(
        session,
        SlotRequest(
            name,
            num_new_tokens=0,
            num_new_computed_tokens=hit.num_computed_tokens,
            num_external_computed_tokens=external - hit.num_computed_tokens,
            delay_cache_blocks=True,
        ),
    )
    assert result.outcome is Outcome.OK


def states(depot: Depot) -> dict[str, int]:
    assert check(depot) == []
    return {state: n for state, n in depot.pool.states()._asdict().items() if n}


# --- of hashes ------------------------------------------------------------------------


def test_what_came_is_a_hit_told_as_any_and_evicted_tail_first() -> None:
    depot = make_depot(9)
    hashes, contents = chain(depot, range(12))
    found = begin(depot, hashes)
    assert found.groups[0].wanted() == (hashes, [1, 2, 3])
    assert states(depot) == {"in_transfer": 3, "free": 5}
    result = finish(depot, found, filled(contents))
    assert list(result.statuses[0]) == [IMPORTED] * 3
    assert states(depot) == {"cached": 3, "free": 5}
    assert depot.pool.free_queue.block_ids()[-3:] == [3, 2, 1]
    events = truth_events(depot)
    assert [
        (event.block_hashes, event.parent_block_hash, event.token_ids, event.extra_keys)
        for event in events
        if isinstance(event, BlockStored)
    ] == [
        ([block_hash], content.parent_hash, content.tokens, [None])
        for block_hash, content in zip(hashes, contents, strict=True)
    ]
    assert list(events_of(depot.snapshot())) == events
    hit = depot.get_computed_blocks(depot.open_session(""), "a", content(range(13)))
    assert (hit.num_computed_tokens, hit.blocks) == (12, ([1, 2, 3],))


def test_others_have_their_turn_while_many_hashes_are_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvcore.imports, "_TURN_BLOCKS", 1)
    depot = make_depot(9)
    bring(depot, range(8))
    hashes, contents = chain(depot, range(16))
    beginning = depot.imports.beginning_hashes("peer", [GroupHashes(0, hashes)])
    found = next(beginning)
    assert states(depot) == {"pinned": 1, "cached": 1, "free": 6}
    depot.evict_blocks([2])
    assert [next(beginning) is found for _ in range(2)] == [True, True]
    with pytest.raises(StopIteration):
        next(beginning)
    assert list(found.groups[0].statuses) == [PRESENT, 0, 0, 0]
    take_all(depot, found)
    depot.imports.fill(found, {0: filled_runs(hashes[1:], contents[1:])})
    # It is released in turns, too, and children first.
    releasing = depot.imports.release(found)
    next(releasing)
    assert states(depot) == {"pinned": 3, "cached": 1, "free": 4}
    assert sum(1 for _ in releasing) == 2
    assert list(depot.imports.end(found).statuses[0]) == [PRESENT, *[IMPORTED] * 3]
    assert states(depot) == {"cached": 4, "free": 4}


@pytest.mark.parametrize("scope", [None, ResetScope(lora_name="A")], ids=["all", "scope"])
def test_a_reset_while_an_import_is_released(
    monkeypatch: pytest.MonkeyPatch, scope: ResetScope | None
) -> None:
    monkeypatch.setattr(kvcore.imports, "_TURN_BLOCKS", 1)
    depot = make_depot(9)
    hashes, contents = chain(depot, range(12))
    found = begin(depot, hashes)
    depot.imports.fill(found, {0: filled_runs(hashes, contents)})
    releasing = depot.imports.release(found)
    next(releasing)
    depot.reset_prefix_cache(ResetMode.FORCE, scope)
    assert sum(1 for _ in releasing) == 1
    here = FAILED if scope is None else IMPORTED
    assert list(depot.imports.end(found).statuses[0]) == [here] * 3
    assert states(depot) == ({"free": 8} if scope is None else {"cached": 3, "free": 5})


def test_parts_are_hits_as_they_come_and_kept_until_the_end() -> None:
    depot = make_depot(9)
    hashes, contents = chain(depot, range(16))
    found = begin(depot, hashes)
    depot.imports.fill(found, {0: filled_runs(hashes[:2], contents[:2])})
    assert states(depot) == {"pinned": 2, "in_transfer": 2, "free": 4}
    hit = depot.get_computed_blocks(depot.open_session(""), "a", content(range(17)))
    assert (hit.num_computed_tokens, hit.blocks) == (8, ([1, 2],))
    # The next part knows its parents; what never comes has failed.
    depot.imports.fill(found, {0: filled_runs(hashes[:3], contents[2:3], first=2)})
    result = depot.imports.finish(found)
    assert list(result.statuses[0]) == [IMPORTED, IMPORTED, IMPORTED, FAILED]
    stored = [event for event in truth_events(depot) if isinstance(event, BlockStored)]
    assert [event.parent_block_hash for event in stored] == [None, *hashes[:2]]
    assert states(depot) == {"cached": 3, "free": 5}


def test_events_are_those_of_content_that_was_computed_here() -> None:
    there, here = make_depot(9), make_depot(9)
    session = there.open_session("")
    there.allocate_slots(session, SlotRequest("a", content(range(13))))
    there.cache_blocks(session, "a", None, 12)
    bring(here, range(12))
    assert truth_events(here) == truth_events(there)


def test_a_block_behind_one_that_did_not_come_is_not_registered() -> None:
    depot = make_depot(9)
    hashes, contents = chain(depot, range(16))
    found = begin(depot, hashes)
    entries = filled(contents)
    entries[0][1] = Entry(MISSING)
    result = finish(depot, found, entries)
    assert list(result.statuses[0]) == [IMPORTED, MISSING, NOT_ATTEMPTED, NOT_ATTEMPTED]
    assert states(depot) == {"cached": 1, "free": 7}


def test_a_missing_branch_does_not_take_another_one_along() -> None:
    depot = make_depot(9)
    trunk, of_trunk = chain(depot, range(4))
    left, of_left = chain(depot, [*range(4), *range(50, 58)])
    right, of_right = chain(depot, [*range(4), *range(70, 74)])
    found = begin(depot, [*trunk, *left[1:], right[1]])
    entries = filled([*of_trunk, *of_left[1:], of_right[1]])
    entries[0][1] = Entry(FAILED)
    result = finish(depot, found, entries)
    assert list(result.statuses[0]) == [IMPORTED, FAILED, NOT_ATTEMPTED, IMPORTED]
    assert states(depot) == {"cached": 2, "free": 6}


def test_nothing_is_evicted_for_what_the_peer_does_not_have() -> None:
    depot = make_depot(5)
    bring(depot, range(16))
    hashes, _ = chain(depot, range(50, 66))
    found = depot.imports.begin_hashes("peer", [GroupHashes(0, hashes)])
    assert states(depot) == {"cached": 4}
    third = {0: Ready(0, [False, False, True, False])}
    assert depot.imports.take(found, third) == {0: [0, 0, 4, 0]}
    assert states(depot) == {"cached": 3, "in_transfer": 1}
    assert depot.imports.take(found, third) == {0: [0, 0, 4, 0]}
    assert depot.imports.take(found, {0: Ready(2, [True])}) == {0: [4]}
    missing = Entry(ImportStatus.MISSING)
    came = {0: [missing, missing, Entry(ImportStatus.FAILED), missing]}
    assert set(finish(depot, found, came).statuses[0]) == {
        ImportStatus.MISSING,
        ImportStatus.FAILED,
    }
    assert states(depot) == {"cached": 3, "free": 1}


def test_what_is_here_is_not_evicted_for_what_is_not() -> None:
    depot = make_depot(5)
    bring(depot, range(8))
    bring(depot, range(50, 54))
    hashes, contents = chain(depot, range(20))
    found = begin(depot, hashes)
    assert list(found.groups[0].statuses) == [PRESENT, PRESENT, 0, 0, NO_FIT]
    assert states(depot) == {"pinned": 2, "in_transfer": 2}
    result = finish(depot, found, filled(contents[2:5]))
    assert list(result.statuses[0]) == [PRESENT, PRESENT, IMPORTED, IMPORTED, NO_FIT]
    assert states(depot) == {"cached": 4}


def test_the_watermark_is_left_alone() -> None:
    depot = make_depot(11, watermark=0.5)
    hashes, _ = chain(depot, range(40))
    found = begin(depot, hashes)
    assert [status == NO_FIT for status in found.groups[0].statuses] == [False] * 5 + [True] * 5
    finish(depot, found, None)


def test_blocks_held_back_for_steps_in_flight_are_not_taken() -> None:
    depot = make_depot(5)
    session = depot.open_session("")
    session.begin(1, 0)
    depot.allocate_slots(session, SlotRequest("a", content(range(11))))
    depot.free(session, "a", FreeMode.FINISH, False)
    found = begin(depot, chain(depot, range(50, 66))[0])
    assert found.groups[0].wanted()[1] == [4, 0, 0, 0]
    finish(depot, found, None)
    assert states(depot) == {"quarantined": 3, "free": 1}


def test_all_groups_get_their_first_parts_when_not_all_fit() -> None:
    depot = Depot(groups_config(5, full(SIZE), window(9, SIZE), max_model_len=64))
    hashes, _ = chain(depot, range(16))
    found = depot.imports.begin_hashes("", [GroupHashes(0, hashes), GroupHashes(1, hashes)])
    take_all(depot, found)
    assert [len(group.running) for group in found.groups] == [2, 2]
    assert states(depot) == {"in_transfer": 4}
    finish(depot, found, None)
    assert states(depot) == {"free": 4}


@pytest.mark.parametrize("is_reset", [False, True], ids=["evicted", "reset"])
def test_what_was_registered_is_dropped_before_the_end(is_reset: bool) -> None:
    depot = make_depot(32)
    hashes, contents = chain(depot, range(12))
    found = begin(depot, hashes)
    depot.imports.fill(found, {0: filled_runs(hashes, contents[:2])})
    dropped = found.groups[0].blocks[1]
    assert dropped is not None
    if is_reset:
        depot.reset_prefix_cache(ResetMode.FORCE)
    else:
        depot.evict_blocks([dropped.block_id])
    assert check(depot) == []
    kept = [] if is_reset else [IMPORTED]
    assert list(depot.imports.finish(found).statuses[0]) == kept + [FAILED] * (3 - len(kept))
    assert check(depot) == []


def test_cancelled() -> None:
    depot = make_depot(9)
    hashes, _ = chain(depot, range(12))
    result = finish(depot, begin(depot, hashes), None)
    assert list(result.statuses[0]) == [FAILED] * 3
    assert states(depot) == {"free": 8}
    assert truth_events(depot) == []


@pytest.mark.parametrize("scope", [None, ResetScope(lora_name="A")], ids=["all", "scope"])
def test_a_reset_meanwhile(scope: ResetScope | None) -> None:
    depot = make_depot(9)
    bring(depot, range(4))
    hashes, contents = chain(depot, range(12))
    found = begin(depot, hashes)
    with pytest.raises(FailedPrecondition) as caught:
        depot.reset_prefix_cache(ResetMode.REFUSE, scope)
    assert f"transfer {found.import_id[:8]} of peer (3 blocks)" in caught.value.message
    depot.reset_prefix_cache(ResetMode.FORCE, scope)
    result = finish(depot, found, filled(contents[1:]))
    assert list(result.statuses[0]) == [FAILED if scope is None else PRESENT, FAILED, FAILED]
    assert states(depot) == ({"free": 8} if scope is None else {"cached": 1, "free": 7})


def test_after_a_reset_no_block_is_taken_for_the_rest() -> None:
    depot = make_depot(9)
    hashes, _ = chain(depot, range(12))
    found = depot.imports.begin_hashes("peer", [GroupHashes(0, hashes)])
    first = depot.imports.take(found, {0: Ready(0, [True])})
    assert first[0] != [0]
    depot.reset_prefix_cache(ResetMode.FORCE)
    assert depot.imports.take(found, {0: Ready(1, [True, True])}) == {0: [0, 0]}
    assert list(finish(depot, found, None).statuses[0]) == [FAILED] * 3
    assert states(depot) == {"free": 8}


def test_a_drain_waits_for_an_import_and_lets_none_begin() -> None:
    depot = make_depot(9)
    hashes, contents = chain(depot, range(8))
    found = begin(depot, hashes)
    pending = depot.reset_prefix_cache(ResetMode.DRAIN)
    with pytest.raises(FailedPrecondition) as caught:
        begin(depot, hashes)
    assert caught.value.reason == "RESET_PENDING"
    finish(depot, found, filled(contents))
    assert depot.drain_state(pending.drain_id).done
    assert states(depot) == {"free": 8}


def test_the_same_hashes_twice_at_once() -> None:
    depot = make_depot(9)
    hashes, contents = chain(depot, range(8))
    first, second = begin(depot, hashes), begin(depot, hashes)
    assert not set(first.groups[0].wanted()[1]) & set(second.groups[0].wanted()[1])
    assert list(finish(depot, second, filled(contents)).statuses[0]) == [IMPORTED] * 2
    assert list(finish(depot, first, filled(contents)).statuses[0]) == [PRESENT] * 2
    assert states(depot) == {"cached": 2, "free": 6}
    assert len(truth_events(depot)) == 2


def test_a_scheduler_computes_meanwhile_what_is_on_its_way() -> None:
    depot = make_depot(9)
    hashes, contents = chain(depot, range(8))
    found = begin(depot, hashes)
    session = depot.open_session("")
    session.begin(1, 0)
    depot.allocate_slots(session, SlotRequest("a", content(range(9))))
    # Registered, but nobody else may read it yet: what came is the first that can be.
    result = finish(depot, found, filled(contents))
    assert list(result.statuses[0]) == [IMPORTED] * 2
    assert len(truth_events(depot)) == 2
    session.begin(2, 1)
    assert truth_events(depot) == []
    assert states(depot) == {"live": 3, "cached": 2, "free": 3}


def test_what_was_here_is_evicted_by_an_operator_meanwhile() -> None:
    depot = make_depot(9)
    bring(depot, range(4))
    hashes, contents = chain(depot, range(8))
    found = begin(depot, hashes)
    depot.evict_blocks([1])
    result = finish(depot, found, filled(contents[1:]))
    assert list(result.statuses[0]) == [FAILED, NOT_ATTEMPTED]
    assert states(depot) == {"free": 8}


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(None, id="unknown content"),
        pytest.param(ContentRun(1, None, token_bytes(range(3))), id="other tokens"),
    ],
)
def test_content_that_cannot_be_told_is_not_registered(wrong: ContentRun | None) -> None:
    depot = make_depot(9)
    hashes, _ = chain(depot, range(4))
    result = finish(depot, begin(depot, hashes), {0: [Entry(IMPORTED, wrong)]})
    assert list(result.statuses[0]) == [FAILED]
    assert states(depot) == {"free": 8}


def test_the_first_missing_parents_are_told() -> None:
    depot = make_depot(100)
    chains = [chain(depot, range(100 * number, 100 * number + 8)) for number in range(70)]
    hashes = [hashes[1] for hashes, _ in chains]
    result = finish(depot, begin(depot, hashes), filled(contents[1] for _, contents in chains))
    assert list(result.statuses[0]) == [NOT_ATTEMPTED] * 70
    assert result.missing_parents == {0: [hashes[0] for hashes, _ in chains[:64]]}


def test_an_empty_parent_is_one_that_is_not_here() -> None:
    depot = make_depot(9)
    hashes, contents = chain(depot, range(8))
    wrong = [entry._replace(parent_hash=b"") for entry in contents]
    result = finish(depot, begin(depot, hashes), filled(wrong))
    assert list(result.statuses[0]) == [NOT_ATTEMPTED] * 2
    assert result.missing_parents == {}  # no block has that name
    assert states(depot) == {"free": 8}


def test_a_reset_by_lora_and_salt_finds_what_was_imported() -> None:
    depot = make_depot(9)
    hashes, contents = chain(depot, range(8))
    told = [entry._replace(lora_name="A", cache_salt="s") for entry in contents]
    finish(depot, begin(depot, hashes), filled(told))
    depot.reset_prefix_cache(ResetMode.REFUSE, ResetScope(lora_name="A", cache_salt="other"))
    assert states(depot) == {"cached": 2, "free": 6}
    depot.reset_prefix_cache(ResetMode.REFUSE, ResetScope(lora_name="A", cache_salt="s"))
    assert states(depot) == {"free": 8}


# --- for a request --------------------------------------------------------------------


def test_the_blocks_for_external_tokens_are_filled_and_then_confirmed() -> None:
    depot = make_depot(9)
    bring(depot, range(4))
    session = depot.open_session("")
    delay(depot, session, "a", range(14), 13)
    found = depot.imports.begin_request("peer", session, "a")
    hashes = session.requests["a"].block_hashes
    # Of 13 tokens 4 are here, 8 make full blocks, and the last one is in none.
    assert found.groups[0].wanted() == (hashes[1:], [2, 3])
    assert states(depot) == {"live": 4, "free": 4}
    result = finish(depot, found, {0: [Entry(IMPORTED)] * 2})
    assert result.num_tokens == 12
    assert states(depot) == {"live": 4, "free": 4}
    truth_events(depot)
    assert depot.cache_blocks(session, "a", None, result.num_tokens)
    assert len(truth_events(depot)) == 2
    assert states(depot) == {"live": 4, "free": 4}


@pytest.mark.parametrize(
    ("entries", "num_tokens"),
    [
        pytest.param([IMPORTED, IMPORTED, FAILED], 12, id="last"),
        pytest.param([IMPORTED, MISSING, IMPORTED], 8, id="middle"),
        pytest.param([FAILED, IMPORTED, IMPORTED], 4, id="first"),
        pytest.param(None, 4, id="cancelled"),
    ],
)
def test_the_verified_prefix(entries: list[ImportStatus] | None, num_tokens: int) -> None:
    depot = make_depot(9)
    bring(depot, range(4))
    session = depot.open_session("")
    delay(depot, session, "a", range(17), 16)
    found = depot.imports.begin_request("peer", session, "a")
    came = None if entries is None else {0: [Entry(entry) for entry in entries]}
    assert finish(depot, found, came).num_tokens == num_tokens
    assert depot.cache_blocks(session, "a", None, num_tokens)
    # What is missing can be had elsewhere: those blocks are filled again.
    if num_tokens < 16:
        again = depot.imports.begin_request("other", session, "a")
        assert len(again.groups[0].wanted()[0]) == 4 - num_tokens // SIZE
        finish(depot, again, None)
    assert check(depot) == []


@pytest.mark.parametrize("mode", FreeMode)
def test_a_request_is_freed_midway(mode: FreeMode) -> None:
    depot = make_depot(4)
    session = depot.open_session("")
    delay(depot, session, "a", range(13), 12)
    found = depot.imports.begin_request("peer", session, "a")
    ticket = depot.free(session, "a", mode, False).ticket
    if ticket:
        assert states(depot) == {"live": 3}
        depot.return_blocks(session, ticket)
    # Bytes may still land there: nobody gets them, not even the session itself.
    assert states(depot) == {"in_transfer": 3}
    again = SlotRequest("b", content(range(50, 54)))
    assert depot.allocate_slots(session, again).outcome is Outcome.NO_FIT
    result = finish(depot, found, {0: [Entry(IMPORTED)] * 3})
    assert result.num_tokens == 0
    assert states(depot) == {"free": 3}
    assert truth_events(depot) == []
    assert depot.allocate_slots(session, again).outcome is Outcome.OK


def test_blocks_that_a_step_in_flight_may_use_are_not_filled_for_a_request() -> None:
    """A session may take back at once what it freed: its workers wait, an import does not."""
    depot = make_depot(6)
    session = depot.open_session("")
    session.begin(1, 0)
    depot.allocate_slots(session, SlotRequest("a", content(range(50, 60))))
    depot.free(session, "a", FreeMode.FINISH, False)
    delay(depot, session, "b", range(9), 8)
    session.begin(2, 0)
    with pytest.raises(FailedPrecondition) as caught:
        depot.imports.begin_request("peer", session, "b")
    assert (caught.value.reason, caught.value.retryable) == ("STEP_IN_FLIGHT", True)
    assert states(depot) == {"live": 2, "quarantined": 2, "free": 1}
    session.begin(3, 1)
    found = depot.imports.begin_request("peer", session, "b")
    assert finish(depot, found, {0: [Entry(IMPORTED)] * 2}).num_tokens == 8
    # Blocks that no step in flight has used are filled at once.
    delay(depot, session, "c", range(70, 79), 8)
    finish(depot, depot.imports.begin_request("peer", session, "c"), None)
    assert check(depot) == []


def test_a_preempted_request_is_admitted_anew_while_its_old_blocks_are_filled() -> None:
    depot = make_depot(9)
    session = depot.open_session("")
    delay(depot, session, "a", range(13), 12)
    old = depot.imports.begin_request("peer", session, "a")
    depot.free(session, "a", FreeMode.PREEMPT, False)
    delay(depot, session, "a", range(13), 12)
    new = depot.imports.begin_request("peer", session, "a")
    assert not set(old.groups[0].wanted()[1]) & set(new.groups[0].wanted()[1])
    assert states(depot) == {"live": 3, "in_transfer": 3, "free": 2}
    assert finish(depot, old, {0: [Entry(IMPORTED)] * 3}).num_tokens == 0
    assert session.requests["a"].importing is new
    assert finish(depot, new, {0: [Entry(IMPORTED)] * 3}).num_tokens == 12
    assert states(depot) == {"live": 3, "free": 5}


def test_the_session_ends_midway_and_its_workers_do_not() -> None:
    depot = make_depot(4)
    session = depot.open_session("")
    depot.attach_worker(session)
    delay(depot, session, "a", range(13), 12)
    found = depot.imports.begin_request("peer", session, "a")
    depot.close_session(session)
    assert states(depot) == {"in_transfer": 3}
    assert finish(depot, found, {0: [Entry(IMPORTED)] * 3}).num_tokens == 0
    assert states(depot) == {"quarantined": 3}
    depot.detach_worker(session)
    assert states(depot) == {"free": 3}


def test_nothing_else_is_done_to_a_request_meanwhile() -> None:
    depot = make_depot(9)
    session = depot.open_session("")
    delay(depot, session, "a", range(13), 12)
    found = depot.imports.begin_request("peer", session, "a")
    calls: list[Callable[[], object]] = [
        lambda: depot.imports.begin_request("peer", session, "a"),
        lambda: depot.cache_blocks(session, "a", None, 12),
        lambda: depot.allocate_slots(
            session, SlotRequest("a", num_computed_tokens=12, num_new_tokens=1)
        ),
    ]
    for call in calls:
        with pytest.raises(FailedPrecondition) as caught:
            call()
        assert caught.value.reason == "IMPORT_RUNNING"
        assert caught.value.retryable
    with pytest.raises(FailedPrecondition) as caught:
        depot.cache_blocks(session, "a", content([99], 2), 0)
    assert caught.value.reason == "SHARED_BLOCK"
    finish(depot, found, None)
    assert check(depot) == []


def test_after_a_forced_reset_the_request_goes_on_but_registers_nothing() -> None:
    depot = make_depot(9)
    session = depot.open_session("")
    delay(depot, session, "a", range(13), 12)
    found = depot.imports.begin_request("peer", session, "a")
    depot.reset_prefix_cache(ResetMode.FORCE)
    assert finish(depot, found, {0: [Entry(IMPORTED)] * 3}).num_tokens == 12
    truth_events(depot)
    depot.cache_blocks(session, "a", None, 12)
    assert truth_events(depot) == []
    assert states(depot) == {"live": 3, "free": 5}


def test_a_copy_that_is_here_already_is_none_of_the_request() -> None:
    depot = make_depot(12)
    session = depot.open_session("")
    delay(depot, session, "a", range(13), 12)
    bring(depot, range(12))  # after the look-up
    found = depot.imports.begin_request("peer", session, "a")
    assert finish(depot, found, {0: [Entry(IMPORTED)] * 3}).num_tokens == 12
    truth_events(depot)
    depot.cache_blocks(session, "a", None, 12)
    assert truth_events(depot) == []  # it was told of before
    assert states(depot) == {"live": 3, "cached": 3, "free": 5}


HYBRID: dict[str, tuple[KVCacheSpec, ...]] = {
    "window": (full(2 * SIZE), window(9, SIZE)),
    "states": (full(SIZE), mamba("align", SIZE)),
}


@pytest.mark.parametrize(
    ("family", "wanted", "lost", "num_tokens"),
    [
        # Of 24 tokens the window keeps the last 8, in two blocks of 4.
        pytest.param("window", [3, 2], None, 24, id="window, all"),
        pytest.param("window", [3, 2], (0, 2), 0, id="window, it cannot go back"),
        pytest.param("window", [3, 2], (1, 0), 0, id="window, part of it"),
        pytest.param("states", [6, 1], None, 24, id="states, all"),
        pytest.param("states", [6, 1], (0, 5), 0, id="states, no earlier one"),
        pytest.param("states", [6, 1], (1, 0), 0, id="states, not the one"),
    ],
)
def test_hybrid(
    family: str, wanted: list[int], lost: tuple[int, int] | None, num_tokens: int
) -> None:
    depot = Depot(groups_config(32, *HYBRID[family], max_model_len=64))
    session = depot.open_session("")
    delay(depot, session, "a", range(25), 24)
    found = depot.imports.begin_request("peer", session, "a")
    assert [len(group.wanted()[0]) for group in found.groups] == wanted
    assert all(0 not in group.wanted()[1] for group in found.groups)
    entries = {number: [Entry(IMPORTED)] * count for number, count in enumerate(wanted)}
    if lost is not None:
        entries[lost[0]][lost[1]] = Entry(FAILED)
    assert finish(depot, found, entries).num_tokens == num_tokens
    if num_tokens:
        depot.cache_blocks(session, "a", None, num_tokens)
        depot.free(session, "a", FreeMode.FINISH, False)
        hit = depot.get_computed_blocks(session, "b", content(range(25)))
        assert hit.num_computed_tokens == num_tokens
    assert check(depot) == []


def test_of_a_wider_window_fewer_tokens_are_still_a_prefix() -> None:
    depot = Depot(groups_config(32, full(SIZE), window(9, SIZE), max_model_len=64))
    session = depot.open_session("")
    delay(depot, session, "a", range(25), 12)
    found = depot.imports.begin_request("peer", session, "a")
    # Of 12 tokens the next one's window looks at 4 to 12, of 8 at 0 to 8.
    assert [list(group.positions) for group in found.groups] == [[0, 1, 2], [1, 2]]
    entries = {0: [Entry(IMPORTED)] * 3, 1: [Entry(IMPORTED), Entry(FAILED)]}
    assert finish(depot, found, entries).num_tokens == 0
    assert check(depot) == []


# --- refused --------------------------------------------------------------------------


def _running(depot: Depot) -> object:
    session = depot.open_session("")
    depot.allocate_slots(session, SlotRequest("a", content(range(9))))
    return depot.imports.begin_request("", session, "a")


def _waiting(depot: Depot) -> object:
    session = depot.open_session("")
    depot.get_computed_blocks(session, "a", content(range(9)))
    return depot.imports.begin_request("", session, "a")


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        pytest.param(_running, FailedPrecondition, "NOT_DELAYED", id="running"),
        pytest.param(_waiting, FailedPrecondition, "NOT_DELAYED", id="without blocks"),
        pytest.param(
            lambda depot: depot.imports.begin_request("", depot.open_session(""), "?"),
            NotFound,
            "UNKNOWN_REQUEST",
            id="unknown",
        ),
        pytest.param(
            lambda depot: begin(depot, [b"short"]),
            InvalidArgument,
            "INVALID_ARGUMENT",
            id="short hash",
        ),
        pytest.param(
            lambda depot: begin(depot, [b"h" * 32] * 4),
            ResourceExhausted,
            "TOO_MANY_BLOCKS",
            id="many blocks",
        ),
        pytest.param(
            lambda depot: [begin(depot, []) for _ in range(3)],
            ResourceExhausted,
            "TOO_MANY_IMPORTS",
            id="many imports",
        ),
    ],
)
def test_refused(call: Callable[[Depot], object], error: type[Exception], reason: str) -> None:
    depot = make_depot(9, max_imports=2, max_transfer_blocks=3)
    with pytest.raises(error) as caught:
        call(depot)
    assert getattr(caught.value, "reason", None) == reason
    assert check(depot) == []


def test_without_a_prefix_cache_there_are_no_hashes() -> None:
    depot = make_depot(9, enable_caching=False)
    with pytest.raises(FailedPrecondition) as caught:
        begin(depot, [])
    assert caught.value.reason == "NO_PREFIX_CACHE"
