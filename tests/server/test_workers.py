"""A worker may outlive its scheduler: what it may still write to is nobody's meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvdepot.v1 import cache_pb2
from manual_clock import ManualClock
from serving import NO_SUCH_SESSION, Scheduler, Serve, Served, eventually, refused, tokens

PROMPT = tokens(*range(1, 11))


def num_workers(served: Served) -> int:
    """Whose streams are open."""
    workers = served.server.node._workers
    return served.loop.call(lambda: sum(map(len, workers.values())))


def end(served: Served, stream: Any) -> None:
    """The worker goes away."""
    before = num_workers(served)
    stream.cancel()
    eventually(lambda: num_workers(served) == before - 1)


def close(scheduler: Scheduler, _: Callable[[float], None]) -> None:
    scheduler.close(step=2, completed_step=1)


def expire(_: Scheduler, advance: Callable[[float], None]) -> None:
    advance(31)


@pytest.mark.parametrize("end_session", [close, expire])
def test_quarantined_until_the_last_worker_is_gone(
    serve: Serve, end_session: Callable[..., None]
) -> None:
    clock = ManualClock()
    # No heartbeat comes between what is waited for.
    served = serve(clock=clock, worker_heartbeat_seconds=600.0)

    def advance(seconds: float) -> None:
        served.loop.call(lambda: clock.advance(seconds))

    gone = served.open("gone")
    workers = [served.attach(gone), served.attach(gone)]
    assert [next(worker).session_ended for worker in workers] == [False, False]
    gone.admit("written", PROMPT, step=1, completed_step=0)
    gone.admit("in flight", tokens(*range(100, 110)), step=2, completed_step=1)
    end_session(gone, advance)
    stays = served.open("stays")  # also the same client's next session

    assert [next(worker).session_ended for worker in workers] == [True, True]
    stats = served.stats()
    assert (stats.num_sessions, stats.blocks.live, stats.blocks.quarantined) == (1, 0, 6)
    # Its full, confirmed blocks are hits for everybody; the others are nobody's.
    hit = stays.admit("a", PROMPT)
    assert hit.num_new_computed_tokens == 8
    assert stays.lookup("b", tokens(*range(100, 110))).num_computed_tokens == 0
    refusal = stays.admit("large", tokens(*range(1000, 1000 + 4 * 29)))
    assert refusal.outcome == cache_pb2.OUTCOME_NO_FIT
    holders = refusal.no_fit.holders
    assert [(h.name, h.num_blocks, h.departed) for h in holders] == [
        ("gone", 4, True),
        ("stays", 3, False),
    ]
    served.assert_clean()

    end(served, workers[0])
    assert served.stats().blocks.quarantined == 4
    end(served, workers[1])
    stats = served.stats()
    assert (stats.blocks.quarantined, stats.blocks.free) == (0, 32 - 3)
    assert stays.allocate("large", lookup=True).outcome == cache_pb2.OUTCOME_OK
    advance(100)
    served.assert_clean()


def test_quarantined_until_the_operators_bound(serve: Serve) -> None:
    clock = ManualClock()
    served = serve(clock=clock, quarantine_seconds=40.0)
    gone, stays = served.open("gone"), served.open("stays")
    worker = served.attach(gone)
    next(worker)
    gone.admit("a", PROMPT)
    gone.close()
    served.loop.call(lambda: clock.advance(29))
    stays.free("nobody")
    served.loop.call(lambda: clock.advance(10))
    assert served.stats().blocks.quarantined == 3
    served.loop.call(lambda: clock.advance(2))
    assert served.stats().blocks.quarantined == 0
    served.assert_clean()
    end(served, worker)
    served.assert_clean()


def test_workers_that_leave_first_leave_nothing_behind(served: Served) -> None:
    scheduler = served.open()
    worker = served.attach(scheduler)
    next(worker)
    scheduler.admit("a", PROMPT)
    end(served, worker)
    assert served.stats().blocks.quarantined == 0
    scheduler.close()
    stats = served.stats()
    assert (stats.blocks.live, stats.blocks.quarantined) == (0, 0)


def test_a_departed_sessions_blocks_survive_no_reset_as_hits(served: Served) -> None:
    """A reset refuses no quarantined blocks, and frees none of them either."""
    gone, stays = served.open("gone"), served.open("stays")
    worker = served.attach(gone)
    next(worker)
    gone.admit("a", PROMPT)
    gone.free("nobody")
    gone.close()
    assert stays.reset().generation == 1
    assert served.stats().blocks.quarantined == 3
    assert stays.lookup("a", PROMPT).num_computed_tokens == 0
    served.assert_clean()
    end(served, worker)
    assert served.stats().blocks.quarantined == 0


@pytest.mark.parametrize(
    ("request_", "code", "reason", "field"),
    [
        *NO_SUCH_SESSION,
        pytest.param(
            {"name": "x" * 1025},
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_ARGUMENT",
            "name",
            id="an endless name",
        ),
    ],
)
def test_attach_refuses(
    served: Served, request_: dict[str, str], code: grpc.StatusCode, reason: str, field: str
) -> None:
    scheduler = served.open()
    detail = refused(lambda: next(served.attach(scheduler, **request_)), code)
    assert (detail.reason, detail.field) == (reason, field)
    assert num_workers(served) == 0


def test_a_departed_session_takes_no_worker(served: Served) -> None:
    scheduler = served.open()
    first = served.attach(scheduler)
    next(first)
    scheduler.close()
    refused(lambda: next(served.attach(scheduler)), grpc.StatusCode.NOT_FOUND)
    end(served, first)


def test_heartbeats(serve: Serve) -> None:
    served = serve(worker_heartbeat_seconds=0.05)
    scheduler = served.open()
    began = time.monotonic()
    worker = served.attach(scheduler)
    beats = [next(worker) for _ in range(4)]
    assert time.monotonic() - began > 0.1
    assert {(beat.epoch, beat.session_ended) for beat in beats} == {(scheduler.opened.epoch, False)}
    assert beats[0].heartbeat_seconds == 0.05
    end(served, worker)


def test_a_stop_ends_the_streams_of_workers(serve: Serve) -> None:
    served = serve()
    scheduler = served.open()
    worker = served.attach(scheduler)
    next(worker)
    served.loop.run(served.server.stop())
    detail = refused(lambda: next(worker), grpc.StatusCode.UNAVAILABLE)
    assert (detail.reason, detail.retryable) == ("DRAINING", True)
