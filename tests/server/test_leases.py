"""A session lives as long as it calls; then it is over, whatever comes late."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvdepot.v1 import cache_pb2, types_pb2
from manual_clock import ManualClock
from serving import NO_SUCH_SESSION, Scheduler, Serve, Served, eventually, refused, tokens

PROMPT = tokens(*range(1, 11))
TTL = 30.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def served(serve: Serve, clock: ManualClock) -> Served:
    """A server whose leases run by the test's clock."""
    return serve(clock=clock)


def advance(served: Served, clock: ManualClock, seconds: float) -> None:
    """Let the server's time pass."""
    served.loop.call(lambda: clock.advance(seconds))


def keep_alive(served: Served, scheduler: Scheduler, **request: Any) -> Any:
    given = {"session_id": scheduler.opened.session_id, "epoch": scheduler.opened.epoch} | request
    return served.cache.KeepAlive(cache_pb2.KeepAliveRequest(**given), timeout=60)


def step(served: Served, scheduler: Scheduler, **context: Any) -> Any:
    request = cache_pb2.StepRequest(context=scheduler.context(**context))
    return served.cache.Step(request, timeout=60)


def attach(served: Served, scheduler: Scheduler) -> None:
    stream = served.attach(scheduler)
    next(stream)
    stream.cancel()


Call = Callable[[Served, Scheduler], Any]

CALLS: dict[str, Call] = {
    "KeepAlive": keep_alive,
    "GetComputedBlocks": lambda _, scheduler: scheduler.lookup("b", PROMPT),
    "AllocateSlots": lambda _, scheduler: scheduler.allocate(
        "a", num_computed_tokens=8, num_new_tokens=2
    ),
    "CacheBlocks": lambda _, scheduler: scheduler.cache("a", 8),
    "Free": lambda _, scheduler: scheduler.free("nobody"),
    "Step": step,
    "StepStream": lambda _, scheduler: scheduler.step_stream(),
    "AttachWorker": attach,
    "a replay": lambda _, scheduler: scheduler.free("nobody", op_seq=1),
}


@pytest.mark.parametrize("call", [pytest.param(call, id=name) for name, call in CALLS.items()])
def test_every_call_renews_and_none_comes_late(
    served: Served, clock: ManualClock, call: Call
) -> None:
    scheduler = served.open()
    scheduler.admit("a", PROMPT)
    scheduler.free("nobody", op_seq=1)
    for _ in range(3):
        advance(served, clock, TTL - 1)
        call(served, scheduler)
    assert served.stats().num_sessions == 1

    advance(served, clock, TTL + 0.1)
    before = served.stats()
    assert (before.num_sessions, before.num_requests, before.blocks.live) == (0, 0, 0)
    detail = refused(lambda: call(served, scheduler), grpc.StatusCode.NOT_FOUND)
    assert detail.reason == "SESSION_EXPIRED"
    assert detail.field.endswith("session_id")
    after = served.stats()
    assert after.blocks == before.blocks
    assert after.num_sessions == 0
    served.assert_clean()


def test_a_call_refused_for_what_it_says_renews_too(served: Served, clock: ManualClock) -> None:
    scheduler = served.open()
    advance(served, clock, TTL - 1)
    refused(lambda: scheduler.lookup("unknown"), grpc.StatusCode.NOT_FOUND)
    advance(served, clock, TTL - 1)
    assert served.stats().num_sessions == 1


def test_what_a_dead_scheduler_leaves(served: Served, clock: ManualClock) -> None:
    """What is known to be written stays a hit; the rest is forgotten; all is free."""
    dies, other = served.open("dies"), served.open("other")
    dies.admit("written", PROMPT, step=1, completed_step=0)
    dies.admit("detached", tokens(*range(50, 60)), step=2, completed_step=1)
    dies.free("detached", cache_pb2.FREE_MODE_DETACH, step=2, completed_step=1)
    dies.admit("in flight", tokens(*range(100, 110)), step=2, completed_step=1)
    for _ in range(2):
        advance(served, clock, TTL * 0.6)
        keep_alive(served, other)
    stats = served.stats()
    assert (stats.num_sessions, stats.blocks.live, stats.blocks.quarantined) == (1, 0, 0)
    assert stats.blocks.cached == 2
    assert other.lookup("a", PROMPT).num_computed_tokens == 8
    assert other.lookup("b", tokens(*range(100, 110))).num_computed_tokens == 0
    # The hits are the last to be evicted.
    flood = other.admit("flood", tokens(*range(1000, 1000 + 30 * 4)))
    assert flood.outcome == cache_pb2.OUTCOME_OK
    assert other.lookup("a", PROMPT).num_computed_tokens == 8
    served.assert_clean()


def test_leases_are_the_sessions_own(served: Served, clock: ManualClock) -> None:
    def opened(ttl: float) -> str:
        request = cache_pb2.OpenSessionRequest(lease_ttl_seconds=ttl)
        reply = served.cache.OpenSession(request, timeout=60)
        assert reply.lease_ttl_seconds == ttl
        return str(reply.session_id)

    long, short = opened(100), opened(5)
    advance(served, clock, 6)
    listed = served.loop.call(lambda: served.server.node.list_sessions())
    assert [session.info.session_id for session in listed] == [long]
    assert listed[0].lease_remaining_seconds == pytest.approx(94)
    advance(served, clock, 93)
    assert served.stats().num_sessions == 1
    advance(served, clock, 2)
    assert served.stats().num_sessions == 0
    context = types_pb2.CallContext(session_id=short)
    detail = refused(
        lambda: served.cache.CloseSession(cache_pb2.CloseSessionRequest(context=context)),
        grpc.StatusCode.NOT_FOUND,
    )
    assert detail.reason == "SESSION_EXPIRED"


@pytest.mark.parametrize("ttl", [0.0, -1.0, 600.5, math.inf, math.nan])
def test_a_lease_has_bounds(served: Served, ttl: float) -> None:
    request = cache_pb2.OpenSessionRequest(lease_ttl_seconds=ttl)
    detail = refused(
        lambda: served.cache.OpenSession(request, timeout=60), grpc.StatusCode.INVALID_ARGUMENT
    )
    assert detail.field == "lease_ttl_seconds"
    assert served.stats().num_sessions == 0


def test_the_servers_lease_is_configured(serve: Serve) -> None:
    served = serve(lease_ttl_seconds=7.0)
    scheduler = served.open()
    assert scheduler.opened.lease_ttl_seconds == 7.0
    assert keep_alive(served, scheduler).lease_ttl_seconds == 7.0
    assert keep_alive(served, scheduler).epoch == scheduler.opened.epoch


@pytest.mark.parametrize(
    ("request_", "code", "reason", "field"),
    NO_SUCH_SESSION,
)
def test_keep_alive_refuses(
    served: Served, request_: dict[str, str], code: grpc.StatusCode, reason: str, field: str
) -> None:
    scheduler = served.open()
    detail = refused(lambda: keep_alive(served, scheduler, **request_), code)
    assert (detail.reason, detail.field) == (reason, field)


def test_keep_alive_is_not_ordered(served: Served) -> None:
    scheduler = served.open()
    scheduler.free("nobody", op_seq=1)
    keep_alive(served, scheduler)
    scheduler.free("nobody", op_seq=2)


def test_a_closed_session_is_not_an_expired_one(served: Served) -> None:
    scheduler = served.open()
    assert scheduler.close().epoch == scheduler.opened.epoch
    detail = refused(lambda: keep_alive(served, scheduler), grpc.StatusCode.NOT_FOUND)
    assert detail.reason == "UNKNOWN_SESSION"
    assert served.server.node.sessions_ended == {"closed": 1}


def test_room_comes_back(serve: Serve) -> None:
    """By the clock of the event loop."""
    served = serve(max_sessions=1)
    first = served.open()
    refused(served.open, grpc.StatusCode.RESOURCE_EXHAUSTED)
    first.close()
    served.cache.OpenSession(cache_pb2.OpenSessionRequest(lease_ttl_seconds=0.2), timeout=60)
    eventually(lambda: not served.stats().num_sessions)
    served.open()
    assert served.server.node.sessions_ended == {"closed": 1, "expired": 1}
