"""A server in this process, and a scheduler that speaks to it through real stubs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
import uvloop
from google.rpc.status_pb2 import Status

from fake_data_plane import FakeDataPlane
from kvcore.memory import PoolMemory
from kvdepot.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    event_pb2,
    event_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
    types_pb2,
)
from kvserver.config import ServerConfig
from kvserver.data_plane import DataPlane
from kvserver.deadlines import Clock
from kvserver.serve import Server

Answer = TypeVar("Answer")

TIMEOUT_SECONDS = 60.0
BLOCK_SIZE = 4
BLOCK_BYTES = 128 * BLOCK_SIZE


def tokens(*ids: int) -> bytes:
    """Token ids as they travel."""
    return struct.pack(f"<{len(ids)}I", *ids)


def int32s(*values: int) -> bytes:
    """A column of int32."""
    return struct.pack(f"<{len(values)}i", *values)


def from_int32s(column: bytes) -> list[int]:
    """The values of a column of int32."""
    return list(struct.unpack(f"<{len(column) // 4}i", column))


def detail_of(error: grpc.RpcError) -> types_pb2.ErrorDetail:
    """The ErrorDetail in an error's google.rpc.Status."""
    trailing = dict(error.trailing_metadata())
    status = Status.FromString(trailing["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    detail = types_pb2.ErrorDetail()
    assert status.details[0].Unpack(detail)
    return detail


NO_SUCH_SESSION = [
    pytest.param(
        {"epoch": "an earlier life"},
        grpc.StatusCode.FAILED_PRECONDITION,
        "STALE_EPOCH",
        "epoch",
        id="another epoch",
    ),
    pytest.param(
        {"session_id": "nobody"},
        grpc.StatusCode.NOT_FOUND,
        "UNKNOWN_SESSION",
        "session_id",
        id="unknown",
    ),
    pytest.param(
        {"session_id": ""},
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "session_id",
        id="none",
    ),
]
"""What a request says of its session; the code, reason and field of the refusal."""


def refused(call: Callable[[], Any], code: grpc.StatusCode) -> types_pb2.ErrorDetail:
    """``call`` must fail with ``code``; the detail it carries."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() is code, caught.value
    return detail_of(caught.value)


def eventually(true: Callable[[], bool], seconds: float = TIMEOUT_SECONDS) -> None:
    """Waits until it is so."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class EventLoopThread:
    """One event loop for all servers: grpc.aio allows no second one in a process."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, work: Any) -> Any:
        """The result of a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(TIMEOUT_SECONDS)

    def call(self, function: Callable[[], Answer]) -> Answer:
        """The result of a function called on the loop."""

        async def on_loop() -> Answer:
            return function()

        result: Answer = self.run(on_loop())
        return result


@functools.cache
def event_loop_thread() -> EventLoopThread:
    """The one of this process; it lives as long."""
    return EventLoopThread()


class Scheduler:
    """One session, in plain calls; every keyword of ``context`` goes to CallContext."""

    def __init__(self, stub: Any, name: str = "scheduler") -> None:
        self.stub = stub
        self.opened = stub.OpenSession(
            cache_pb2.OpenSessionRequest(name=name), timeout=TIMEOUT_SECONDS
        )

    def context(self, **context: Any) -> types_pb2.CallContext:
        """The context of one call."""
        return types_pb2.CallContext(
            session_id=self.opened.session_id, epoch=self.opened.epoch, **context
        )

    def lookup(self, request_id: str, new: bytes = b"", **context: Any) -> Any:
        """GetComputedBlocks."""
        content = cache_pb2.RequestContent(tokens=new) if new else None
        return self.stub.GetComputedBlocks(
            cache_pb2.GetComputedBlocksRequest(
                context=self.context(**context), request_id=request_id, content=content
            ),
            timeout=TIMEOUT_SECONDS,
        )

    def allocate(
        self, request_id: str, *, context: dict[str, Any] | None = None, **slots: Any
    ) -> Any:
        """AllocateSlots; answers the SlotResult."""
        return self.stub.AllocateSlots(
            cache_pb2.AllocateSlotsRequest(
                context=self.context(**(context or {})),
                slots=cache_pb2.SlotRequest(request_id=request_id, **slots),
            ),
            timeout=TIMEOUT_SECONDS,
        ).result

    def admit(self, request_id: str, new: bytes, **context: Any) -> Any:
        """Look up and allocate in one call; answers the SlotResult."""
        return self.allocate(
            request_id,
            content=cache_pb2.RequestContent(tokens=new),
            lookup=True,
            context=context,
        )

    def cache(self, request_id: str, num_computed_tokens: int, **context: Any) -> Any:
        """CacheBlocks."""
        return self.stub.CacheBlocks(
            cache_pb2.CacheBlocksRequest(
                context=self.context(**context),
                request_id=request_id,
                num_computed_tokens=num_computed_tokens,
            ),
            timeout=TIMEOUT_SECONDS,
        )

    def free(self, request_id: str, mode: int = cache_pb2.FREE_MODE_FINISH, **context: Any) -> Any:
        """Free."""
        return self.stub.Free(
            cache_pb2.FreeRequest(
                context=self.context(**context), request_id=request_id, mode=mode
            ),
            timeout=TIMEOUT_SECONDS,
        )

    def reset(self, **context: Any) -> Any:
        """ResetPrefixCache."""
        return self.stub.ResetPrefixCache(
            cache_pb2.ResetPrefixCacheRequest(context=self.context(**context)),
            timeout=TIMEOUT_SECONDS,
        )

    def step_stream(self) -> list[Any]:
        """StepStream's answer to an empty Step; the stream ends after it."""
        request = cache_pb2.StepRequest(context=self.context())
        return list(self.stub.StepStream(iter([request]), timeout=TIMEOUT_SECONDS))

    def close(self, **context: Any) -> Any:
        """CloseSession."""
        return self.stub.CloseSession(
            cache_pb2.CloseSessionRequest(context=self.context(**context)),
            timeout=TIMEOUT_SECONDS,
        )


@dataclass
class Served:
    """A running server and a channel to it."""

    server: Server
    loop: EventLoopThread
    channel: grpc.Channel

    def __post_init__(self) -> None:
        self.cache: Any = cache_pb2_grpc.KVCacheServiceStub(self.channel)
        self.event: Any = event_pb2_grpc.KVEventServiceStub(self.channel)
        self.transfer: Any = transfer_pb2_grpc.KVTransferServiceStub(self.channel)
        self.admin: Any = admin_pb2_grpc.KVAdminServiceStub(self.channel)

    @property
    def target(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.server.port}"

    def open(self, name: str = "scheduler") -> Scheduler:
        """A new session."""
        return Scheduler(self.cache, name)

    def attach(self, scheduler: Scheduler, **request: Any) -> Any:
        """AttachWorker of its session; the stream, of which nothing is read yet."""
        given = {"session_id": scheduler.opened.session_id, "epoch": scheduler.opened.epoch}
        return self.transfer.AttachWorker(
            transfer_pb2.AttachWorkerRequest(**(given | request)), timeout=TIMEOUT_SECONDS
        )

    def follow(self, **request: Any) -> Any:
        """StreamEvents; the stream, whose initial metadata is here."""
        stream = self.event.StreamEvents(
            event_pb2.StreamEventsRequest(**request), timeout=TIMEOUT_SECONDS
        )
        stream.initial_metadata()
        return stream

    @property
    def data_plane(self) -> FakeDataPlane:
        """What moves its bytes."""
        data_plane = self.server.node.data_plane
        assert isinstance(data_plane, FakeDataPlane)
        return data_plane

    def stats(self) -> Any:
        """GetStats."""
        return self.admin.GetStats(admin_pb2.GetStatsRequest(), timeout=TIMEOUT_SECONDS)

    def assert_clean(self) -> None:
        """Audit finds nothing, and the states sum up."""
        audit = self.admin.Audit(admin_pb2.AuditRequest(), timeout=TIMEOUT_SECONDS)
        assert list(audit.violations) == []
        stats = self.stats()
        states = stats.blocks
        total = sum(getattr(states, field.name) for field in states.DESCRIPTOR.fields)
        assert total == stats.num_blocks - 1


def ready_hashes(served: Served) -> list[bytes]:
    """The index, by snapshot."""
    stream = served.follow(snapshot=True)
    found: list[bytes] = []
    for batch in stream:
        found += [h for event in batch.events for h in event.block_stored.block_hashes]
        if batch.snapshot_end:
            break
    stream.cancel()
    return found


Serve = Callable[..., Served]


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[Serve]:
    """Starts servers; keywords are ServerConfig's. All stop at the end.

    With ``clock`` the leases of a server run by it. What moves its bytes is no process of
    its own, unless ``make_data_plane`` makes one.
    """
    running: list[Served] = []
    loop = event_loop_thread()

    def start(
        *,
        clock: Clock | None = None,
        make_data_plane: Callable[[ServerConfig, PoolMemory], DataPlane] = FakeDataPlane,
        **options: Any,
    ) -> Served:
        defaults: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "no_metrics": True,
            **({} if options.get("groups") is not None else {"block_size": BLOCK_SIZE}),
            "num_blocks": 33,
            "mapping_dir": str(directory),
            "drain_grace_seconds": 0.0,
        }
        config = ServerConfig(**(defaults | options))
        server = loop.call(lambda: Server(config, clock=clock, make_data_plane=make_data_plane))
        loop.run(server.start())
        channel = grpc.insecure_channel(
            f"127.0.0.1:{server.port}",
            options=[
                ("grpc.max_receive_message_length", -1),
                ("grpc.max_send_message_length", -1),
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )
        running.append(Served(server, loop, channel))
        return running[-1]

    try:
        yield start
    finally:
        for served in running:
            served.channel.close()
            loop.run(served.server.stop())
