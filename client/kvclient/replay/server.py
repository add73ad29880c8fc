"""Servers of the replay's own, in processes beside it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec

from kvclient.replay.errors import ReplayError

_STOP_SECONDS = 20.0
_ENVIRONMENT_PREFIX = "KVDEPOT_"
_KEPT = frozenset(
    f"{_ENVIRONMENT_PREFIX}{name}"
    for name in (
        *("MAPPING_DIR", "NO_HUGE_PAGES", "NIXL_DEVICES"),
        *("IMPORT_PART_BLOCKS", "IMPORT_COPY_THREADS", "IMPORT_BANDWIDTH_BYTES"),
        *("PULL_BANDWIDTH_BYTES", "MAX_TRANSFER_BLOCKS", "MAX_TRANSFER_CONTENTS"),
    )
)


@contextmanager
def own_server(options: Sequence[str]) -> Iterator[str]:
    """As own_servers, one; gives its target."""
    with own_servers(options, 1) as targets:
        yield targets[0]


@contextmanager
def own_servers(options: Sequence[str], count: int) -> Iterator[list[str]]:
    """Runs ``kvdepot serve`` with ``options`` on free ports; gives the targets.

    Of the KVDEPOT_* variables they take those that say where bytes are and how they move.
    ReplayError when there is no server to run or one does not start.
    """
    if find_spec("kvserver") is None:
        raise ReplayError(
            "the server is not installed: pip install 'kvdepot[server]', "
            "or name a running one with --server"
        )
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_ENVIRONMENT_PREFIX) or name in _KEPT
    }
    command = [sys.executable, "-m", "kvserver", "--listen", "127.0.0.1:0", "--no-metrics"]
    command += ["--drain-grace-seconds", "0", *options]
    with ExitStack() as stack:
        # All at once: most of a start is waiting.
        started = [stack.enter_context(_started(command, environment)) for _ in range(count)]
        yield [_target(process) for process in started]


@contextmanager
def _started(
    command: Sequence[str], environment: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        # A Ctrl-C at the terminal is for the replay, which then stops the server.
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _target(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"\bgrpc=(\S+)", line)
    if found is None:
        raise ReplayError(f"the server did not start: {line.strip() or 'see its message above'}")
    return found[1]
