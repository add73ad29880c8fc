"""Servers, schedulers and workers in processes of their own, all ended with the test."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvclient import Client
from own_process import environment

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 120.0
SLACK_SECONDS = 20.0
"""What may come later than it should on a busy machine; what else would end it takes longer."""
STOP_SECONDS = 20.0


def wait_for(condition: Callable[[], object], seconds: float = TIMEOUT_SECONDS) -> float:
    """Until it is true; the seconds that took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise AssertionError(f"not within {seconds} s")
        time.sleep(0.01)
    return time.monotonic() - began


@dataclass
class Process:
    """A child, whose lines of output are read as they come."""

    popen: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def pid(self) -> int:
        """Its number."""
        return self.popen.pid

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.popen.send_signal(number)

    def said(self, pattern: str, seconds: float = TIMEOUT_SECONDS) -> re.Match[str]:
        """The first line that matches, waited for."""
        deadline = time.monotonic() + seconds
        while True:
            for line in list(self.lines):
                if found := re.search(pattern, line):
                    return found
            if self.popen.poll() is not None and not self._reader.is_alive():
                break
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        raise AssertionError(f"{self.popen.args} said {self.lines[-20:]}, not {pattern!r}")

    def ended(self, seconds: float = TIMEOUT_SECONDS) -> int:
        """Its status, waited for."""
        status = self.popen.wait(seconds)
        self._reader.join(seconds)
        return status

    def report(self) -> dict[str, Any]:
        """The JSON object in its last line, after it ended well."""
        assert self.ended() == 0, self.lines[-20:]
        loaded: dict[str, Any] = json.loads(self.lines[-1])
        return loaded

    def kill(self) -> None:
        """kill -9, and wait."""
        self.popen.kill()
        self.popen.wait(STOP_SECONDS)


@dataclass
class ServerProcess(Process):
    """A running ``kvdepot serve``."""

    target: str = ""
    command: list[str] = field(default_factory=list)

    @property
    def rss_bytes(self) -> int:
        """Memory that the process has."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    @property
    def num_descriptors(self) -> int:
        """Open files and sockets."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


class Processes:
    """Starts them; ``stop`` ends all that still run, strays that were named too."""

    programs = HERE

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._running: list[Process] = []
        self._strays: list[int] = []

    def python(self, *arguments: str, **options: Any) -> Process:
        """A Python program; its errors come with its output."""
        return self._add(Process(self._start([sys.executable, *arguments], **options)))

    def load(self, *arguments: object) -> Process:
        """One of load.py's programs."""
        return self.python(str(HERE / "load.py"), *map(str, arguments))

    def kvdepot(self, *arguments: str) -> Process:
        """The command."""
        return self.python("-m", "kvclient.cli", *arguments)

    def serve(
        self, *, max_descriptors: int | None = None, within: Sequence[str] = (), **options: Any
    ) -> ServerProcess:
        """A server; keywords are its flags. ``within``: a command that runs its command."""
        flags = {"listen": "127.0.0.1:0", "mapping_dir": self.directory} | options
        arguments = []
        for name, value in flags.items():
            arguments.append(f"--{name.replace('_', '-')}")
            arguments += [] if value is True else [str(value)]
        command = [*within, sys.executable, "-m", "kvserver", "--no-metrics", *arguments]
        started: dict[str, Any] = {}
        if max_descriptors is not None:
            limit = (max_descriptors, max_descriptors)
            started["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        server = ServerProcess(self._start(command, **started), command=command)
        self._add(server)
        server.target = server.said(r"^kvdepot ready grpc=(\S+)")[1]
        return server

    def again(self, server: ServerProcess) -> ServerProcess:
        """The same server anew, at the same address."""
        command = [*server.command, "--listen", server.target]
        fresh = ServerProcess(self._start(command), target=server.target, command=server.command)
        self._add(fresh)
        fresh.said(r"^kvdepot ready grpc=")
        return fresh

    def stray(self, pid: int) -> int:
        """A process that is not our child; it is killed at the end."""
        self._strays.append(pid)
        return pid

    def stop(self) -> None:
        """End everything."""
        for process in self._running:
            # Each leads a group of its own, with what it started.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for pid in self._strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._running:
            process.ended(STOP_SECONDS)
            assert process.popen.stdout is not None
            process.popen.stdout.close()

    def _add(self, process: Any) -> Any:
        self._running.append(process)
        return process

    @staticmethod
    def _start(command: list[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            start_new_session=True,
            **options,
        )


@contextlib.contextmanager
def processes_in(directory: Path) -> Iterator[Processes]:
    """Processes that end with the block."""
    made = Processes(directory)
    try:
        yield made
    finally:
        made.stop()


def assert_empty(client: Client) -> None:
    """Nothing of anybody is left but the cache, and the audit is clean."""
    stats = client.stats()
    left = (
        stats.num_sessions,
        stats.num_departed_sessions,
        stats.num_workers,
        stats.num_requests,
        stats.num_event_subscribers,
        stats.blocks.live,
        stats.blocks.quarantined,
        stats.blocks.pinned,
        stats.blocks.in_transfer,
    )
    assert left == (0,) * 9, stats
    assert client.audit().violations == ()
