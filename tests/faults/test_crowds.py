"""Very many clients, and clients that misbehave: the others do not notice."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from kvclient import Client
from kvclient.values import Content, SlotRequest
from kvdepot.v1 import cache_pb2, cache_pb2_grpc, event_pb2, event_pb2_grpc
from processes import Process, Processes, ServerProcess, assert_empty, wait_for

KIB = 1 << 10
CONNECTION_BYTES_MAX = 80 * KIB
SESSION_BYTES_MAX = 32 * KIB
PATIENCE_SECONDS = 5.0
PATIENCE_SECONDS_MAX = 40.0
"""The longest that nearly all, and any, of a well-behaved client's two calls may take on a crowded
machine, which may stand still for a while."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"

# The long versions, on a busy machine.
pytestmark = pytest.mark.timeout(900)


@contextlib.contextmanager
def nagger(processes: Processes, server: ServerProcess) -> Iterator[Process]:
    """A client that must not notice what happens within."""
    process = processes.python(str(processes.programs / "crowd.py"), "nagger", server.target)
    process.said("running")
    yield process
    process.signal(signal.SIGTERM)
    report = process.report()
    assert report["failures"] == []
    assert report["calls"] > 0
    assert report["p99_s"] < PATIENCE_SECONDS, report
    assert report["max_s"] < PATIENCE_SECONDS_MAX, report


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_many_connections(
    processes: Processes, count: int, record_property: Callable[[str, object], None]
) -> None:
    """All are served, before and after they were idle; what one costs is bounded."""
    server = processes.serve(num_blocks=100)
    with nagger(processes, server):
        before = server.rss_bytes
        crowd = processes.python(
            str(processes.programs / "crowd.py"), "connections", server.target, str(count)
        )
        assert crowd.said(r'"connected": (\d+)', 300)[1] == str(count)
        assert server.num_descriptors > count
        bytes_each = (server.rss_bytes - before) / count
        crowd.signal(signal.SIGTERM)
        assert crowd.report() == {"failed": 0}
    wait_for(lambda: server.num_descriptors < 100)
    record_property("bytes_per_connection", int(bytes_each))
    print(f"{count} connections: {bytes_each / KIB:.1f} KiB each")
    assert bytes_each < CONNECTION_BYTES_MAX


@pytest.mark.parametrize(
    ("count", "lease_s"), [(200, 5), pytest.param(1000, 20, marks=pytest.mark.slow)]
)
def test_many_idle_sessions(
    processes: Processes,
    count: int,
    lease_s: int,
    record_property: Callable[[str, object], None],
) -> None:
    """They are kept alive by their client, and cost little."""
    server = processes.serve(num_blocks=100, max_sessions=count + 1)
    with Client(server.target) as client, nagger(processes, server):
        before = server.rss_bytes
        crowd = processes.python(
            str(processes.programs / "crowd.py"),
            "sessions",
            server.target,
            str(count),
            str(lease_s),
        )
        crowd.said("opened", 300)
        bytes_each = (server.rss_bytes - before) / count
        time.sleep(1.2 * lease_s)
        assert client.stats().num_sessions == count + 1
        crowd.signal(signal.SIGTERM)
        assert crowd.report() == {"lost": 0}
        assert client.stats().num_sessions == 1
    record_property("bytes_per_session", int(bytes_each))
    print(f"{count} sessions: {bytes_each / KIB:.1f} KiB each")
    assert bytes_each < SESSION_BYTES_MAX


def test_no_descriptors_are_left(processes: Processes) -> None:
    """Those that are connected are served on; when some go, others get in again."""
    server = processes.serve(num_blocks=100, max_descriptors=96)
    host, port = server.target.rsplit(":", 1)
    with nagger(processes, server), contextlib.ExitStack() as crowd:
        for _ in range(200):
            crowd.enter_context(socket.create_connection((host, int(port)), 60.0))
        wait_for(lambda: server.num_descriptors >= 96)
        time.sleep(1.0)
        crowd.close()
        with Client(server.target) as client:
            assert client.stats().num_sessions == 1
            assert client.audit().violations == ()
    assert server.popen.poll() is None


def test_half_open_and_slow_clients(processes: Processes) -> None:
    """Connections that say nothing, half of something, or read nothing."""
    server = processes.serve(num_blocks=4000, event_queue=16)
    host, port = server.target.rsplit(":", 1)
    with contextlib.ExitStack() as crowd, Client(server.target) as client:
        with nagger(processes, server):
            for said in (b"", PREFACE[:7], PREFACE, PREFACE + SETTINGS, b"\xff" * 100) * 10:
                connection = socket.create_connection((host, int(port)), 60.0)
                crowd.enter_context(connection)
                connection.sendall(said)
            # A follower that reads nothing, while much happens.
            channel = crowd.enter_context(grpc.insecure_channel(server.target))
            stub = event_pb2_grpc.KVEventServiceStub(channel)
            slow = stub.StreamEvents(event_pb2.StreamEventsRequest())
            slow.initial_metadata()
            with client.open_session("busy") as busy:
                for number in range(100):
                    prompt = range(1000 * number, 1000 * number + 640)
                    busy.allocate_slots(slots(f"r{number}", prompt))
                    busy.cache_blocks(f"r{number}", 640)
                    busy.free(f"r{number}")
        crowd.close()
        wait_for(lambda: not client.stats().num_event_subscribers)
        assert_empty(client)


def slots(request_id: str, prompt: range) -> SlotRequest:
    """An admission."""
    return SlotRequest(request_id, Content(prompt), lookup=True)


@pytest.mark.parametrize("megabytes", [100])
def test_messages_of_100_megabytes(processes: Processes, megabytes: int) -> None:
    """RESOURCE_EXHAUSTED, for each method that takes bytes; memory is given back."""
    server = processes.serve(num_blocks=100)
    huge = bytes(megabytes << 20)
    with (
        nagger(processes, server),
        grpc.insecure_channel(
            server.target, options=[("grpc.max_send_message_length", -1)]
        ) as channel,
    ):
        stub = cache_pb2_grpc.KVCacheServiceStub(channel)
        opened = stub.OpenSession(cache_pb2.OpenSessionRequest(name="huge"))
        before = server.rss_bytes
        content = cache_pb2.RequestContent(tokens=huge)
        requests = {
            "GetComputedBlocks": cache_pb2.GetComputedBlocksRequest(content=content),
            "CacheBlocks": cache_pb2.CacheBlocksRequest(content=content),
            "AllocateSlots": cache_pb2.AllocateSlotsRequest(
                slots=cache_pb2.SlotRequest(content=content)
            ),
            "Step": cache_pb2.StepRequest(grow=cache_pb2.GrowColumns(tokens=huge)),
        }
        for method, request in requests.items():
            request.context.session_id = opened.session_id
            with pytest.raises(grpc.RpcError) as caught:
                getattr(stub, method)(request, timeout=60)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, method
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.StepStream(iter([requests["Step"]]), timeout=60))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert server.rss_bytes - before < 2 * len(huge)
