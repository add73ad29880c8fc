"""kvcore's manager against vLLM's, each in a process of its own, in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.pairs import Row, Samples, Settings, compare
from benchmarks.workloads import POOL_SIZES

ROOT = Path(__file__).resolve().parents[1]
STOP_SECONDS = 20

# Row, workload, samples a burst, target.
ROWS = (
    ("core: admit and free 1024 tokens, 0% hit", "admit 0%", 200, 0.7),
    ("core: admit and free 1024 tokens, 50% hit", "admit 50%", 200, 0.7),
    ("core: admit and free 1024 tokens, 100% hit", "admit 100%", 200, 0.7),
    ("core: admit and free 1024 tokens, 0% hit, with events", "admit with events", 200, 0.7),
    ("core: the same, every block evicts one", "evict", 200, 0.7),
    ("core: decode step of 256 requests", "decode", 64, 0.7),
    (
        "core: full + sliding window, admit 1024 tokens, 0% hit",
        "hybrid admit 0%",
        200,
        0.7,
    ),
    ("core: full + sliding window, admit 1024 tokens, 50% hit", "hybrid admit 50%", 200, 0.7),
    ("core: full + sliding window, decode step of 256", "hybrid decode", 64, 0.7),
    ("core: hash 8192 tokens (vLLM: sha256_cbor)", "hash", 20, 0.2),
)


class Worker:
    """One side's process, from the moment it is ready until ``close``."""

    def __init__(self, python: str, side: str) -> None:
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self.process = subprocess.Popen(
            [python, "-W", "ignore", "-m", "benchmarks.worker", side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self.side = side

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def answer(self) -> list[float]:
        """The next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the {self.side} side died; its message is above")
        samples: list[float] = json.loads(line)
        return samples

    def burst(self, workload: str, num_samples: int) -> list[Samples]:
        """The samples of one burst."""
        assert self.process.stdin is not None
        print(json.dumps([workload, num_samples]), file=self.process.stdin, flush=True)
        return [self.answer()]


def vllm_python() -> str:
    """The interpreter of the environment that holds vLLM."""
    venv = Path(os.environ.get("KVDEPOT_ORACLE_VENV") or ROOT / ".oracle-venv")
    python = venv / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"no vLLM at {venv}: make it with tests/oracle/setup.sh {venv}")
    return str(python)


@contextmanager
def vllm_worker() -> Iterator[Worker]:
    """vLLM's side, ready."""
    with Worker(vllm_python(), "vllm") as worker:
        worker.answer()
        yield worker


def rows(settings: Settings) -> Iterator[Row]:
    """The rows, as they are measured."""
    with vllm_worker() as theirs, Worker(sys.executable, "kvcore") as ours:
        ours.answer()

        def measure(
            name: str,
            workload: str,
            num_samples: int,
            *,
            target: float | None,
            unit: str = "us",
            settings: Settings = settings,
        ) -> Row:
            (row,) = compare(
                [name],
                lambda: ours.burst(workload, settings.samples(num_samples)),
                lambda: theirs.burst(workload, settings.samples(num_samples)),
                settings,
                target=target,
                unit=unit,
            )
            return row

        for name, workload, num_samples, target in ROWS:
            yield measure(name, workload, num_samples, target=target)
        by_size = []
        for num_blocks in POOL_SIZES[:2] if settings.is_quick else POOL_SIZES:
            name = f"core: admit 1024 tokens, every block evicts one of {num_blocks:,}"
            by_size.append(measure(name, f"evict of {num_blocks}", 100, target=0.7))
            yield by_size[-1]
        # How much of its first time each side's last is.
        smallest, largest = by_size[0], by_size[-1]
        grown = (largest.ours / smallest.ours, largest.theirs / smallest.theirs)
        yield Row(
            "core: growth of that time, from the smallest pool to the largest",
            grown[0] / grown[1],
            1.0,
            *grown,
            "x",
            *grown,
        )
        if not settings.is_quick:  # of few samples it may even be negative
            added = (largest.ours - smallest.ours, largest.theirs - smallest.theirs)
            name = (
                "core: microseconds by which that time grows, from the smallest pool to the largest"
            )
            yield Row(name, added[0] / added[1], None, *added, "us", *added)
        name = "core: memory of metadata, per block of a full pool"
        once = replace(settings, num_pairs=1)
        yield measure(name, "metadata", 1, target=1.0, unit="B", settings=once)
