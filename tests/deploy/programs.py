"""Programs that a test starts: each is stopped, by its pid, when its block ends."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest


class Program:
    """A running process whose output goes to ``log``."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    def output(self) -> str:
        """All it has written so far, to either stream."""
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str, *, timeout_s: float) -> re.Match[str]:
        """Wait until the output matches; fails with the output if it ends or is late."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.process.poll()
            if match := re.search(pattern, self.output()):
                return match
            if ended is not None or time.monotonic() > deadline:
                state = f"ended with {ended}" if ended is not None else "is late"
                pytest.fail(f"{self.process.args!r} {state}:\n{self.output()[-4000:]}")
            time.sleep(0.05)


@contextmanager
def running(
    argv: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None
) -> Iterator[Program]:
    """Start ``argv``; at the end SIGTERM, and SIGKILL if that is not enough."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=env
        )
    try:
        yield Program(process, log)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def debian_program(name: str) -> str:
    """The path of a program of Debian's ``prometheus`` package; fails where it is missing."""
    path = shutil.which(name)
    if path is None:
        pytest.fail(f"{name} is missing: apt-get install --no-install-recommends prometheus")
    return path
