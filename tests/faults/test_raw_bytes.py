"""Bytes that are no request, to every RPC: a typed answer each, and the others go on."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from kvdepot.v1 import admin_pb2, cache_pb2, event_pb2, transfer_pb2
from serving import Serve, Served, tokens

ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
IN_FLIGHT = 100
METHODS: dict[str, MethodDescriptor] = {
    method.full_name: method
    for module in (admin_pb2, cache_pb2, event_pb2, transfer_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    # Any bytes at all are a request to stop; and one that another process serves, elsewhere.
    if method.name not in ("Drain", "PullBlocks")
}


def noise(chance: Random) -> bytes:
    """A few bytes, most of them like those of messages: small tags and lengths."""
    size = int(2 ** chance.uniform(0, 8))
    if chance.random() < 0.5:
        return chance.randbytes(size)
    return bytes(chance.choice((chance.randrange(256), chance.randrange(96))) for _ in range(size))


def names_something(method: MethodDescriptor, raw: bytes) -> bool:
    """By chance it is a message, which names a session or the like that is not there."""
    try:
        message = GetMessageClass(method.input_type).FromString(raw)
    except DecodeError:
        return False
    return bool(message.ListFields())


@pytest.mark.parametrize("count", [100, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", METHODS)
def test_noise_is_answered(serve: Serve, name: str, count: int) -> None:
    served = serve(
        max_sessions=1 << 20, event_heartbeat_seconds=0.05, worker_heartbeat_seconds=0.05
    )
    well = served.open("well-behaved")
    method = METHODS[name]
    chance = Random(f"{name} {count}")
    codes: Counter[grpc.StatusCode] = Counter()
    for _ in range(count // IN_FLIGHT):
        raws = [noise(chance) for _ in range(IN_FLIGHT)]
        calls = [send(served, method, raw) for raw in raws]
        for raw, call in zip(raws, calls, strict=True):
            code = code_of(call, method)
            codes[code] += 1
            assert code in ALLOWED or names_something(method, raw), (code, raw)
        # Another client, between all that.
        assert well.admit("r", tokens(*range(10))).handle
        assert well.free("r").known
    assert codes.total() == count
    assert grpc.StatusCode.INVALID_ARGUMENT in codes
    assert not {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN} & set(codes)
    served.assert_clean()


def send(served: Served, method: MethodDescriptor, raw: bytes) -> Any:
    """A call of the method with these bytes."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:
        return served.channel.stream_stream(path)(iter([raw]), timeout=60)
    if method.server_streaming:
        return served.channel.unary_stream(path)(raw, timeout=60)
    return served.channel.unary_unary(path).future(raw, timeout=60)


def code_of(call: Any, method: MethodDescriptor) -> grpc.StatusCode:
    """How it ended; a stream that goes on is ended."""
    try:
        if method.client_streaming:
            list(call)
        elif method.server_streaming:
            call.initial_metadata()
            if not call.done():
                next(call, None)
                call.cancel()
                return grpc.StatusCode.OK
        else:
            call.result()
        code: grpc.StatusCode = call.code()
    except grpc.RpcError as error:
        code = error.code()
    return code
