"""vLLM's real Scheduler decides the same with the strict facade as with its own manager.

With the lazy one it may schedule otherwise; what it generates is the same, and in the end
nothing is left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvclient.replay.server import own_server
from real_scheduler import RealScheduler

BLOCK_SIZE, WINDOW, MAX_MODEL_LEN = 16, 64, 4096
SHORT = {"num_blocks": 100, "prompt_tokens": 40, "output_tokens": 40, "max_num_seqs": 24}
ROOMY = {"num_blocks": 4000}
RUNS: dict[str, dict[str, Any]] = {
    "full": ROOMY,
    "full-and-window": {**ROOMY, "sliding_window": WINDOW},
    "async": {**ROOMY, "is_async": True},
    "events": {**ROOMY, "events": True, "num_blocks": 400},
    "short": SHORT,
    "short-async-window": {**SHORT, "is_async": True, "sliding_window": WINDOW},
}
# A Scheduler's own manager decides this once a run.
DECIDED = ("steps", "outputs", "num_finished", "num_output_tokens", "num_preempted")


@pytest.fixture(scope="module")
def scheduler() -> Iterator[RealScheduler]:
    """The process takes some ten seconds to start."""
    with RealScheduler() as process:
        yield process


def a_group(kind: str, **fields: Any) -> dict[str, Any]:
    shape = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 16}
    return {"kind": kind, "layer_names": [kind], **shape, **fields}


def compare(scheduler: RealScheduler, options: dict[str, Any]) -> None:
    window = options.get("sliding_window")
    groups = [a_group("full_attention")]
    if window:
        groups.append(a_group("sliding_window", sliding_window=window))
    theirs = scheduler.run(manager="vllm", **options)
    assert theirs["num_finished"] == options["num_requests"]
    assert bool(theirs["num_preempted"]) == (options["num_blocks"] < 200)
    with own_server(
        [
            "--no-memory",
            *("--num-blocks", str(options["num_blocks"])),
            *("--groups", json.dumps(groups)),
            *("--max-model-len", str(MAX_MODEL_LEN)),
        ]
    ) as target:
        strict, lazy, hinted = [
            scheduler.run(manager=manager, target=target, **options)
            for manager in ("strict", "lazy", "hinted")
        ]
    steps = zip(strict["steps"], theirs["steps"], strict=False)
    first = next((number for number, (one, other) in enumerate(steps) if one != other), None)
    assert first is None, f"another decision in step {first}"
    for what in (*DECIDED, "num_hit_tokens", "usage"):
        assert strict[what] == theirs[what], what
    for ours in (lazy, hinted):
        for what in ("outputs", "num_finished", "num_output_tokens"):
            assert ours[what] == theirs[what], what
        assert bool(ours["num_preempted"]) == bool(theirs["num_preempted"])
    for ours in (strict, lazy, hinted):
        left = ours["violations"], ours["num_requests_left"], ours["num_live_blocks_left"]
        assert left == ([], 0, 0)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["full", "short-async-window"])
def test_the_real_scheduler(scheduler: RealScheduler, name: str) -> None:
    compare(scheduler, {"num_requests": 60, **RUNS[name]})


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", RUNS)
def test_the_real_scheduler_with_many_requests(scheduler: RealScheduler, name: str) -> None:
    compare(scheduler, {"num_requests": 1000, "seed": 1, **RUNS[name]})
