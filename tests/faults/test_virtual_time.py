"""Schedulers on a wire that loses, repeats and delays, in virtual time, against the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fake_wire import Faults
from kvserver.replies import ReplyWindow
from model_state import Divergence
from simulation import Simulation

STORM = Faults(lose_request=0.05, lose_reply=0.08, duplicate=0.05, stray=0.02)
SEEDS = range(500)
SEEDS_A_TEST = 50


@pytest.mark.parametrize(
    ("first", "num_calls"),
    [
        pytest.param(first, num_calls, marks=marks, id=f"{first}-{num_calls}-calls")
        for num_calls, marks in ((8, ()), (40, pytest.mark.slow))
        for first in SEEDS[::SEEDS_A_TEST]
    ],
)
def test_each_call_is_done_once_whatever_the_wire_does(first: int, num_calls: int) -> None:
    replayed = lost = expired = 0
    for seed in range(first, first + SEEDS_A_TEST):
        simulation = Simulation(seed, STORM)
        try:
            simulation.run(num_calls)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {num_calls} calls: {error}") from error
        replayed += simulation.judge.num_replayed
        lost += simulation.num_lost
        expired += simulation.node.sessions_ended["expired"]
    # It was as bad as it should be.
    assert replayed > SEEDS_A_TEST
    assert expired > SEEDS_A_TEST // 2
    assert lost > SEEDS_A_TEST // 20


def test_a_seed_is_the_same_run_each_time() -> None:
    first, again, other = (Simulation(seed, STORM).run(40) for seed in (7, 7, 8))
    assert first.lines == again.lines
    assert first.digest() != other.digest()


def test_a_failing_seed_fails_again_at_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(self: ReplyWindow, op_seq: int, method: str, execute: Callable[[], bytes]) -> bytes:
        self.expected = max(self.expected, op_seq + 1)
        return execute()  # a server that does again what it is asked again

    monkeypatch.setattr(ReplyWindow, "answer", answer)
    told = []
    for _ in range(2):
        simulation = Simulation(7, STORM)
        with pytest.raises(Divergence):
            simulation.run(40)
        told.append(simulation.trace.digest())
    assert told[0] == told[1]
