"""Compares two managers over whole sequences, and reports how they differ.

One side runs here (``Local``), the other in the oracle's process (``Oracle``); both answer a
digest per operation. The records themselves are asked for only where digests differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from backend import Backend
from digest import RAISED, SKIPPED, run_all
from interpreter import Interpreter
from sequence import Operation, Sequence
from shrink import shrink

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HASH_SEED = "0"
SHRINK_TRIALS = 2000
STOP_TIMEOUT_S = 20
HASH_CHARS_SHOWN = 8


class Side(Protocol):
    """Somewhere to run a sequence: ``begin`` it, then ask for what came of it."""

    def begin(self, config: dict[str, Any], ops: list[Operation], full: bool) -> None: ...

    def answer(self) -> list[Any]: ...


class Local:
    """Runs sequences in this process, on a backend made anew for each."""

    def __init__(self, make_backend: Callable[[dict[str, Any]], Backend]) -> None:
        self.make_backend = make_backend
        self.task: tuple[dict[str, Any], list[Operation], bool] | None = None

    def begin(self, config: dict[str, Any], ops: list[Operation], full: bool) -> None:
        self.task = (config, ops, full)

    def answer(self) -> list[Any]:
        assert self.task is not None
        config, ops, full = self.task
        return _results(run_all(self.make_backend, config, ops, full))

    def resolve(self, config: dict[str, Any], ops: list[Operation]) -> list[Operation]:
        """``ops`` with every pick replaced by the request picked, the skipped ones left out."""
        try:
            interpreter = Interpreter(self.make_backend(config), config)
        except Exception:  # refused: nothing is picked
            return ops
        resolved = []
        for operation in ops:
            named, record = interpreter.run(operation)
            if record is not None:
                resolved.append(named)
        return resolved


class OracleError(Exception):
    """The oracle is missing, did not start, or died."""


class Oracle:
    """The oracle's process, from the moment it is ready until ``close``."""

    def __init__(self, venv: Path | None = None) -> None:
        venv = venv or Path(os.environ.get("KVDEPOT_ORACLE_VENV") or ROOT / ".oracle-venv")
        python = venv / "bin" / "python"
        if not python.exists():
            raise OracleError(
                f"no oracle at {venv}: make it with tests/oracle/setup.sh {venv}, or point "
                "KVDEPOT_ORACLE_VENV at one"
            )
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        self.process = subprocess.Popen(
            [str(python), str(HERE / "vllm_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={
                **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
                "PYTHONHASHSEED": HASH_SEED,
                "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            },
        )

        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the process."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()

    def begin(self, config: dict[str, Any], ops: list[Operation], full: bool) -> None:
        self._write({"config": config, "ops": ops, "full": full})

    def answer(self) -> list[Any]:
        return _results(self._read())

    def describe_specs(
        self, config: dict[str, Any], specs: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """What each spec says of itself under ``config``, or {"raised"}."""
        self._write({"config": config, "specs": specs})
        described: list[dict[str, Any]] = self._read()["specs"]
        return described

    def hash_cases(self, job: dict[str, Any]) -> list[Any]:
        """vLLM's block hashes: see vllm_hashing.py."""
        self._write({"hashing": job})
        hashes: list[Any] = self._read()["hashes"]
        return hashes

    def _write(self, task: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            print(json.dumps(task), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise self._died() from None

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self) -> OracleError:
        code = self.process.wait(STOP_TIMEOUT_S)
        self.errors.seek(0)
        tail = self.errors.read().decode(errors="replace")[-3000:]
        return OracleError(f"the oracle ended with {code}:\n{tail}")


def _results(answer: dict[str, Any]) -> list[Any]:
    results: list[Any] = answer["records"] if "records" in answer else answer["digests"]
    return results


def run_both(
    ours: Side, oracle: Side, config: dict[str, Any], ops: list[Operation], full: bool
) -> tuple[list[Any], list[Any]]:
    """What each side answered. The oracle works while we do."""
    oracle.begin(config, ops, full)
    ours.begin(config, ops, full)
    return ours.answer(), oracle.answer()


def first_difference(left: list[Any], right: list[Any]) -> int | None:
    """Index of the first operation whose answers differ."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def compare(ours: Local, oracle: Side, sequence: Sequence) -> tuple[str | None, int]:
    """Runs the sequence on both sides.

    Returns a report when an operation differed, or when both sides raised (the sequence
    then held what no scheduler does); else None and how many operations agreed.
    """
    config, ops = sequence.config, sequence.ops

    def failure(candidate: list[Operation]) -> int | None:
        left, right = run_both(ours, oracle, config, candidate, full=False)
        index = first_difference(left, right)
        if index is None and left and left[-1].startswith(RAISED):
            return len(left) - 1
        return index

    left, right = run_both(ours, oracle, config, ops, full=False)
    index = first_difference(left, right)
    if index is None and not left[-1].startswith(RAISED):
        return None, sum(digest != SKIPPED for digest in left)
    prefix = ops[: len(left) if index is None else index + 1]
    resolved = ours.resolve(config, prefix)
    failing = resolved if failure(resolved) is not None else prefix
    shortest = shrink(failing, lambda candidate: failure(candidate) is not None, SHRINK_TRIALS)
    return _report(ours, oracle, sequence, shortest), 0


def _report(ours: Local, oracle: Side, sequence: Sequence, ops: list[Operation]) -> str:
    left, right = run_both(ours, oracle, sequence.config, ops, full=True)
    index = first_difference(left, right)
    last = len(ops) - 1 if index is None else index
    lines = [
        f"divergence: seed {sequence.seed}, {last + 1} operations after shrinking",
        f"config {json.dumps(sequence.config)}",
    ]
    for number, operation in enumerate(ops[: last + 1]):
        lines.append(f"  {number:3d} {_shown(operation)} -> {_answered(left, number)}")
    lines.append(f"at {last}:")
    lines += _differences(*(side[last] if last < len(side) else None for side in (left, right)))
    return "\n".join(lines)


def _shown(operation: Operation) -> str:
    arguments = " ".join(
        f"{name}={json.dumps(value)}" for name, value in operation.items() if name != "op"
    )
    return f"{operation['op']} {arguments}"


def _answered(records: list[Any], number: int) -> str:
    if number >= len(records):
        return "(not reached)"
    record = records[number]
    if record is None:
        return "skipped"
    return _outcome(record)


def _outcome(record: Any) -> str:
    return json.dumps(record.get("result", record) if record else record)


def _differences(ours: Any, oracle: Any) -> list[str]:
    """The fields in which two records differ."""
    if not ours or not oracle or "raised" in ours or "raised" in oracle:
        return [f"  {name} {_outcome(one)}" for name, one in (("ours  ", ours), ("oracle", oracle))]
    lines = []
    for name in dict.fromkeys((*ours, *oracle)):
        if ours.get(name) != oracle.get(name):
            lines += [
                f"  {name}:",
                f"    ours   {_short(ours.get(name))}",
                f"    oracle {_short(oracle.get(name))}",
            ]
    return lines


def _short(value: Any) -> str:
    """JSON with hashes cut short, which tell blocks apart all the same."""

    def cut(part: Any) -> Any:
        if isinstance(part, str) and len(part) == 64:
            return part[:HASH_CHARS_SHOWN]
        if isinstance(part, list):
            return [cut(one) for one in part]
        if isinstance(part, dict):
            return {name: cut(one) for name, one in part.items()}
        return part

    return json.dumps(cut(value))
