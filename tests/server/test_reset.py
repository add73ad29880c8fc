"""ResetPrefixCache: refused, waiting, or over what is in use; of all or of one namespace."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kvdepot.v1 import cache_pb2 as pb
from kvdepot.v1 import event_pb2, types_pb2
from manual_clock import ManualClock
from serving import Scheduler, Serve, Served, int32s, refused, tokens

PROMPT = tokens(*range(1, 11))
OTHER = tokens(*range(50, 60))


def reset(
    scheduler: Scheduler, mode: int, *, context: dict[str, Any] | None = None, **request: Any
) -> Any:
    """ResetPrefixCache in ``mode``."""
    return scheduler.stub.ResetPrefixCache(
        pb.ResetPrefixCacheRequest(
            context=scheduler.context(**(context or {})),
            mode=mode,
            **request,
        ),
        timeout=60,
    )


def admit(
    scheduler: Scheduler, request_id: str, prompt: bytes, *, lora: str = "", salt: str = ""
) -> Any:
    """Look up and allocate under a LoRA and a cache salt."""
    extra = types_pb2.ExtraKeys(lora_name=lora or None, cache_salt=salt or None)
    return scheduler.allocate(
        request_id, content=pb.RequestContent(tokens=prompt, extra_keys=extra), lookup=True
    )


class Follower:
    """The truth feed, read as it comes."""

    def __init__(self, served: Served) -> None:
        self._stream = served.follow()
        self._events: Iterator[Any] = (event for batch in self._stream for event in batch.events)

    def until(self, kind: str) -> list[Any]:
        """All events up to the first of ``kind``."""
        seen = []
        for event in self._events:
            seen.append(event)
            if event.WhichOneof("event") == kind:
                break
        return seen

    def close(self) -> None:
        self._stream.cancel()


@pytest.mark.parametrize("mode", [pb.RESET_MODE_UNSPECIFIED, pb.RESET_MODE_REFUSE])
def test_refused_while_blocks_are_in_use(served: Served, mode: int) -> None:
    scheduler = served.open("engine")
    scheduler.admit("small", tokens(1))
    scheduler.admit("large", PROMPT)
    with pytest.raises(grpc.RpcError) as caught:
        reset(scheduler, mode)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "session engine request large (3 blocks); session engine request small (1 blocks)" in (
        caught.value.details()
    )
    assert served.stats().generation == 0
    scheduler.free("large")
    scheduler.free("small")
    reply = reset(scheduler, mode)
    assert (reply.generation, reply.done, reply.drain_id) == (1, True, 0)
    assert scheduler.lookup("a", PROMPT).num_computed_tokens == 0
    served.assert_clean()


def test_a_reset_that_waits(served: Served) -> None:
    follower = Follower(served)
    first, second = served.open("first"), served.open("second")
    handle = first.admit("runs", PROMPT).handle
    second.admit("detached", OTHER)
    ticket = second.free("detached", pb.FREE_MODE_DETACH).ticket
    second.admit("preempted", OTHER)
    second.free("preempted", pb.FREE_MODE_PREEMPT)

    waiting = reset(first, pb.RESET_MODE_DRAIN)
    assert not waiting.done
    assert not waiting.abandoned
    assert waiting.generation == 0
    held = [(h.session_name, h.request_id, bool(h.ticket), h.num_blocks) for h in waiting.holders]
    assert sorted(held) == [("first", "runs", False, 3), ("second", "", True, 3)]

    # Nothing comes in, what runs goes on.
    assert second.lookup("new", PROMPT).num_computed_tokens == 0
    for request_id in ("new", "preempted"):
        result = second.allocate(request_id, lookup=True)
        assert result.outcome == pb.OUTCOME_RESETTING
        assert not any(table.ids for table in result.new_blocks)
    grown = first.allocate(
        "runs",
        content=pb.RequestContent(token_offset=10, tokens=tokens(11, 12, 13)),
        num_computed_tokens=10,
        num_new_tokens=3,
    )
    assert grown.outcome == pb.OUTCOME_OK
    response = served.cache.Step(
        pb.StepRequest(
            context=first.context(),
            runs=[pb.Run(kind=1, count=1), pb.Run(kind=2, count=1)],
            admissions=[
                pb.SlotRequest(request_id="x", content=pb.RequestContent(tokens=OTHER), lookup=True)
            ],
            grow=pb.GrowColumns(
                handles=int32s(handle), num_computed_tokens=int32s(13), num_new_tokens=int32s(1)
            ),
        ),
        timeout=60,
    )
    assert response.admissions[0].outcome == pb.OUTCOME_RESETTING
    assert list(response.grow.outcomes) == [pb.OUTCOME_NOT_ATTEMPTED]

    # Asked again, by another session: the same drain. The last to free resets.
    again = reset(second, pb.RESET_MODE_DRAIN)
    assert (again.drain_id, again.done) == (waiting.drain_id, False)
    first.free("runs")
    assert served.stats().reset_pending
    assert not reset(first, 0, drain_id=waiting.drain_id).done
    second.stub.ReturnBlocks(
        pb.ReturnBlocksRequest(context=second.context(), ticket=ticket), timeout=60
    )
    assert not served.stats().reset_pending
    done = reset(first, 0, drain_id=waiting.drain_id)
    assert (done.done, done.generation, list(done.holders)) == (True, 1, [])
    events = follower.until("all_blocks_cleared")
    assert events[-1].all_blocks_cleared.generation == 1
    follower.close()
    assert second.allocate("preempted", lookup=True).num_new_computed_tokens == 0
    served.assert_clean()


def test_a_reset_with_nothing_to_wait_for(served: Served) -> None:
    reply = reset(served.open(), pb.RESET_MODE_DRAIN)
    assert (reply.done, reply.generation) == (True, 1)


def test_the_death_of_the_last_holder_resets(serve: Serve) -> None:
    clock = ManualClock()
    served = serve(clock=clock)
    dies, waits = served.open("dies"), served.open("waits")
    dies.admit("a", PROMPT)
    drain_id = reset(waits, pb.RESET_MODE_DRAIN).drain_id
    served.loop.call(lambda: clock.advance(29))
    assert not reset(waits, 0, drain_id=drain_id).done
    served.loop.call(lambda: clock.advance(2))
    assert reset(waits, 0, drain_id=drain_id).done
    served.assert_clean()


def test_a_step_resets_at_its_end(served: Served) -> None:
    """Not between its operations: what follows the last free is not admitted yet."""
    scheduler = served.open()
    handle = scheduler.admit("a", PROMPT).handle
    drain_id = reset(scheduler, pb.RESET_MODE_DRAIN).drain_id
    admission = pb.SlotRequest(request_id="b", content=pb.RequestContent(tokens=OTHER), lookup=True)

    def step(runs: list[Any], **columns: Any) -> Any:
        return served.cache.Step(
            pb.StepRequest(
                context=scheduler.context(), runs=runs, admissions=[admission], **columns
            ),
            timeout=60,
        )

    both = step(
        [pb.Run(kind=4, count=1), pb.Run(kind=1, count=1)],
        free=pb.FreeColumns(handles=int32s(handle)),
    )
    assert both.admissions[0].outcome == pb.OUTCOME_RESETTING
    assert reset(scheduler, 0, drain_id=drain_id).done
    assert step([pb.Run(kind=1, count=1)]).admissions[0].outcome == pb.OUTCOME_OK


def test_a_reset_that_waits_too_long_is_abandoned(serve: Serve) -> None:
    clock = ManualClock()
    served = serve(clock=clock, reset_deadline_seconds=20.0)
    scheduler = served.open()
    scheduler.admit("a", PROMPT)
    scheduler.free("nobody")

    def drained(**request: Any) -> Any:
        return reset(scheduler, pb.RESET_MODE_DRAIN, **request)

    by_callers = drained(deadline_seconds=5.0).drain_id
    served.loop.call(lambda: clock.advance(4.9))
    # Asking again gives no more time.
    assert drained(deadline_seconds=15.0).drain_id == by_callers
    served.loop.call(lambda: clock.advance(0.2))
    state = reset(scheduler, 0, drain_id=by_callers)
    assert (state.done, state.abandoned, state.generation) == (False, True, 0)
    hit = scheduler.lookup("b", PROMPT)
    assert hit.num_computed_tokens == 8

    by_default = drained().drain_id
    assert by_default != by_callers
    served.loop.call(lambda: clock.advance(19))
    assert not reset(scheduler, 0, drain_id=by_default).abandoned
    served.loop.call(lambda: clock.advance(2))
    assert reset(scheduler, 0, drain_id=by_default).abandoned
    served.assert_clean()


@pytest.mark.parametrize("mode", [pb.RESET_MODE_REFUSE, pb.RESET_MODE_FORCE])
def test_other_modes_work_while_one_waits(served: Served, mode: int) -> None:
    scheduler = served.open()
    scheduler.admit("a", PROMPT)
    drain_id = reset(scheduler, pb.RESET_MODE_DRAIN).drain_id
    if mode == pb.RESET_MODE_REFUSE:
        refused(lambda: reset(scheduler, mode), grpc.StatusCode.FAILED_PRECONDITION)
        # One of a namespace that nobody uses does not end the drain of all.
        scope = pb.ResetScope(lora_name="A")
        assert reset(scheduler, mode, scope=scope).generation == 1
        assert not reset(scheduler, 0, drain_id=drain_id).done
        scheduler.free("a")
    else:
        assert reset(scheduler, mode).generation == 1
    assert reset(scheduler, 0, drain_id=drain_id).done
    assert scheduler.admit("b", PROMPT).outcome == pb.OUTCOME_OK
    served.assert_clean()


def test_a_forced_reset(served: Served) -> None:
    """What was computed before it is no hit after it, to nobody, ever."""
    runs, other = served.open("runs"), served.open("other")
    handle = runs.admit("a", PROMPT).handle
    runs.free("nobody")
    assert other.lookup("b", PROMPT).num_computed_tokens == 8
    assert reset(other, pb.RESET_MODE_FORCE).generation == 1

    # The hit that was looked up before is gone.
    changed = other.allocate("b", num_new_tokens=2, num_new_computed_tokens=8)
    assert (changed.outcome, changed.num_new_computed_tokens) == (pb.OUTCOME_HIT_CHANGED, 0)
    # The running request goes on, by call and by Step, and its old and new blocks are no hits.
    for number in (10, 11):
        runs.allocate(
            "a",
            content=pb.RequestContent(token_offset=number, tokens=tokens(number + 1)),
            num_computed_tokens=number,
            num_new_tokens=1,
        )
    served.cache.Step(
        pb.StepRequest(
            context=runs.context(),
            runs=[pb.Run(kind=2, count=1), pb.Run(kind=3, count=1)],
            grow=pb.GrowColumns(
                handles=int32s(handle),
                num_computed_tokens=int32s(12),
                num_new_tokens=int32s(4),
                token_offsets=int32s(12),
                token_counts=int32s(4),
                tokens=tokens(13, 14, 15, 16),
            ),
            cache=pb.CacheColumns(handles=int32s(handle), num_computed_tokens=int32s(16)),
        ),
        timeout=60,
    )
    assert runs.cache("a", 16).known
    prompt = tokens(*range(1, 18))
    for scheduler in (runs, other):
        assert scheduler.lookup("c", prompt).num_computed_tokens == 0
    # Preempted and admitted anew, it is of the new generation.
    runs.free("a", pb.FREE_MODE_PREEMPT)
    assert runs.allocate("a", lookup=True).num_new_computed_tokens == 0
    assert runs.lookup("c").num_computed_tokens == 16
    served.assert_clean()


@pytest.mark.parametrize(
    ("scope", "gone"),
    [
        pytest.param({"lora_name": "A"}, {("A", ""), ("A", "s")}, id="a LoRA"),
        pytest.param({"cache_salt": "s"}, {("", "s"), ("A", "s")}, id="a salt"),
        pytest.param({"lora_name": "A", "cache_salt": "s"}, {("A", "s")}, id="both"),
        pytest.param({"lora_name": ""}, {("", ""), ("", "s")}, id="without LoRA"),
        pytest.param({"lora_name": "B"}, set(), id="nobody's"),
    ],
)
@pytest.mark.parametrize("mode", [pb.RESET_MODE_REFUSE, pb.RESET_MODE_DRAIN, pb.RESET_MODE_FORCE])
def test_a_reset_of_a_namespace(
    served: Served, mode: int, scope: dict[str, str], gone: set[tuple[str, str]]
) -> None:
    follower = Follower(served)
    scheduler = served.open()
    namespaces = [("", ""), ("", "s"), ("A", ""), ("A", "s"), ("B", "t")]
    if scope == {"lora_name": "B"}:
        namespaces.remove(("B", "t"))
    for lora, salt in namespaces:
        assert (
            admit(scheduler, f"{lora}/{salt}", PROMPT, lora=lora, salt=salt).outcome
            == pb.OUTCOME_OK
        )
        if (lora, salt) in gone:
            scheduler.free(f"{lora}/{salt}")
    scheduler.free("nobody")

    reply = reset(scheduler, mode, scope=pb.ResetScope(**scope))
    assert (reply.done, reply.generation) == (True, 1)
    for lora, salt in namespaces:
        hit = admit(scheduler, f"{lora}{salt} again", PROMPT, lora=lora, salt=salt)
        assert hit.num_new_computed_tokens == (0 if (lora, salt) in gone else 8)
    served.assert_clean()

    removed = 0
    while removed < 2 * len(gone):
        event = follower.until("block_removed")[-1].block_removed
        assert event.reason == event_pb2.REMOVAL_REASON_RESET
        removed += len(event.block_hashes)
    follower.close()


def test_a_namespace_is_reset_over_what_runs_in_it_only(served: Served) -> None:
    scheduler = served.open()
    admit(scheduler, "in", PROMPT, lora="A")
    admit(scheduler, "out", PROMPT)
    scope = pb.ResetScope(lora_name="A")
    refused(
        lambda: reset(scheduler, pb.RESET_MODE_REFUSE, scope=scope),
        grpc.StatusCode.FAILED_PRECONDITION,
    )
    drain = reset(scheduler, pb.RESET_MODE_DRAIN, scope=scope)
    assert [holder.request_id for holder in drain.holders] == ["in"]
    assert admit(scheduler, "new in", PROMPT, lora="A").outcome == pb.OUTCOME_RESETTING
    assert admit(scheduler, "new out", PROMPT).num_new_computed_tokens == 8
    assert reset(scheduler, pb.RESET_MODE_FORCE, scope=scope).done
    assert reset(scheduler, 0, drain_id=drain.drain_id).done
    assert admit(scheduler, "new in", PROMPT, lora="A").num_new_computed_tokens == 0
    served.assert_clean()


def test_a_reset_is_done_once(served: Served) -> None:
    scheduler = served.open()
    first = reset(scheduler, pb.RESET_MODE_FORCE, context={"op_seq": 1})
    assert reset(scheduler, pb.RESET_MODE_FORCE, context={"op_seq": 1}) == first
    assert served.stats().generation == 1


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        pytest.param({"mode": 4}, grpc.StatusCode.INVALID_ARGUMENT, "mode", id="unknown mode"),
        pytest.param(
            {"mode": 1, "scope": pb.ResetScope()},
            grpc.StatusCode.INVALID_ARGUMENT,
            "scope",
            id="empty scope",
        ),
        *(
            pytest.param(
                {"mode": 2, "deadline_seconds": seconds},
                grpc.StatusCode.INVALID_ARGUMENT,
                "deadline_seconds",
                id=f"deadline {seconds}",
            )
            for seconds in (0.0, -1.0, 301.0, math.inf, math.nan)
        ),
        pytest.param({"drain_id": 7}, grpc.StatusCode.NOT_FOUND, "drain_id", id="unknown drain"),
        pytest.param(
            {"mode": 2, "scope": pb.ResetScope(lora_name="A")},
            grpc.StatusCode.FAILED_PRECONDITION,
            "scope",
            id="a second drain",
        ),
    ],
)
def test_refused_and_nothing_reset(
    served: Served, request_: dict[str, Any], code: grpc.StatusCode, field: str
) -> None:
    scheduler = served.open()
    scheduler.admit("a", PROMPT)
    reset(scheduler, pb.RESET_MODE_DRAIN)
    detail = refused(lambda: reset(scheduler, **({"mode": 0} | request_)), code)
    assert detail.field == field
    assert served.stats().generation == 0
