"""A server that stops cancels calls that it has not begun: they are asked again."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from kvclient import Client
from kvclient.errors import Unavailable
from kvdepot.v1 import admin_pb2, admin_pb2_grpc


class Stopping(admin_pb2_grpc.KVAdminServiceServicer):
    """Cancels its first calls."""

    def __init__(self, num_cancelled: int) -> None:
        self.num_left = num_cancelled
        self.num_calls = 0

    def GetStats(self, request: admin_pb2.GetStatsRequest, context: Any) -> Any:
        self.num_calls += 1
        if self.num_left:
            self.num_left -= 1
            context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
        return admin_pb2.GetStatsResponse(num_blocks=7)


@contextmanager
def serving(service: Stopping) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    admin_pb2_grpc.add_KVAdminServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_asked_again() -> None:
    service = Stopping(2)
    with serving(service) as target, Client(target) as client:
        assert client.stats().num_blocks == 7
    assert service.num_calls == 3


def test_unavailable_in_the_end() -> None:
    service = Stopping(100)
    with (
        serving(service) as target,
        Client(target) as client,
        pytest.raises(Unavailable) as caught,
    ):
        client.stats()
    assert caught.value.reason == "CANCELLED_BY_SERVER"
    assert caught.value.retryable
    assert 1 < service.num_calls < 10
