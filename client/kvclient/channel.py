"""How both clients reach a server: channel options, stubs, and when to try again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kvclient.calls import client_closed
from kvclient.errors import Unavailable
from kvdepot.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    event_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)

TIMEOUT_S = 10.0
"""Of a call. Those of a session use half of it, and the rest for being sent again."""
MAX_MESSAGE_BYTES = 64 << 20
PULL_BLOCKS = "/kvdepot.v1.KVTransferService/PullBlocks"
STEP_STREAM = "/kvdepot.v1.KVCacheService/StepStream"
BACKOFFS_S = (0.05, 0.2, 0.8)
"""Waits between attempts to open a stream; unary calls have the policy below."""

_RETRY_POLICY = {
    "maxAttempts": len(BACKOFFS_S) + 1,
    "initialBackoff": "0.05s",
    "maxBackoff": "1s",
    "backoffMultiplier": 4,
    # A server that stops cancels what it has not begun.
    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
}
# Streams are not in it. A Step must keep its place in the stream, so there is an own loop
# for those. And with grpc 1.85 and streams in it, killing and restarting the server left a
# process, in most tries, with streams that neither answered nor failed.
_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                # Safe to send again: they read, say what shall be, or carry an op_seq. An
                # OpenSession that was heard twice leaves a session that nobody knows, with
                # nothing in it; its lease ends it.
                "name": [
                    {"service": service.full_name, "method": method.name}
                    for file in (admin_pb2, cache_pb2, transfer_pb2)
                    for service in file.DESCRIPTOR.services_by_name.values()
                    for method in service.methods
                    if not method.server_streaming
                ],
                "retryPolicy": _RETRY_POLICY,
            },
        ]
    }
)


def channel_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    """Options of a channel."""
    return [
        ("grpc.service_config", _SERVICE_CONFIG),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # What is longer than this is not sent again by the policy.
        ("grpc.per_rpc_retry_buffer_size", max_message_bytes),
        # A server that restarts is found again soon.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        # A server that vanished is noticed within half a minute, also when idle.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def data_target(target: str, data_address: str) -> str:
    """Where the data address of the server at ``target`` is; ":PORT": on the same host."""
    if not data_address.startswith(":"):
        return data_address
    host = "127.0.0.1" if target.startswith("unix:") else target.rpartition(":")[0]
    return host + data_address


class Stubs:
    """The services of one server, synchronous or asyncio, by name.

    ``connect`` makes a channel to an address: the server's, and where its bytes are.
    """

    def __init__(self, target: str, connect: Callable[[str], Any]) -> None:
        self.channel = channel = connect(target)
        self.closed = False
        self._target = target
        self._connect = connect
        self._data_channels: dict[str, Any] = {}
        self._services: dict[str, Any] = {
            "KVCacheService": cache_pb2_grpc.KVCacheServiceStub(channel),
            "KVEventService": event_pb2_grpc.KVEventServiceStub(channel),
            "KVTransferService": transfer_pb2_grpc.KVTransferServiceStub(channel),
            "KVAdminService": admin_pb2_grpc.KVAdminServiceStub(channel),
        }

    def open_channel(self) -> Any:
        """The server's. FailedPrecondition when the client is closed."""
        if self.closed:
            raise client_closed()
        return self.channel

    def method(self, service: str, method: str) -> Any:
        """What to call. FailedPrecondition when the client is closed."""
        if self.closed:
            raise client_closed()
        return getattr(self._services[service], method)

    def pull(self, data_address: str) -> Any:
        """PullBlocks at a data address, raw bytes to raw bytes. Unavailable without one."""
        if self.closed:
            raise client_closed()
        if not data_address:
            raise Unavailable(
                "the server does not say where its bytes are",
                reason="NO_DATA_ADDRESS",
                retryable=True,
            )
        channel = self._data_channels.get(data_address)
        if channel is None:
            channel = self._connect(data_target(self._target, data_address))
            self._data_channels[data_address] = channel
        return channel.unary_stream(PULL_BLOCKS)

    def channels(self) -> list[Any]:
        """All that are to be closed."""
        return [self.channel, *self._data_channels.values()]
