"""What was not computed after all: tokens cut off, and requests that did not run."""

from __future__ import annotations

import pytest

from building import content, full, groups_config, make_depot, mamba, token_bytes, window
from kvcore.check import check
from kvcore.depot import Depot
from kvcore.errors import FailedPrecondition
from kvcore.operation import Content, FreeMode, SlotRequest
from kvcore.reset import ResetMode
from kvcore.session import Session
from kvcore.spec import KVCacheSpec


def admit(depot: Depot, session: Session, request_id: str, num_tokens: int = 21) -> None:
    slots = SlotRequest(request_id, content(range(num_tokens)), lookup=True)
    assert depot.allocate_slots(session, slots).new_blocks


def cut(depot: Depot, session: Session, num_tokens: int) -> None:
    """Other tokens from ``num_tokens`` on."""
    changed = Content(token_offset=num_tokens, tokens=token_bytes(range(500, 504)))
    depot.cache_blocks(session, "r", changed, 0)


@pytest.mark.parametrize("how", ["hashed", "reset", "evicted"])
def test_not_over_a_block_that_another_request_shares(how: str) -> None:
    depot = make_depot(20)
    one, two = depot.open_session("one"), depot.open_session("two")
    admit(depot, one, "r")
    depot.cache_blocks(one, "r", None, 21)
    admit(depot, two, "q")
    if how == "reset":
        depot.reset_prefix_cache(ResetMode.FORCE)
    elif how == "evicted":
        depot.evict_blocks([3, 4, 5])
    with pytest.raises(FailedPrecondition) as caught:
        cut(depot, one, 8)
    assert caught.value.reason == "SHARED_BLOCK"
    assert one.requests["r"].num_tokens == 21
    assert check(depot) == []


def test_not_over_a_block_that_a_step_of_another_still_reads() -> None:
    depot = make_depot(20)
    one, two = depot.open_session("one"), depot.open_session("two")
    admit(depot, one, "r")
    depot.cache_blocks(one, "r", None, 21)
    two.begin(1, 0)
    admit(depot, two, "q")
    depot.free(two, "q", FreeMode.FINISH, did_not_run=False)
    with pytest.raises(FailedPrecondition, match="still reads"):
        cut(depot, one, 8)
    two.begin(2, 1)
    cut(depot, one, 8)
    assert one.requests["r"].num_tokens == 12
    assert check(depot) == []


@pytest.mark.parametrize(
    "spec", [pytest.param(window(6), id="window"), pytest.param(mamba("align"), id="states")]
)
def test_not_into_places_that_are_gone(spec: KVCacheSpec) -> None:
    depot = Depot(groups_config(40, full(), spec, max_model_len=256))
    session = depot.open_session("")
    admit(depot, session, "r", 20)
    grown = SlotRequest("r", content([7], 20), num_computed_tokens=20, num_new_tokens=1)
    assert depot.allocate_slots(session, grown).outcome.name == "OK"
    with pytest.raises(FailedPrecondition) as caught:
        cut(depot, session, 0)
    assert caught.value.reason == "WINDOW_RELEASED"
    assert check(depot) == []


@pytest.mark.parametrize("mode", ["none", "all", "align"])
def test_not_into_a_state_that_has_absorbed_what_is_cut(mode: str) -> None:
    depot = Depot(groups_config(40, full(), mamba(mode), max_model_len=256))
    session = depot.open_session("")
    admit(depot, session, "r", 24)
    with pytest.raises(FailedPrecondition) as caught:
        cut(depot, session, 22)
    assert caught.value.reason == "STATE_ADVANCED"
    assert session.requests["r"].num_tokens == 24
    assert check(depot) == []


def test_a_state_at_a_blocks_end_can_be_gone_on_from() -> None:
    depot = Depot(groups_config(40, full(), mamba("all"), max_model_len=256))
    session = depot.open_session("")
    admit(depot, session, "r", 24)
    cut(depot, session, 16)
    assert session.requests["r"].num_tokens == 20
    assert check(depot) == []


@pytest.mark.parametrize("mode", [FreeMode.FINISH, FreeMode.DETACH, FreeMode.PREEMPT])
def test_what_builds_on_a_request_that_did_not_run_is_no_hit(mode: FreeMode) -> None:
    depot = make_depot(40)
    session, other = depot.open_session(""), depot.open_session("other")
    session.begin(1, 0)
    admit(depot, session, "r")
    admit(depot, session, "behind it", 30)
    depot.free(session, "behind it", mode, did_not_run=False)
    depot.free(session, "r", FreeMode.PREEMPT, did_not_run=True)
    session.begin(2, 1)
    assert depot.snapshot() == []
    hit = depot.get_computed_blocks(other, "q", content(range(30)))
    assert hit.num_computed_tokens == 0
    assert check(depot) == []


def test_a_copy_that_was_not_written_takes_nothing_from_one_that_was() -> None:
    """What builds on the content was registered before the copy that is given up."""
    depot = make_depot(20)
    session = depot.open_session("")
    session.begin(1, 0)
    admit(depot, session, "r")
    session.begin(2, 0)
    copy = Content(tokens=token_bytes(range(21)), skip_reading_prefix_cache=True)
    assert depot.allocate_slots(session, SlotRequest("copy", copy)).new_blocks == (
        [7, 8, 9, 10, 11, 12],
    )
    depot.free(session, "copy", FreeMode.FINISH, did_not_run=True)
    hit = depot.get_computed_blocks(session, "again", content(range(21)))
    assert hit.blocks == ([1, 2, 3, 4, 5],)
    session.begin(2, 2)
    other = depot.open_session("other")
    assert depot.get_computed_blocks(other, "again", content(range(21))).num_computed_tokens == 20
    assert check(depot) == []
