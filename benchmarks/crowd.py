"""Many schedulers on one server: how much they do together, how evenly, and how late.

``python -m benchmarks.crowd TARGET`` is one of them: it prints a line when it is ready,
reads the seconds to run as a line, and answers the seconds of its Steps as one of JSON.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter

import grpc

from benchmarks.pairs import Row, Settings, percentile
from benchmarks.rpc import Scheduler, decode_steps
from kvclient.replay.server import own_server

ROOT = Path(__file__).resolve().parents[1]
SIZES = (1, 2, 4, 8)
NUM_REQUESTS = 64
STEPS_A_BURST = 100
SECONDS = 2.0
NUM_ROUNDS = 3


def serve_seconds(target: str) -> None:
    """One scheduler, as its own process."""
    with grpc.insecure_channel(target) as channel:
        scheduler = Scheduler(channel)
        gc.freeze()
        gc.disable()
        print("ready", flush=True)
        stop = perf_counter() + float(sys.stdin.readline())
        samples: list[float] = []
        while not samples or perf_counter() < stop:
            samples += decode_steps(scheduler, STEPS_A_BURST, NUM_REQUESTS)[0]
        print(json.dumps(samples), flush=True)


def together(target: str, num_schedulers: int, seconds: float) -> list[list[float]]:
    """The seconds of each Step of each scheduler."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.crowd", target],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=ROOT,
                )
            )
            for _ in range(num_schedulers)
        ]
        answers = []
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        for process in processes:
            assert process.stdin is not None
            print(seconds, file=process.stdin, flush=True)
        for process in processes:
            assert process.stdout is not None
            answers.append(json.loads(process.stdout.readline()))
    return answers


def rows(settings: Settings) -> Iterator[Row]:
    """The rows, as they are measured: each against one scheduler alone."""
    num_rounds = 1 if settings.is_quick else NUM_ROUNDS
    # Steps a second together; the fewest of one as a share of the most; p50 and p99.
    rounds: dict[int, list[tuple[float, float, float, float]]] = {size: [] for size in SIZES}
    with own_server(["--no-memory", "--num-blocks", "131072"]) as target:
        for _ in range(num_rounds):
            for size in SIZES:
                steps = together(target, size, SECONDS * settings.scale)
                rates = [len(samples) / sum(samples) for samples in steps]
                every = [sample for samples in steps for sample in samples]
                rounds[size].append(
                    (
                        sum(rates),
                        min(rates) / max(rates),
                        percentile(every, 0.5),
                        percentile(every, 0.99),
                    )
                )
    (rate, _, p50, p99), *more = (
        tuple(median(column) for column in zip(*rounds[size], strict=True)) for size in SIZES
    )
    for size, (rate_n, share, p50_n, p99_n) in zip(SIZES[1:], more, strict=True):
        name = f"crowd: {size} schedulers, {NUM_REQUESTS} requests a Step each"
        yield Row(f"{name}: Steps a second", rate_n / rate, None, rate_n, rate, "/s", 0, 0)
        yield Row(f"{name}: least over most of one", share, None, share, 1, "x", 0, 0)
        figures = [1e6 * seconds for seconds in (p50_n, p50, p99_n, p99)]
        yield Row(f"{name}: seconds a Step", p50_n / p50, None, *figures[:2], "us", *figures[2:])


if __name__ == "__main__":
    serve_seconds(sys.argv[1])
