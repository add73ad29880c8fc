"""The comparison itself: it can fail, it shrinks what fails, and sequences do what they claim."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import Local, Oracle, OracleError, compare
from ours import KvcoreBackend
from sequence import WEIGHTS, make_sequence
from shrink import shrink

NUM_OPS = 200
SIGHTS_MIN = 20


class FreesHeadFirst(KvcoreBackend):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        manager = self.manager
        manager.free = lambda request: manager.return_blocks(  # type: ignore[method-assign]
            manager.pop_blocks_for_free(request)[::-1]
        )


class ForgetsReservedBlocks(KvcoreBackend):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        allocate_slots = self.manager.allocate_slots
        self.manager.allocate_slots = (  # type: ignore[method-assign]
            lambda *args, reserved_blocks=0, **named: allocate_slots(*args, **named)
        )


class LosesRemovals(KvcoreBackend):
    def events(self) -> list[list[Any]]:
        return [event for event in super().events() if event[0] != "removed"]


class Crashes(KvcoreBackend):
    def return_blocks(self, blocks: list[Any]) -> None:
        raise ZeroDivisionError


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("mutant", "num_ops_max", "shown"),
    [
        pytest.param(FreesHeadFirst, 6, "queue", id="free-order"),
        pytest.param(ForgetsReservedBlocks, 15, "result", id="reserved-blocks"),
        pytest.param(LosesRemovals, 8, "events", id="lost-event"),
        pytest.param(Crashes, 6, "ZeroDivisionError", id="crash"),
    ],
)
def test_divergence_is_found_and_shrunk(
    oracle: Oracle, mutant: Callable[[dict[str, Any]], KvcoreBackend], num_ops_max: int, shown: str
) -> None:
    ours = Local(mutant)
    reports = (compare(ours, oracle, make_sequence(seed, NUM_OPS))[0] for seed in range(20))
    report = next(report for report in reports if report is not None)
    *story, tail = report.partition("\nat ")
    num_ops = len([line for line in story[0].splitlines() if line.startswith("  ")])
    assert report.startswith("divergence: seed ")
    assert num_ops <= num_ops_max, report
    assert shown in tail, report


def test_sequences_are_a_function_of_the_seed() -> None:
    assert make_sequence(7, NUM_OPS) == make_sequence(7, NUM_OPS)
    assert make_sequence(7, NUM_OPS) != make_sequence(8, NUM_OPS)


def test_sequences_do_what_they_are_for() -> None:
    seen = collections.Counter[str]()
    for seed in range(40):
        sequence = make_sequence(seed, NUM_OPS)
        ours = Local(KvcoreBackend)
        ours.begin(sequence.config, sequence.ops, full=True)
        for operation, record in zip(sequence.ops, ours.answer(), strict=False):
            if record is not None:
                seen.update(_sights(operation["op"], record))
    operations = WEIGHTS.keys() - {"twins"}  # twins are two adds and two admits
    assert {name: seen[name] for name in (*operations, *SIGHTS) if seen[name] < SIGHTS_MIN} == {}


SIGHTS = (
    "hit",
    "external tokens",
    "delayed load",
    "admission refused",
    "growth refused",
    "eviction",
    "duplicate hash",
    "common prefix",
    "reset done",
    "reset refused",
)


def _sights(name: str, record: dict[str, Any]) -> list[str]:
    result = record["result"]
    hashes = [block_hash for block_hash in record["hashes"] if block_hash is not None]
    sights = {
        "hit": name == "admit" and result[0] > 0,
        "external tokens": name == "admit" and result[2] > 0 and result[3] > 0,
        "delayed load": name == "admit" and result[3] == 0,
        "admission refused": name == "admit" and result[4] is None,
        "growth refused": name == "grow" and result[1] is None,
        "eviction": name in ("admit", "grow")
        and any(event[0] == "removed" for event in record["events"]),
        "duplicate hash": len(hashes) > len(set(hashes)),
        "common prefix": bool(record["common"] and record["common"][0]),
        "reset done": name == "reset" and result,
        "reset refused": name == "reset" and not result,
    }
    return [name, *(sight for sight, seen in sights.items() if seen)]


def test_shrink_keeps_only_what_is_needed() -> None:
    needed = {3, 41, 42, 97}
    assert shrink(list(range(100)), needed.issubset, trials=1000) == sorted(needed)


def test_shrink_stops_when_out_of_trials() -> None:
    assert shrink(list(range(100)), {3, 97}.issubset, trials=0) == list(range(100))


def test_missing_oracle_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(OracleError, match=r"tests/oracle/setup\.sh"):
        Oracle(tmp_path)


def test_dead_oracle_is_reported(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'no module named vllm' >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(OracleError, match=r"ended with 3:\nno module named vllm"):
        Oracle(tmp_path)


def test_oracle_process_ends_when_closed(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho '{\"ready\": true}'\nread line\n")
    python.chmod(0o755)
    oracle = Oracle(tmp_path)
    oracle.close()
    with pytest.raises(ProcessLookupError):
        os.kill(oracle.process.pid, 0)
