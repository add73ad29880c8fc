"""The comparison itself: it can fail, it shrinks what fails, and sequences do what they claim."""

from __future__ import annotations

import collections
import os
from pathlib import Path
from typing import Any

import pytest

from families import FAMILIES
from harness import Local, Oracle, OracleError
from ours import KvcoreBackend
from sequence import WEIGHTS, make_sequence
from shrink import shrink

NUM_OPS = 200
SIGHTS_MIN = 20


def test_sequences_are_a_function_of_the_seed() -> None:
    assert make_sequence(7, NUM_OPS) == make_sequence(7, NUM_OPS)
    assert make_sequence(7, NUM_OPS) != make_sequence(8, NUM_OPS)


@pytest.fixture(scope="module")
def seen() -> dict[str, collections.Counter[str]]:
    """How often each family's first sequences did what they are for."""
    seen = {family: collections.Counter[str]() for family in FAMILIES}
    for seed in range(SEQUENCES_SEEN * len(FAMILIES)):
        sequence = make_sequence(seed, NUM_OPS)
        ours = Local(KvcoreBackend)
        ours.begin(sequence.config, sequence.ops, full=True)
        for operation, record in zip(sequence.ops, ours.answer(), strict=False):
            if record is not None:
                seen[sequence.config["family"]].update(_sights(operation["op"], record))
    return seen


def test_sequences_do_every_operation(seen: dict[str, collections.Counter[str]]) -> None:
    total = sum(seen.values(), collections.Counter[str]())
    operations = WEIGHTS.keys() - {"twins", "revive"}  # several operations each
    wanted = (*operations, *EVERYWHERE, "duplicate hash", "reset done", "reset refused")
    assert {name: total[name] for name in wanted if total[name] < SIGHTS_MIN} == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_reach_what_they_are_for(
    seen: dict[str, collections.Counter[str]], family: str
) -> None:
    wanted = {*EVERYWHERE, *({*CACHED} if family not in UNCACHED else ()), *SPECIAL.get(family, ())}
    if family in ONE_BLOCK_OR_NONE:
        wanted -= {"growth refused"}
    assert {name: seen[family][name] for name in wanted if not seen[family][name]} == {}


SEQUENCES_SEEN = 8
EVERYWHERE = (
    "external tokens",
    "delayed load",
    "admission refused",
    "growth refused",
    "common prefix asked",
)
CACHED = ("hit", "eviction", "full pool")
UNCACHED = ("mamba none", "cross", "uncached", "no groups")
ONE_BLOCK_OR_NONE = ("mamba none", "no groups")
WINDOW = ("null block in a table", "null block in a hit", "released while running")
SPECIAL = {
    "full attention": ("common prefix",),
    "full and sliding": (*WINDOW, "uncached prefix"),
    "block sizes": (*WINDOW, "uncached prefix"),
    "sliding alone": WINDOW,
    "sliding several": WINDOW,
    "chunked local": WINDOW,
    "mamba all": (*WINDOW, "uncached prefix"),
    "mamba align": (*WINDOW, "no whole block"),
    "latent": WINDOW,
    "eagle fallback": ("null block in a table", "uncached prefix"),
    "eagle flagged": (*WINDOW, "uncached prefix"),
    "eagle mamba": WINDOW,
    "retention": WINDOW,
    "reference window": ("null block in a table", "released while running"),
    "uncached": ("null block in a table", "released while running"),
    "context parallel": ("common prefix",),
    "partial": ("partial hash", "second hash", "promotion"),
    "uniform": ("common prefix",),
    "mixed": (*WINDOW, "uncached prefix"),
}


def _sights(name: str, record: dict[str, Any]) -> list[str]:
    result = record["result"]
    hashes = [block_hash for block_hash in record["hashes"] if block_hash is not None]
    removed = any(event[0] == "removed" for event in record["events"])
    admitted = name == "admit" and isinstance(result[5], list)
    tables = [group for table in record["tables"].values() for group in table]
    sights = {
        "hit": admitted and result[0] > 0,
        "null block in a hit": admitted and result[1] and any(0 in group for group in result[1]),
        "uncached prefix": admitted and result[2] > 0,
        "external tokens": admitted and result[3] > 0 and result[4] > 0,
        "delayed load": admitted and result[4] == 0,
        "admission refused": name == "admit" and result[5] is None,
        "no whole block": name == "admit" and result[5] == "no whole block",
        "growth refused": name == "grow" and result[1] is None,
        "null block in a table": any(0 in group for group in tables),
        "released while running": name == "skip" and any(0 in group for group in tables),
        "eviction": name in ("admit", "grow") and removed,
        "full pool": not record["queue"],
        "duplicate hash": len(hashes) > len(set(hashes)),
        "common prefix asked": record["common"] is not None,
        "common prefix": bool(record["common"] and any(record["common"])),
        "partial hash": name == "partial" and result[2] is not None,
        "second hash": any("+" in one for one in hashes),
        "promotion": name == "grow" and removed and result[1] and not any(result[1]),
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
