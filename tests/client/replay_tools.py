"""Starting the command and a server in processes that a test stops, whatever happens."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from own_process import environment

TIMEOUT_SECONDS = 120.0
STOP_SECONDS = 20.0


def stop(process: subprocess.Popen[str]) -> None:
    """Ask, and then insist."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Finished:
    """A command that ended."""

    status: int
    output: str
    errors: str

    @property
    def json(self) -> dict[str, Any]:
        """Its ``--json`` output."""
        loaded: dict[str, Any] = json.loads(self.output)
        return loaded


def kvdepot(*arguments: str, timeout_seconds: float = TIMEOUT_SECONDS) -> Finished:
    """Runs ``kvdepot`` to its end."""
    with subprocess.Popen(
        [sys.executable, "-m", "kvclient.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_seconds)
        finally:
            if process.poll() is None:
                stop(process)
        return Finished(process.returncode, output, errors)


@contextlib.contextmanager
def serving(*options: str) -> Iterator[str]:
    """A server on a free port; gives its target."""
    with server(*options) as (_, target):
        yield target


@contextlib.contextmanager
def server(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server, on a free port unless ``options`` name one; gives its process and target."""
    command = [sys.executable, "-m", "kvclient.cli", "serve", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--no-metrics", "--drain-grace-seconds", "0", *options],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"\bgrpc=(\S+)", process.stdout.readline())
            assert found is not None
            yield process, found[1]
        finally:
            stop(process)
