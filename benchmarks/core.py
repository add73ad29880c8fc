"""kvcore's manager against vLLM's, each in a process of its own, in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.pairs import Row, Samples, Settings, compare

ROOT = Path(__file__).resolve().parents[1]
STOP_SECONDS = 20

# Row, workload, samples a burst, target.
ROWS = (
    ("core: admit and free 1024 tokens, 0% hit", "admit 0%", 200, 1.0),
    ("core: admit and free 1024 tokens, 50% hit", "admit 50%", 200, 1.0),
    ("core: admit and free 1024 tokens, 100% hit", "admit 100%", 200, 1.0),
    ("core: the same, every block evicts one", "evict", 200, 1.0),
    ("core: decode step of 256 requests", "decode", 64, 1.0),
    (
        "core: full + sliding window, admit 1024 tokens, 0% hit",
        "hybrid admit 0%",
        200,
        1.0,
    ),
    ("core: full + sliding window, admit 1024 tokens, 50% hit", "hybrid admit 50%", 200, 1.0),
    ("core: full + sliding window, decode step of 256", "hybrid decode", 64, 1.0),
    ("core: hash 8192 tokens (vLLM: sha256_cbor)", "hash", 20, 0.25),
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


def rows(settings: Settings) -> Iterator[Row]:
    """The rows, as they are measured."""
    venv = Path(os.environ.get("KVDEPOT_ORACLE_VENV") or ROOT / ".oracle-venv")
    python = venv / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"no vLLM at {venv}: make it with tests/oracle/setup.sh {venv}")
    with ExitStack() as stack:
        ours, theirs = (
            stack.enter_context(Worker(executable, side))
            for executable, side in ((sys.executable, "kvcore"), (str(python), "vllm"))
        )
        ours.answer(), theirs.answer()
        for name, workload, full_samples, target in ROWS:
            num_samples = settings.samples(full_samples)
            yield from compare(
                [name],
                lambda w=workload, n=num_samples: ours.burst(w, n),  # type: ignore[misc]
                lambda w=workload, n=num_samples: theirs.burst(w, n),  # type: ignore[misc]
                settings,
                target=target,
            )
