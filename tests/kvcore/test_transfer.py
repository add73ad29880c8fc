"""Blocks that peers read: pinned until the transfer ends, whatever becomes of their users."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import pytest

import kvcore.transfer
from building import content, full, groups_config, make_depot, window
from kvcore.check import check
from kvcore.depot import Depot
from kvcore.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from kvcore.holders import block_holders
from kvcore.operation import FreeMode, Outcome, SlotRequest
from kvcore.reset import ResetMode, ResetScope
from kvcore.session import Session
from kvcore.transfer import BlockStatus, GroupHashes, Transfer

READY, PENDING, MISSING = BlockStatus.READY, BlockStatus.PENDING, BlockStatus.MISSING


def admit(depot: Depot, session: Session, name: str, tokens: Iterable[int]) -> list[bytes]:
    """Allocate all of a request's tokens; its hashes."""
    slots = SlotRequest(name, content(tokens), lookup=True)
    assert depot.allocate_slots(session, slots).outcome is Outcome.OK
    return session.requests[name].block_hashes


def cached(depot: Depot, session: Session, name: str, tokens: Iterable[int]) -> list[bytes]:
    """Compute, confirm and free a request; the hashes that stay."""
    hashes = list(admit(depot, session, name, tokens))
    depot.cache_blocks(session, name, None, session.requests[name].num_tokens)
    depot.free(session, name, FreeMode.FINISH, False)
    return hashes


def open_hashes(depot: Depot, hashes: Iterable[bytes], group: int = 0) -> Transfer:
    return depot.transfers.open_hashes("peer", [GroupHashes(group, list(hashes))])


def states(depot: Depot) -> dict[str, int]:
    assert check(depot) == []
    return {state: n for state, n in depot.pool.states()._asdict().items() if n}


def test_every_hash_is_answered_and_the_ready_ones_are_pinned() -> None:
    depot = make_depot(9)
    session = depot.open_session("")
    here = cached(depot, session, "a", range(9))
    session.begin(1, 0)
    on_its_way = admit(depot, session, "b", range(50, 59))
    transfer = open_hashes(depot, [here[0], b"?" * 32, on_its_way[0], here[1]])
    (group,) = transfer.groups
    assert list(group.statuses) == [READY, MISSING, PENDING, READY]
    assert group.block_ids == [1, 0, 0, 2]
    assert states(depot) == {"live": 3, "pinned": 2, "free": 3}
    depot.transfers.close(transfer.transfer_id)
    assert states(depot) == {"live": 3, "cached": 2, "free": 3}


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have their turn after every hash."""
    monkeypatch.setattr(kvcore.transfer, "_TURN_BLOCKS", 1)


def test_others_have_their_turn_while_many_hashes_are_looked_up(one_at_a_time: None) -> None:
    depot = make_depot(9)
    session = depot.open_session("")
    hashes = cached(depot, session, "a", range(16))
    late = b"?" * 32
    opening = depot.transfers.opening_hashes("", [GroupHashes(0, [*hashes, late, hashes[0]])])
    transfer = next(opening)
    assert [next(opening) is transfer for _ in range(2)] == [True, True]
    # What was found is kept, and what was not yet may go.
    assert states(depot) == {"pinned": 3, "cached": 1, "free": 4}
    assert transfer.groups[0].block_ids == [1, 2, 3]
    with pytest.raises(FailedPrecondition):
        depot.reset_prefix_cache(ResetMode.REFUSE)
    admit(depot, session, "b", range(50, 70))
    assert [next(opening) is transfer for _ in range(2)] == [True, True]
    with pytest.raises(StopIteration) as done:
        next(opening)
    assert done.value.value is transfer
    assert list(transfer.groups[0].statuses) == [READY, READY, READY, MISSING, MISSING, READY]
    assert states(depot) == {"pinned": 3, "live": 5}
    depot.transfers.close(transfer.transfer_id)
    assert states(depot) == {"cached": 3, "live": 5}


def test_a_transfer_that_ends_while_it_is_opened_pins_no_more(one_at_a_time: None) -> None:
    depot = make_depot(9)
    hashes = cached(depot, depot.open_session(""), "a", range(16))
    opening = depot.transfers.opening_hashes("", [GroupHashes(0, hashes)])
    depot.transfers.end(next(opening).transfer_id)
    with pytest.raises(NotFound):
        next(opening)
    assert states(depot) == {"cached": 4, "free": 4}


def test_others_have_their_turn_while_a_transfer_is_closed(one_at_a_time: None) -> None:
    depot = make_depot(9)
    hashes = cached(depot, depot.open_session(""), "a", range(16))
    transfer = open_hashes(depot, hashes)
    # Waits for the transfer, too.
    assert not depot.reset_prefix_cache(ResetMode.DRAIN).done
    closing = depot.transfers.closing(transfer.transfer_id)
    for num_left in (3, 2, 1):
        next(closing)
        assert states(depot) == {"pinned": num_left, "cached": 4 - num_left, "free": 4}
        assert [holder.num_blocks for holder in block_holders(depot, None)] == [num_left]
    with pytest.raises(NotFound):  # it is not open any more
        depot.transfers.close(transfer.transfer_id)
    with pytest.raises(StopIteration):
        next(closing)
    assert states(depot) == {"free": 8}
    assert depot.generation == 1


@pytest.mark.parametrize("lost_at", [0, 1, 3])
def test_what_is_lost_before_it_was_looked_at_counts(one_at_a_time: None, lost_at: int) -> None:
    depot = make_depot(9)
    hashes = cached(depot, depot.open_session(""), "a", range(16))
    closing = depot.transfers.closing(open_hashes(depot, hashes).transfer_id)
    for _ in range(lost_at):
        next(closing)
    # The first one, which is looked at last; and the last one, which may have been.
    depot.evict_blocks([4 if lost_at == 3 else 1])
    with pytest.raises(FailedPrecondition) if lost_at < 3 else nullcontext():
        for _ in closing:
            pass
    assert states(depot) == {"cached": 3, "free": 5}


def test_a_pinned_block_is_never_in_the_free_list_nor_evicted() -> None:
    depot = make_depot(6)
    session = depot.open_session("")
    hashes = cached(depot, session, "a", range(9))
    transfer = open_hashes(depot, hashes)
    assert not {1, 2} & set(depot.pool.free_queue.block_ids())
    # Three are left; four do not fit, and three take none that is pinned.
    refused = depot.allocate_slots(session, SlotRequest("big", content(range(100, 116))))
    assert refused.no_fit is not None and refused.no_fit.free_blocks == 3
    fits = depot.allocate_slots(session, SlotRequest("b", content(range(200, 212))))
    assert not {1, 2} & set(fits.new_blocks[0])
    assert states(depot) == {"live": 3, "pinned": 2}
    depot.transfers.close(transfer.transfer_id)
    assert states(depot) == {"live": 3, "cached": 2}


def test_a_refusal_says_what_transfers_and_imports_keep() -> None:
    depot = make_depot(9)
    session = depot.open_session("engine")
    here = cached(depot, session, "a", range(13))
    transfer = open_hashes(depot, here)
    found = depot.imports.begin_hashes("peer", [GroupHashes(0, [bytes(32)])])
    depot.imports.take(found, {0: (0, [True])})
    admit(depot, session, "b", range(50, 58))
    refused = depot.allocate_slots(session, SlotRequest("c", content(range(80, 100)), lookup=True))
    assert refused.outcome is Outcome.NO_FIT
    assert refused.no_fit is not None
    assert [(hold.name, hold.num_blocks) for hold in refused.no_fit.holders] == [("engine", 2)]
    assert (refused.no_fit.pinned_blocks, refused.no_fit.in_transfer_blocks) == (3, 1)
    assert states(depot) == {"live": 2, "pinned": 3, "in_transfer": 1, "free": 2}
    assert refused.no_fit.free_blocks == 2
    depot.imports.finish(found)
    depot.transfers.close(transfer.transfer_id)


def test_the_queue_is_afterwards_as_if_the_blocks_had_been_freed_then() -> None:
    depot = make_depot(9)
    session = depot.open_session("")
    older = cached(depot, session, "a", range(9))
    cached(depot, session, "b", range(50, 59))
    transfer = open_hashes(depot, older)
    depot.pool.evict_blocks([2])
    with pytest.raises(FailedPrecondition):
        depot.transfers.close(transfer.transfer_id)
    # Without a hash to the front, with one to the back.
    queue = depot.pool.free_queue.block_ids()
    assert queue[0] == 2
    assert queue[-1] == 1


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    depot = make_depot(5)
    session = depot.open_session("")
    hashes = cached(depot, session, "a", range(16))
    depot.transfers.end(open_hashes(depot, hashes).transfer_id)
    assert depot.pool.free_queue.block_ids() == [4, 3, 2, 1]


def test_a_hit_on_pinned_blocks_costs_none_that_is_free() -> None:
    depot = make_depot(4)
    session = depot.open_session("")
    hashes = cached(depot, session, "a", range(9))
    transfer = open_hashes(depot, hashes)
    again = depot.allocate_slots(session, SlotRequest("b", content(range(9)), lookup=True))
    assert again.outcome is Outcome.OK
    assert again.hit_blocks == ([1, 2],)
    assert states(depot) == {"live": 3}
    depot.free(session, "b", FreeMode.FINISH, False)
    assert states(depot) == {"pinned": 2, "free": 1}
    depot.transfers.close(transfer.transfer_id)
    assert states(depot) == {"cached": 2, "free": 1}


def test_the_source_request_is_freed_and_its_session_ends_midway() -> None:
    depot = make_depot(9)
    session = depot.open_session("")
    admit(depot, session, "a", range(9))
    depot.cache_blocks(session, "a", None, 9)
    transfer = depot.transfers.open_request("peer", session, "a")
    assert list(transfer.groups[0].statuses) == [READY, READY]
    depot.free(session, "a", FreeMode.FINISH, False)
    assert states(depot) == {"pinned": 2, "free": 6}
    depot.close_session(session)
    assert states(depot) == {"pinned": 2, "free": 6}
    depot.transfers.close(transfer.transfer_id)
    assert states(depot) == {"cached": 2, "free": 6}


def test_a_block_in_flight_is_held_back_after_its_pin_as_before() -> None:
    depot = make_depot(4)
    first, second = depot.open_session(""), depot.open_session("")
    admit(depot, first, "a", range(9))
    depot.cache_blocks(first, "a", None, 9)
    transfer = depot.transfers.open_request("peer", first, "a")
    first.begin(2, 1)  # the step that runs may still read what is freed in it
    depot.free(first, "a", FreeMode.FINISH, False)
    assert states(depot) == {"pinned": 2, "quarantined": 1}
    depot.transfers.close(transfer.transfer_id)
    assert states(depot) == {"quarantined": 3}
    assert depot.pool.num_free_blocks(second.view) == 0
    first.begin(3, 2)
    assert states(depot) == {"cached": 2, "free": 1}


def test_quarantine_of_a_lone_session_reaches_beyond_a_pin() -> None:
    depot = make_depot(4)
    session = depot.open_session("")
    admit(depot, session, "a", range(9))
    depot.cache_blocks(session, "a", None, 9)
    depot.attach_worker(session)
    transfer = depot.transfers.open_request("peer", session, "a")
    depot.close_session(session)
    depot.transfers.close(transfer.transfer_id)
    other = depot.open_session("")
    assert depot.pool.num_free_blocks(other.view) == 0
    depot.detach_worker(session)
    assert depot.pool.num_free_blocks(other.view) == 3
    assert states(depot) == {"cached": 2, "free": 1}


def test_of_several_copies_the_first_that_is_ready_is_pinned() -> None:
    depot = make_depot(9)
    first, second = depot.open_session(""), depot.open_session("")
    first.begin(1, 0)
    hashes = admit(depot, first, "a", range(5))
    admit(depot, second, "b", range(5))
    depot.cache_blocks(second, "b", None, 4)
    (group,) = open_hashes(depot, hashes[:1]).groups
    assert group.block_ids == second.manager.get_block_ids("b")[0][:1]
    assert states(depot) == {"live": 4, "free": 4}


def test_truncation_into_a_pinned_block_is_refused() -> None:
    depot = make_depot(9)
    session = depot.open_session("")
    admit(depot, session, "a", range(9))
    depot.cache_blocks(session, "a", None, 9)
    transfer = depot.transfers.open_request("peer", session, "a")
    with pytest.raises(FailedPrecondition) as caught:
        depot.cache_blocks(session, "a", content([99], 4), 4)
    assert caught.value.reason == "SHARED_BLOCK"
    depot.transfers.close(transfer.transfer_id)
    assert depot.cache_blocks(session, "a", content([99], 4), 4)


@pytest.mark.parametrize("scope", [None, ResetScope(lora_name="")], ids=["all", "scope"])
def test_resets(scope: ResetScope | None) -> None:
    depot = make_depot(9)
    session = depot.open_session("")
    hashes = cached(depot, session, "a", range(9))
    transfer = open_hashes(depot, hashes)
    with pytest.raises(FailedPrecondition) as caught:
        depot.reset_prefix_cache(ResetMode.REFUSE, scope)
    assert f"transfer {transfer.transfer_id[:8]} of peer (2 blocks)" in caught.value.message
    assert transfer.transfer_id not in caught.value.message

    pending = depot.reset_prefix_cache(ResetMode.DRAIN, scope)
    assert not pending.done
    assert [holder.transfer for holder in pending.holders] == [transfer.transfer_id[:8]]
    # What is to go is no hit for peers either, so that the drain ends.
    late = open_hashes(depot, hashes)
    assert list(late.groups[0].statuses) == [MISSING, MISSING]
    depot.transfers.close(late.transfer_id)
    depot.transfers.close(transfer.transfer_id)
    assert depot.drain_state(pending.drain_id).done
    assert states(depot) == {"free": 8}

    hashes = cached(depot, session, "b", range(9))
    transfer = open_hashes(depot, hashes)
    depot.reset_prefix_cache(ResetMode.FORCE, scope)
    assert states(depot) == {"pinned": 2, "free": 6}
    with pytest.raises(FailedPrecondition) as caught:
        depot.transfers.close(transfer.transfer_id)
    assert caught.value.reason == "CONTENT_DROPPED"
    assert states(depot) == {"free": 8}


def test_a_reset_of_another_scope_passes_by() -> None:
    depot = make_depot(9)
    hashes = cached(depot, depot.open_session(""), "a", range(9))
    transfer = open_hashes(depot, hashes)
    depot.reset_prefix_cache(ResetMode.REFUSE, ResetScope(lora_name="other"))
    depot.transfers.close(transfer.transfer_id)


def test_an_evicted_block_stays_pinned_but_its_bytes_do_not_count() -> None:
    depot = make_depot(9)
    hashes = cached(depot, depot.open_session(""), "a", range(9))
    transfer = open_hashes(depot, hashes)
    assert depot.evict_blocks([1]) == 1
    assert states(depot) == {"pinned": 2, "free": 6}
    with pytest.raises(FailedPrecondition) as caught:
        depot.transfers.close(transfer.transfer_id)
    assert caught.value.reason == "CONTENT_DROPPED"
    assert states(depot) == {"cached": 1, "free": 7}


def drop_by_use(depot: Depot) -> None:
    session = depot.open_session("")
    admit(depot, session, "b", range(50, 50 + 4 * 8))


@pytest.mark.parametrize(
    ("drop", "left"),
    [
        pytest.param(lambda depot: None, [7, 8], id="nothing"),
        pytest.param(lambda depot: depot.evict_blocks([1]), [8], id="an operator"),
        pytest.param(drop_by_use, [], id="other content"),
        pytest.param(
            lambda depot: depot.reset_prefix_cache(ResetMode.FORCE, None), [], id="a reset"
        ),
        pytest.param(
            lambda depot: depot.reset_prefix_cache(ResetMode.FORCE, ResetScope(cache_salt="")),
            [],
            id="a reset of a scope",
        ),
    ],
)
def test_checksums_are_known_as_long_as_the_content_is_here(
    drop: Callable[[Depot], object], left: list[int]
) -> None:
    depot = make_depot(9)
    session = depot.open_session("")
    hashes = cached(depot, session, "a", range(8))
    sums = depot.pool.sums
    transfer = open_hashes(depot, hashes)
    assert sums.of(transfer.blocks) == [0, 0]
    depot.transfers.keep_sums(transfer.transfer_id, [1, 2, 5], [7, 8, 9])
    assert sums.of(depot.pool.blocks[1:]) == [7, 8, 0, 0, 0, 0, 0, 0]  # 5 is not its
    # What is known stays: bytes that say otherwise are wrong.
    depot.transfers.keep_sums(transfer.transfer_id, [1], [99])
    assert sums.of(depot.pool.blocks[1:3]) == [7, 8]
    depot.transfers.close(transfer.transfer_id)
    # Of a transfer that has ended nothing is kept: the block may be another's.
    depot.transfers.keep_sums(transfer.transfer_id, [1], [99])
    drop(depot)
    assert [value for value in sums.of(depot.pool.blocks) if value] == left


def test_checksums_of_content_that_was_dropped_meanwhile_are_not_kept() -> None:
    depot = make_depot(9)
    hashes = cached(depot, depot.open_session(""), "a", range(8))
    transfer = open_hashes(depot, hashes)
    depot.evict_blocks([1])
    depot.transfers.keep_sums(transfer.transfer_id, [1, 2], [7, 8])
    assert depot.pool.sums.of(transfer.blocks) == [0, 8]


def test_a_request_of_several_groups() -> None:
    depot = Depot(groups_config(16, full(4), window(4, 4), max_model_len=64))
    session = depot.open_session("")
    hashes = list(admit(depot, session, "a", range(13)))
    depot.cache_blocks(session, "a", None, 12)
    grow = SlotRequest("a", content([50], 13), num_computed_tokens=13, num_new_tokens=1)
    assert depot.allocate_slots(session, grow).outcome is Outcome.OK
    transfer = depot.transfers.open_request("peer", session, "a")
    assert [list(group.statuses) for group in transfer.groups] == [
        [READY, READY, READY],
        [MISSING, MISSING, READY],  # the window has left the others behind
    ]
    assert all(list(group.hashes) == hashes for group in transfer.groups)
    assert check(depot) == []


def test_a_block_asked_for_twice_is_pinned_once() -> None:
    depot = make_depot(9)
    hashes = cached(depot, depot.open_session(""), "a", range(9))
    transfer = open_hashes(depot, hashes + hashes)
    assert transfer.groups[0].block_ids == [1, 2, 1, 2]
    assert depot.pool.pins.counts[1] == 1
    again = open_hashes(depot, hashes)
    depot.transfers.close(transfer.transfer_id)
    assert states(depot) == {"pinned": 2, "free": 6}
    depot.transfers.close(again.transfer_id)
    assert states(depot) == {"cached": 2, "free": 6}


def test_what_is_closed_is_not_known() -> None:
    depot = make_depot(9)
    transfer = open_hashes(depot, [])
    depot.transfers.close(transfer.transfer_id)
    with pytest.raises(NotFound) as caught:
        depot.transfers.close(transfer.transfer_id)
    assert caught.value.reason == "UNKNOWN_TRANSFER"


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        pytest.param(
            lambda depot: open_hashes(depot, [b"short"]),
            InvalidArgument,
            "INVALID_ARGUMENT",
            id="short hash",
        ),
        pytest.param(
            lambda depot: open_hashes(depot, [], group=1),
            InvalidArgument,
            "INVALID_ARGUMENT",
            id="no group",
        ),
        pytest.param(
            lambda depot: depot.transfers.open_hashes("", [GroupHashes(0, [])] * 2),
            InvalidArgument,
            "INVALID_ARGUMENT",
            id="group twice",
        ),
        pytest.param(
            lambda depot: open_hashes(depot, [b"h" * 32] * 4),
            ResourceExhausted,
            "TOO_MANY_BLOCKS",
            id="many blocks",
        ),
        pytest.param(
            lambda depot: [open_hashes(depot, []) for _ in range(3)],
            ResourceExhausted,
            "TOO_MANY_TRANSFERS",
            id="many transfers",
        ),
        pytest.param(
            lambda depot: depot.transfers.open_request("", depot.open_session(""), "?"),
            NotFound,
            "UNKNOWN_REQUEST",
            id="unknown request",
        ),
    ],
)
def test_refused(call: Callable[[Depot], object], error: type[Exception], reason: str) -> None:
    depot = make_depot(9, max_transfers=2, max_transfer_blocks=3)
    with pytest.raises(error) as caught:
        call(depot)
    assert getattr(caught.value, "reason", None) == reason
    assert check(depot) == []
