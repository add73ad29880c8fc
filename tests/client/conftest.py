"""A real server in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvclient import Client
from own_process import environment
from wire import Wire

BLOCK_SIZE = 4
NUM_BLOCKS = 65
TIMEOUT_S = 60.0


@dataclass
class ServerProcess:
    """A running ``kvdepot serve``."""

    process: subprocess.Popen[str]
    target: str
    epoch: str

    def client(self, **options: Any) -> Client:
        """A synchronous client of it."""
        return Client(self.target, **({"timeout_s": TIMEOUT_S} | options))

    def stop(self) -> None:
        """Kills it, and waits until it is gone."""
        self.process.kill()
        self.process.communicate(timeout=TIMEOUT_S)


Serve = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts servers; keywords are the flags, True sets one. All stop with the module.

    They offer NIXL, which costs a server as much to load as all else, if a test says so.
    """
    running: list[ServerProcess] = []

    def start(**options: Any) -> ServerProcess:
        directory = tmp_path_factory.mktemp("server")
        flags: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            **({} if "groups" in options else {"block_size": BLOCK_SIZE}),
            "num_blocks": NUM_BLOCKS,
            "mapping_dir": directory,
            "nixl_devices": "none",
        }
        argv = [sys.executable, "-m", "kvserver", "--no-metrics"]
        for name, value in (flags | options).items():
            argv += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        log = directory / "stderr"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment(),
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = re.search(r"^kvdepot ready grpc=(\S+) .*epoch=(\S+)", line)
        if ready is None:
            process.kill()
            process.communicate()
            pytest.fail(f"the server said {line!r}: {log.read_text()}")
        running.append(ServerProcess(process, ready[1], ready[2]))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture(scope="module")
def server(serve: Serve) -> ServerProcess:
    """A server of 64 usable blocks of 4 tokens, shared by the module's tests."""
    return serve()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    """A client of the shared server, that leaves no request and no cached block behind."""
    with server.client() as made:
        yield made
        assert made.audit().violations == ()
        assert made.stats().num_requests == 0
        with made.open_session("cleaner") as session:
            session.reset_prefix_cache()


@pytest.fixture
def wire(server: ServerProcess) -> Iterator[Wire]:
    """A wire to the shared server."""
    made = Wire(server.target)
    yield made
    made.close()


@pytest.fixture
def unix_path(tmp_path: Path) -> str:
    """A path short enough for a Unix socket."""
    return str(tmp_path / "s")
