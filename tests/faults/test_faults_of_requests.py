"""Faults that caches are known for, a story each: requests that end, end twice, or come again.

The stories are of a scheduler A, and at times a second one, B, on a pool of 16 blocks of 4
tokens. A mark (s, c) says: this call is of step s, and the writes of step c have ended.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvclient import Client
from kvclient.client import Session
from kvclient.errors import AlreadyExists, CacheLost, InvalidArgument, NotFound
from kvclient.pool import map_pool
from kvclient.values import (
    BlockStatus,
    Cache,
    Content,
    ExtraKeys,
    Free,
    FreeMode,
    Grow,
    OperationKind,
    Outcome,
    SlotRequest,
    Step,
    StepMark,
)
from kvserver.mover.handle import MoverHandle
from serving import Serve
from stage import (
    OTHER,
    PROMPT,
    Stage,
    admit,
    fill,
    mark_blocks,
    stored_hashes,
    table,
    written,
)


def test_abort_before_allocation(stage: Stage) -> None:
    """A request is aborted between its lookup and its allocation: the hit leaks no reference."""
    written(stage.b, "warm")
    hit = stage.a.get_computed_blocks("r", list(PROMPT))
    assert hit.num_computed_tokens == 8
    assert stage.a.free("r").known
    with pytest.raises(NotFound):
        stage.a.allocate_slots(SlotRequest("r", num_new_computed_tokens=8))
    assert stage.states == (0, 2, 0, 14)


def test_abort_of_a_refused_request(stage: Stage) -> None:
    """A request that never fitted is aborted: a refusal leaves no reference on its hit."""
    (first, second, _) = written(stage.b, "warm")
    fill(stage.b, "big", 14)
    refused = admit(stage.a, "r", range(100, 140))
    assert refused.outcome is Outcome.NO_FIT
    assert (stage.refs(first), stage.refs(second)) == (0, 0)
    assert stage.a.free("r").known
    assert stage.b.free("big").known


def test_abort_during_a_transfer(serve: Serve) -> None:
    """Blocks are freed while a peer pulls them: nobody is given them until it is done."""
    served = serve(
        num_blocks=257,
        num_layers=24,
        num_kv_heads=8,
        head_size=128,
        make_data_plane=MoverHandle,
    )
    with Client(served.target, timeout_s=60) as client, client.open_session("A") as a:
        pool = map_pool(a.pool)
        prompt = list(range(4 * 255))
        blocks = table(admit(a, "r", prompt))
        mark_blocks(pool, blocks, [index % 250 + 1 for index in range(255)])
        a.cache_blocks("r", len(prompt))
        hashes = stored_hashes(client)
        assert len(hashes) == 255
        answers = client.pull_blocks(hashes, checksums=True, timeout_s=60)
        pulled = [next(answers)]
        a.free("r")
        taken = fill(a, "other", 1)
        assert admit(a, "more", [1]).outcome is Outcome.NO_FIT
        mark_blocks(pool, taken, [255])
        served.assert_clean()
        pulled += answers
        assert [answer.block_hash for answer in pulled] == hashes
        for index, answer in enumerate(pulled):
            assert answer.status is BlockStatus.READY
            assert set(answer.data) == {index % 250 + 1}
        fill(a, "rest", 255)
        served.assert_clean()


def test_abort_while_a_peer_still_writes(stage: Stage) -> None:
    """A request that waits for KV from elsewhere is aborted: what arrives late is nobody's hit."""
    slots = SlotRequest(
        "r",
        Content(list(PROMPT)),
        num_external_computed_tokens=8,
        num_new_tokens=0,
        delay_cache_blocks=True,
    )
    assert stage.a.allocate_slots(slots, mark=StepMark(1, 0)).outcome is Outcome.OK
    assert stage.a.free("r", mark=StepMark(1, 0)).known
    # Step 1 may still write: the blocks are not B's yet.
    assert stage.states == (0, 0, 2, 14)
    assert admit(stage.b, "all", range(60)).outcome is Outcome.NO_FIT
    # The load says that it is done, after the abort.
    assert not stage.a.cache_blocks("r", 8, mark=StepMark(2, 1))
    assert stage.b.get_computed_blocks("same", list(PROMPT)).num_computed_tokens == 0
    assert admit(stage.b, "all2", range(60)).outcome is Outcome.OK


def test_duplicate_request_id(stage: Stage) -> None:
    """An id in use: the same content is the same request, other content is refused."""
    first = admit(stage.a, "r", PROMPT)
    again = stage.a.allocate_slots(
        SlotRequest("r", Content(list(PROMPT)), num_computed_tokens=10, num_new_tokens=1)
    )
    assert again.handle == first.handle
    assert again.new_blocks == ([],)
    with pytest.raises(AlreadyExists):
        admit(stage.a, "r", OTHER)
    salted = Content(list(PROMPT), extra_keys=ExtraKeys(cache_salt="salt"))
    with pytest.raises(AlreadyExists):
        admit(stage.a, "r", salted)
    # Another scheduler's ids are its own.
    assert admit(stage.b, "r", OTHER).handle != first.handle
    assert stage.a.free("r").known
    assert stage.client.stats().num_requests == 1


def test_double_free(stage: Stage) -> None:
    """A request is freed twice: another's references to the same blocks stay."""
    written(stage.a, "warm")
    shared = table(admit(stage.a, "r", PROMPT))[:2]
    assert table(admit(stage.b, "r", PROMPT))[:2] == shared
    assert stage.a.free("r").known
    assert not stage.a.free("r").known
    assert [stage.refs(block_id) for block_id in shared] == [1, 1]


def test_freed_by_free_and_by_close(stage: Stage) -> None:
    """Free, and then the end of the session: once is enough."""
    written(stage.b, "warm")
    shared = table(admit(stage.b, "r", PROMPT))[:2]
    table(admit(stage.a, "r", PROMPT))
    stage.a.free("r")
    assert stage.a.close() == 0
    assert [stage.refs(block_id) for block_id in shared] == [1, 1]
    assert stage.states[0] == 3


def test_freed_by_a_step_and_by_a_call(stage: Stage) -> None:
    """A Step frees a request that Free freed, and the other way round."""
    admit(stage.b, "stays", PROMPT)
    handles = [admit(stage.a, name, PROMPT).handle for name in ("r", "s")]
    assert stage.a.free("r").known
    step = Step(runs=[(OperationKind.FREE, 2)], free=Free(handles))
    assert list(stage.a.step(step).free_outcomes) == [Outcome.UNKNOWN_HANDLE, Outcome.OK]
    assert not stage.a.free("s").known
    assert stage.states[0] == 3


def test_freed_twice_in_one_step(stage: Stage) -> None:
    """A Step frees the same request twice, and grows it in between."""
    handle = admit(stage.a, "r", PROMPT).handle
    step = Step(
        runs=[(OperationKind.FREE, 1), (OperationKind.GROW, 1), (OperationKind.FREE, 1)],
        grow=Grow([handle], [10], [1]),
        free=Free([handle, handle]),
    )
    result = stage.a.step(step)
    unknown = Outcome.UNKNOWN_HANDLE
    assert list(result.free_outcomes) == [Outcome.OK, unknown]
    assert list(result.grow.outcomes) == [unknown]
    assert stage.states[0] == 0


def test_freed_by_the_lease_and_by_a_late_call(stage: Stage) -> None:
    """A scheduler that was gone too long frees what was freed for it: it is fenced."""
    written(stage.b, "warm")
    shared = table(admit(stage.b, "r", PROMPT))[:2]
    stale = stage.client.open_session("late", lease_ttl_s=1.0)
    stage.client._keeper.remove(stale)
    table(admit(stale, "r", PROMPT))
    stage.pass_time(1.1)
    with pytest.raises(CacheLost, match="lease"):
        stale.free("r")
    assert [stage.refs(block_id) for block_id in shared] == [1, 1]


def test_a_ticket_is_returned_twice(stage: Stage) -> None:
    """Detached blocks given back twice, and after the session gave all back."""
    ticket = _detached(stage.a, "r")
    assert stage.a.return_blocks(ticket) == 3
    with pytest.raises(NotFound):
        stage.a.return_blocks(ticket)
    with pytest.raises(NotFound):
        stage.b.return_blocks(_detached(stage.a, "s"))  # and by somebody else
    stage.a.close()
    assert stage.states == (0, 2, 0, 14)


def _detached(session: Session, request_id: str) -> int:
    admit(session, request_id, PROMPT)
    session.cache_blocks(request_id, 10)
    return session.free(request_id, FreeMode.DETACH).ticket


def test_tickets_of_a_dead_scheduler(stage: Stage) -> None:
    """Blocks detached for a transfer are not lost with the scheduler that owed them."""
    dead = stage.client.open_session("dead", lease_ttl_s=1.0)
    stage.client._keeper.remove(dead)
    assert _detached(dead, "r")
    assert stage.states[0] == 3
    stage.pass_time(1.1)
    assert stage.states == (0, 2, 0, 14)


def test_preempted_and_admitted_again_under_the_same_id(stage: Stage) -> None:
    """Tokens and hashes stay; what was written is a hit, what was not is computed again."""
    first = admit(stage.a, "r", PROMPT, 1, 0)
    stage.a.free("r", FreeMode.PREEMPT, did_not_run=True, mark=StepMark(1, 0))
    again = stage.a.allocate_slots(SlotRequest("r", lookup=True), mark=StepMark(2, 1))
    assert again.handle == first.handle
    assert again.num_new_computed_tokens == 0
    stage.a.cache_blocks("r", 10, mark=StepMark(2, 1))
    stage.a.free("r", FreeMode.PREEMPT, mark=StepMark(3, 2))
    again = stage.a.allocate_slots(SlotRequest("r", lookup=True), mark=StepMark(4, 3))
    assert again.num_new_computed_tokens == 8
    assert stage.client.stats().num_requests == 1


def test_detached_and_admitted_again_under_the_same_id(stage: Stage) -> None:
    """The late return of the first life's blocks does not touch those of the second."""
    ticket = _detached(stage.a, "r")
    second = table(admit(stage.a, "r", OTHER))
    assert stage.a.return_blocks(ticket) == 3
    assert [stage.refs(block_id) for block_id in second] == [1, 1, 1]


def test_a_late_step_names_the_handle_of_a_freed_request(stage: Stage) -> None:
    """An id is used again while the engine still speaks of its former life: handles tell."""
    old = admit(stage.a, "r", PROMPT).handle
    stage.a.free("r")
    new = admit(stage.a, "r", OTHER)
    step = Step(
        runs=[(OperationKind.GROW, 1), (OperationKind.CACHE, 1), (OperationKind.FREE, 1)],
        grow=Grow([old], [10], [1]),
        cache=Cache([old], [10]),
        free=Free([old]),
    )
    result = stage.a.step(step)
    unknown = bytes([Outcome.UNKNOWN_HANDLE])
    assert (result.grow.outcomes, result.cache_outcomes, result.free_outcomes) == (unknown,) * 3
    assert [stage.refs(block_id) for block_id in table(new)] == [1, 1, 1]


def test_a_preempted_prefill(stage: Stage) -> None:
    """Preempted after its first chunk: only whole blocks of that chunk are hits."""
    admit(stage.a, "r", range(100, 120), 1, 0, max_new_tokens=6)
    stage.a.free("r", FreeMode.PREEMPT, mark=StepMark(2, 1))
    again = stage.a.allocate_slots(SlotRequest("r", lookup=True), mark=StepMark(3, 2))
    assert again.num_new_computed_tokens == 4


def test_a_scheduler_ends_with_a_step_in_flight(stage: Stage) -> None:
    """It closes because it failed, its last step half written: that is no hit for anybody."""
    admit(stage.a, "r", PROMPT, 1, 0)
    stage.a.close()
    assert stage.b.get_computed_blocks("r", list(PROMPT)).num_computed_tokens == 0
    assert stored_hashes(stage.client) == []


def test_limits_are_told_apart_from_bugs(stage: Stage) -> None:
    """More tokens than were ever given are refused, and change nothing."""
    admit(stage.a, "r", PROMPT)
    for computed in (11, 1 << 30):
        with pytest.raises(InvalidArgument):
            stage.a.cache_blocks("r", computed)
    assert stage.states[0] == 3
    assert Path(stage.a.pool.mapping_path).exists()
