"""A wire that can lose replies, and be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 20.0


class Wire:
    """A TCP relay to a server, which can lose replies and break connections.

    Takes at most ``connections_max``, and is gone for others then.
    """

    def __init__(self, target: str, connections_max: int = 1 << 30) -> None:
        host, port = target.rsplit(":", 1)
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.losing = False
        self._connections_max = connections_max
        self._connections: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def cut(self) -> None:
        """Breaks every connection; new ones work."""
        self.losing = False
        for near, far in self._connections:
            _shut(near, far)

    def close(self) -> None:
        """Ends it, and every thread and socket of it."""
        _shut(self._listener)
        self._threads[0].join(TIMEOUT_S)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        for connection in self._connections:
            for end in connection:
                end.close()

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while len(self._connections) < self._connections_max:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._server)
            self._connections.append((near, far))
            self._start(self._relay, near, far, False)
            self._start(self._relay, far, near, True)
        self._listener.close()

    def _relay(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not (is_reply and self.losing):
                    sink.sendall(data)
        _shut(source, sink)


def _shut(*sockets: socket.socket) -> None:
    for end in sockets:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
