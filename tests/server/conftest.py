"""A real server in this process, on free ports, spoken to through real stubs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvserver.config import ServerConfig
from kvserver.serve import Server
from serving import BLOCK_SIZE, EventLoopThread, Serve, Served


@pytest.fixture(scope="session")
def event_loop_thread() -> EventLoopThread:
    """Lives as long as the tests."""
    return EventLoopThread()


@pytest.fixture
def serve(event_loop_thread: EventLoopThread, tmp_path: Path) -> Iterator[Serve]:
    """Starts servers; keywords are ServerConfig's. All stop when the test ends."""
    running: list[Served] = []

    def start(**options: Any) -> Served:
        defaults: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "no_metrics": True,
            "block_size": BLOCK_SIZE,
            "num_blocks": 33,
            "mapping_dir": str(tmp_path),
            "drain_grace_s": 0.0,
        }
        server = event_loop_thread.call(lambda: Server(ServerConfig(**(defaults | options))))
        event_loop_thread.run(server.start())
        channel = grpc.insecure_channel(
            f"127.0.0.1:{server.port}",
            options=[
                ("grpc.max_receive_message_length", -1),
                ("grpc.max_send_message_length", -1),
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )
        running.append(Served(server, event_loop_thread, channel))
        return running[-1]

    yield start
    for served in running:
        served.channel.close()
        event_loop_thread.run(served.server.stop())


@pytest.fixture
def served(serve: Serve) -> Served:
    """A server of 32 usable blocks of 4 tokens."""
    return serve()
