"""Clients that call and read nothing: what the server holds for them has a bound."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import Counter
from collections.abc import Iterator

import pytest

from kvdepot.v1 import admin_pb2, cache_pb2
from serving import Serve, Served, eventually, tokens

STEP_STREAM = "/kvdepot.v1.KVCacheService/StepStream"
LIST_REQUESTS = "/kvdepot.v1.KVAdminService/ListRequests"
GET_STATS = "/kvdepot.v1.KVAdminService/GetStats"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS = 0, 1, 3, 4
_END_STREAM, _END_HEADERS = 1, 4
_INITIAL_WINDOW_SIZE = 4


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    """RFC 9113, section 4.1."""
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def header(name: bytes, value: bytes) -> bytes:
    """RFC 7541, section 6.2.2: a literal that is not indexed, its name neither."""
    return b"".join((b"\0", bytes([len(name)]), name, bytes([len(value)]), value))


class Deaf:
    """An HTTP/2 connection whose streams have a window of 0: no reply is ever taken."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        settings = frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0))
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
        self._incoming = self.socket.makefile("rb")
        self._stream = 1

    def close(self) -> None:
        """Be gone."""
        self._incoming.close()
        self.socket.close()

    def call(self, path: str, message: bytes) -> None:
        """Begin a call."""
        headers = {
            b":method": b"POST",
            b":scheme": b"http",
            b":path": path.encode(),
            b":authority": b"kvdepot",
            b"te": b"trailers",
            b"content-type": b"application/grpc",
        }
        block = b"".join(header(*pair) for pair in headers.items())
        body = struct.pack(">BI", 0, len(message)) + message
        self.socket.sendall(
            frame(_HEADERS, _END_HEADERS, self._stream, block)
            + frame(_DATA, _END_STREAM, self._stream, body)
        )
        self._stream += 2

    def read_kind(self) -> int | None:
        """The kind of the next frame; None when the connection is closed."""
        with contextlib.suppress(ConnectionError):
            if start := self._incoming.read(9):
                self._incoming.read(int.from_bytes(start[:3], "big"))
                return start[3]
        return None


@contextlib.contextmanager
def deaf(served: Served) -> Iterator[Deaf]:
    """A client that reads nothing."""
    client = Deaf(served.target)
    try:
        yield client
    finally:
        client.close()


def answered(served: Served, method: str = "ListRequests") -> Counter[str]:
    """Calls of the method, or messages of the stream, by status."""
    return Counter(served.loop.call(lambda: dict(served.server._rpcs.count(method).codes)))


@pytest.fixture
def crowded(serve: Serve) -> Served:
    """A server that holds a mebibyte of replies, and whose ListRequests answers a tenth of it."""
    served = serve(max_unread_bytes=1 << 20, max_calls_per_connection=100, max_connections=4)
    scheduler = served.open()
    for number in range(100):
        scheduler.admit(f"{number}".ljust(1024, "."), tokens(number))
    return served


def test_replies_that_nobody_reads_are_few(crowded: Served) -> None:
    """The client is refused, calls of others are answered, and its end frees what it held."""
    request = admin_pb2.ListRequestsRequest().SerializeToString()
    size = len(crowded.admin.ListRequests(admin_pb2.ListRequestsRequest()).SerializeToString())
    unread = crowded.server._rpcs.unread
    for _ in range(2):
        before = answered(crowded)
        with deaf(crowded) as client:
            for _ in range(50):
                client.call(LIST_REQUESTS, request)
            num_answered = before.total() + 50
            eventually(lambda total=num_answered: answered(crowded).total() == total)
            num_held = (1 << 20) // size + 1
            codes = answered(crowded) - before
            assert codes == {"OK": num_held, "RESOURCE_EXHAUSTED": 50 - num_held}
            assert unread.nbytes <= (1 << 20) + size
            # What is small is answered here, too: leases are kept, blocks given back.
            asked = answered(crowded, "GetStats")
            client.call(GET_STATS, b"")
            eventually(lambda asked=asked: answered(crowded, "GetStats") - asked == {"OK": 1})
            # Another connection is answered, small or large, again and again.
            for _ in range(20):
                assert crowded.stats().num_requests == 100
                crowded.admin.ListRequests(admin_pb2.ListRequestsRequest(), timeout=60)
        eventually(lambda: unread.nbytes == 0)
    crowded.assert_clean()


def test_replies_on_streams_count_too(serve: Serve) -> None:
    """A stream waits until its reply is taken; the others of its connection are refused."""
    served = serve(max_unread_bytes=1, num_blocks=20_000)
    scheduler, other = served.open(), served.open()
    prompt = tokens(*range(60_000))
    scheduler.lookup("r", prompt)
    context = scheduler.context()
    context.ClearField("op_seq")
    request = cache_pb2.StepRequest(
        context=context,
        runs=[cache_pb2.Run(kind=cache_pb2.OPERATION_KIND_ADMIT, count=1)],
        admissions=[cache_pb2.SlotRequest(request_id="r")],
    ).SerializeToString()
    unread = served.server._rpcs.unread
    with deaf(served) as client:
        client.call(STEP_STREAM, request)
        eventually(lambda: unread.nbytes > 0)
        client.call(STEP_STREAM, request)
        eventually(lambda: answered(served, "StepStream").total() == 2)
        assert answered(served, "StepStream") == {"OK": 1, "RESOURCE_EXHAUSTED": 1}
        assert other.admit("r", tokens(1)).handle
    eventually(lambda: unread.nbytes == 0)
    served.assert_clean()


def test_calls_on_a_connection_are_few(crowded: Served) -> None:
    """Who goes on without regard to the number that it was told has the rest refused."""
    request = admin_pb2.ListRequestsRequest(page_size=1).SerializeToString()
    before = answered(crowded)
    with deaf(crowded) as client:
        for _ in range(300):
            client.call(LIST_REQUESTS, request)
        eventually(lambda: (answered(crowded) - before).total() == 100)
        refused = 0
        while refused < 200:
            refused += client.read_kind() == _RST_STREAM
    assert (answered(crowded) - before) == {"OK": 100}
    crowded.assert_clean()


def test_connections_are_few(crowded: Served) -> None:
    """More are closed at once; the others go on."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(deaf(crowded)) for _ in range(10)]
        # A server greets who may stay.
        assert [client.read_kind() for client in clients].count(_SETTINGS) == 3
        assert crowded.stats().num_sessions == 1
