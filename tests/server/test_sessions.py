"""Several sessions on one pool: who sees what, and when."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from kvdepot.v1 import admin_pb2, cache_pb2
from serving import Serve, Served, refused, tokens

PROMPT = tokens(*range(1, 11))


def test_a_hit_that_another_session_evicted_is_told(serve: Serve) -> None:
    served = serve(num_blocks=6)
    first, second = served.open("first"), served.open("second")
    first.admit("old", PROMPT)
    first.free("old")
    first.free("old")  # completes the step of the Free
    hit = second.lookup("wants it", PROMPT)
    assert hit.num_computed_tokens == 8

    flood = first.admit("flood", tokens(*range(100, 117)))
    assert flood.outcome == cache_pb2.OUTCOME_OK
    first.free("flood")
    first.reset()

    changed = second.allocate("wants it", num_new_tokens=2, num_new_computed_tokens=8)
    assert changed.outcome == cache_pb2.OUTCOME_HIT_CHANGED
    assert changed.num_new_computed_tokens == 0
    assert not any(table.ids for table in changed.new_blocks)
    again = second.allocate("wants it", num_new_tokens=10, num_new_computed_tokens=0)
    assert again.outcome == cache_pb2.OUTCOME_OK
    served.assert_clean()


def test_a_scheduler_two_steps_ahead(serve: Serve) -> None:
    """Its own blocks hit at once; others see them once their step has completed."""
    served = serve(num_blocks=17)
    ahead, other = served.open("two ahead"), served.open("other")

    ahead.admit("a", PROMPT, step=1, completed_step=0)
    ahead.allocate(
        "a",
        content=cache_pb2.RequestContent(token_offset=10, tokens=tokens(11, 12)),
        num_computed_tokens=10,
        num_new_tokens=2,
        context={"step": 2, "completed_step": 0},
    )
    assert ahead.lookup("own", PROMPT, step=2, completed_step=0).num_computed_tokens == 8
    assert other.lookup("not yet", PROMPT).num_computed_tokens == 0

    # Step 1 has ended: its two full blocks are everybody's. Step 2's is not.
    ahead.lookup("own", step=3, completed_step=1)
    longer = PROMPT + tokens(11, 12, 13)
    assert other.lookup("step 1", longer).num_computed_tokens == 8

    # Freed in step 3: only the freeing session may take the blocks before it completes.
    ahead.free("a", step=3, completed_step=1)
    assert served.stats().blocks.quarantined == 3
    refusal = other.admit("large", tokens(*range(200, 260)))
    assert refusal.outcome == cache_pb2.OUTCOME_NO_FIT
    assert refusal.no_fit.free_blocks == 13
    ahead.lookup("own", step=4, completed_step=3)
    assert served.stats().blocks.quarantined == 0
    assert other.lookup("step 2", longer).num_computed_tokens == 12
    served.assert_clean()


def test_what_did_not_run_is_nobodys_hit(served: Served) -> None:
    scheduler = served.open()
    scheduler.admit("aborted", PROMPT, step=1, completed_step=0)
    served.cache.Free(
        cache_pb2.FreeRequest(
            context=scheduler.context(step=1, completed_step=0),
            request_id="aborted",
            mode=cache_pb2.FREE_MODE_FINISH,
            did_not_run=True,
        )
    )
    assert scheduler.lookup("same", PROMPT, step=2, completed_step=1).num_computed_tokens == 0
    served.assert_clean()


def test_steps_only_go_on(served: Served) -> None:
    scheduler = served.open()
    scheduler.free("nobody", step=5, completed_step=3)

    def code_of(**context: Any) -> str:
        return refused(
            lambda: scheduler.free("nobody", **context), grpc.StatusCode.INVALID_ARGUMENT
        ).field

    assert "completed_step" in code_of(step=6)
    assert "step" in code_of(completed_step=5)


def test_calls_that_named_no_step_were_steps(served: Served) -> None:
    scheduler = served.open()
    scheduler.free("nobody")
    with pytest.raises(grpc.RpcError, match="each call before, which named none, was one"):
        scheduler.free("nobody", step=0, completed_step=0)
    scheduler.free("nobody", step=1, completed_step=0)


def test_a_call_that_names_no_step_ends_none_that_is_in_flight(served: Served) -> None:
    """A scheduler that pipelines forgot the two, say for a reset: its steps still run."""
    ahead, other = served.open("ahead"), served.open("other")
    ahead.admit("a", PROMPT, step=4, completed_step=2)
    ahead.admit("b", tokens(50, 51, 52, 53, 54), step=4, completed_step=2)
    ahead.free("b", step=4, completed_step=2)
    held = served.stats().blocks.quarantined
    assert held == 2
    ahead.lookup("c", PROMPT)
    ahead.free("c")
    assert served.stats().blocks.quarantined == held
    assert other.lookup("not yet", PROMPT).num_computed_tokens == 0
    # Nor does it move the sequence of steps.
    ahead.lookup("d", PROMPT, step=4, completed_step=3)
    ahead.lookup("d", step=5, completed_step=4)
    assert served.stats().blocks.quarantined == 0
    assert other.lookup("now", PROMPT).num_computed_tokens == 8
    served.assert_clean()


def test_the_largest_step_can_be_listed(served: Served) -> None:
    scheduler = served.open()
    last = (1 << 63) - 1
    for too_large in (last + 1, (1 << 64) - 1):
        detail = refused(
            lambda step=too_large: scheduler.free("nobody", step=step, completed_step=step),
            grpc.StatusCode.INVALID_ARGUMENT,
        )
        assert detail.field == "context.step"
    scheduler.free("nobody", step=last, completed_step=last)
    scheduler.free("nobody")
    (listed,) = served.admin.ListSessions(admin_pb2.ListSessionsRequest()).sessions
    assert (listed.step, listed.completed_step) == (last, last)


def test_request_ids_are_the_sessions_own(served: Served) -> None:
    first, second = served.open(), served.open()
    first.admit("job", PROMPT)
    second.admit("job", tokens(1))
    assert served.stats().num_requests == 2
    assert first.free("job").known
    assert second.free("job").known


def test_sessions_are_limited(serve: Serve) -> None:
    served = serve(max_sessions=2)
    served.open()
    last = served.open()
    refused(served.open, grpc.StatusCode.RESOURCE_EXHAUSTED)
    last.close()
    served.open()
