"""How both clients reach a server: channel options, stubs, and when to try again."""

from __future__ import annotations

import json
from typing import Any

from kvclient.calls import client_closed
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


class Stubs:
    """The services of one channel, synchronous or asyncio, by name."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.closed = False
        self._services: dict[str, Any] = {
            "KVCacheService": cache_pb2_grpc.KVCacheServiceStub(channel),
            "KVEventService": event_pb2_grpc.KVEventServiceStub(channel),
            "KVTransferService": transfer_pb2_grpc.KVTransferServiceStub(channel),
            "KVAdminService": admin_pb2_grpc.KVAdminServiceStub(channel),
        }

    def method(self, service: str, method: str) -> Any:
        """What to call. FailedPrecondition when the client is closed."""
        if self.closed:
            raise client_closed()
        return getattr(self._services[service], method)
