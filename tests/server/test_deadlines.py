"""Many deadlines on one timer, in a time of the test's own."""

from __future__ import annotations

import random
from functools import partial

import pytest

from kvserver.deadlines import Deadlines
from manual_clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_in_their_order_and_once(clock: ManualClock) -> None:
    deadlines, passed = Deadlines(clock), []
    for key, seconds in (("late", 3.0), ("soon", 1.0), ("between", 2.0)):
        deadlines.set(key, seconds, partial(passed.append, key))
    assert clock.num_timers == 1
    clock.advance(1.5)
    assert passed == ["soon"]
    clock.advance(10)
    assert passed == ["soon", "between", "late"]
    assert len(deadlines) == clock.num_timers == 0


def test_renewed_set_anew_and_dropped(clock: ManualClock) -> None:
    deadlines, passed = Deadlines(clock), []
    for key in ("renewed", "set anew", "dropped"):
        deadlines.set(key, 2.0, partial(passed.append, key))
    clock.advance(1.5)
    deadlines.renew("renewed")
    deadlines.set("set anew", 0.2, partial(passed.append, "set anew, sooner"))
    assert deadlines.drop("dropped")
    assert not deadlines.drop("dropped")
    clock.advance(0.25)
    assert passed == ["set anew, sooner"]
    clock.advance(1.0)
    assert deadlines.remaining_seconds("renewed") == pytest.approx(0.75)
    clock.advance(0.75)
    assert passed == ["set anew, sooner", "renewed"]
    assert deadlines.drop("renewed") is False


def test_a_thousand_that_are_renewed_share_a_timer(clock: ManualClock) -> None:
    deadlines, passed = Deadlines(clock), []
    for key in range(1000):
        deadlines.set(key, 30.0, partial(passed.append, key))
    for _ in range(60):
        for key in range(999):
            deadlines.renew(key)
        clock.advance(1.0)
    assert passed == [999]
    assert clock.num_timers == 1
    assert clock.num_timers_set < 10


def test_what_comes_and_goes_leaves_nothing(clock: ManualClock) -> None:
    deadlines = Deadlines(clock)
    for key in range(10_000):
        deadlines.set(key, 600.0, lambda: None)
        deadlines.drop(key)
    assert len(deadlines._heap) < 200
    deadlines.close()
    assert clock.num_timers == 0


def test_one_that_fails_stops_no_other(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    deadlines, passed = Deadlines(clock), []
    deadlines.set("fails", 1.0, lambda: passed[0])
    deadlines.set("works", 1.0, partial(passed.append, "works"))
    clock.advance(2)
    assert passed == ["works"]
    assert "deadline failed" in caplog.text


def test_renewals_that_wait_for_a_stalled_process_count(clock: ManualClock) -> None:
    deadlines, passed = Deadlines(clock), []
    deadlines.set("renews", 5.0, partial(passed.append, "renews"))
    deadlines.set("silent", 5.0, partial(passed.append, "silent"))
    clock.stall(60.0)
    clock.advance(0.1)  # the timer fires, a minute late
    assert passed == []
    deadlines.set("opened meanwhile", 50.0, partial(passed.append, "opened meanwhile"))
    clock.advance(0.0)  # which does not end the wait
    deadlines.renew("renews")
    clock.advance(1.0)
    assert passed == ["silent"]


def test_as_a_plain_list_would(clock: ManualClock) -> None:
    chance = random.Random(7)
    deadlines = Deadlines(clock)
    passed: list[tuple[float, int]] = []
    model: dict[int, tuple[float, float]] = {}  # key: deadline, seconds
    expected: list[tuple[float, int]] = []

    def on_passed(key: int) -> None:
        passed.append((clock.now, key))

    for _ in range(1000):
        key = chance.randrange(20)
        match chance.randrange(4):
            case 0:
                seconds = chance.choice((0.25, 1.0, 4.0))
                deadlines.set(key, seconds, partial(on_passed, key))
                model[key] = (clock.now + seconds, seconds)
            case 1 if key in model:
                deadlines.renew(key)
                model[key] = (clock.now + model[key][1], model[key][1])
            case 2:
                assert deadlines.drop(key) == (model.pop(key, None) is not None)
            case _:
                step = chance.randrange(64) / 64  # exact, so that sums are
                until = clock.now + step
                due = sorted((at, name) for name, (at, _) in model.items() if at <= until)
                expected += due
                for _, name in due:
                    del model[name]
                clock.advance(step)
        assert len(deadlines) == len(model)
        assert len(passed) == len(expected)
        assert clock.num_timers <= 1
    assert sorted(passed) == sorted(expected)
    assert [at for at, _ in passed] == [at for at, _ in expected]
