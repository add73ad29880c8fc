"""What the node and its processes say to each other: CBOR maps, each behind its length."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
from typing import Any

import cbor2

Message = dict[str, Any]

_LENGTH = struct.Struct("<I")
# An import of 65,536 blocks takes 3 MB with its hashes, and as much for what is known of them.
MESSAGE_BYTES_MAX = 256 << 20


def pack(message: Message) -> bytes:
    """As it travels."""
    body: bytes = cbor2.dumps(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {len(body)} bytes is more than {MESSAGE_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """The next message; None when the other side is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        message: Message = cbor2.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return message


class Channel:
    """A process's own end, for use from any thread.

    The process ends with it: when the node is gone, nobody waits for what it does.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._sending = threading.Lock()

    def receive(self) -> Message:
        """The next message. Ends the process when there is none any more."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        message: Message = cbor2.loads(self._read(length))
        return message

    def send(self, **message: Any) -> None:
        """Send a message. Ends the process when nobody is there."""
        packed = pack(message)
        with self._sending:
            try:
                self._socket.sendall(packed)
            except OSError:
                os._exit(0)

    def _read(self, length: int) -> bytes:
        buffer = bytearray(length)
        view = memoryview(buffer)
        while view:
            try:
                count = self._socket.recv_into(view)
            except OSError:
                count = 0
            if not count:
                os._exit(0)
            view = view[count:]
        return bytes(buffer)
