"""vLLM's real Scheduler with the facade, against the same with its own manager.

A run's figure is the mean, over its steps, of the seconds spent in the manager's calls:
lookups, admissions and frees too, and the hints, where they are given. The model is a pause
of FORWARD_SECONDS.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.pairs import Row, Samples, Settings, compare
from kvclient.replay.server import own_server

NUM_REQUESTS, NUM_BLOCKS = 128, 16_384
OPTIONS: dict[str, Any] = {
    "num_blocks": NUM_BLOCKS,
    "prompt_tokens": 200,
    "output_tokens": 100,
    "max_num_seqs": 128,
    "forward_s": 0.005,
}
# The manager, and what it is called in its rows.
MANAGERS = {
    "lazy": ("lazy", 0.5),
    "hinted": ("lazy, told of limits and of waiting requests", 0.5),
    "strict": ("strict", None),
}


def rows(settings: Settings) -> Iterator[Row]:
    """The rows, as they are measured."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "oracle"))
    from real_scheduler import RealScheduler

    num_requests = settings.samples(NUM_REQUESTS)
    few = Settings(num_pairs=min(3, settings.num_pairs), scale=settings.scale)
    with (
        RealScheduler() as scheduler,
        own_server(
            ["--no-memory", "--num-blocks", str(NUM_BLOCKS), "--block-size", "16"]
        ) as target,
    ):

        def steps(manager: str) -> list[Samples]:
            """Seconds of a mean step."""
            run = scheduler.run(
                manager=manager,
                num_requests=num_requests,
                target="" if manager == "vllm" else target,
                **OPTIONS,
            )
            assert run["num_finished"] == num_requests
            return [[run["manager_seconds"] / len(run["steps"])], sorted(run["step_seconds"])]

        for manager, (name, bound) in MANAGERS.items():
            yield from compare(
                [
                    f"scheduler: KV time of a mean step, {name} (vLLM's own manager)",
                    f"scheduler: KV time of a median step, {name} (vLLM's own manager)",
                ],
                lambda m=manager: steps(m),  # type: ignore[misc]
                lambda: steps("vllm"),
                few,
                target=bound,
            )
