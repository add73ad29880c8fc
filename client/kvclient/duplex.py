"""One bidirectional gRPC call, worked by the threads that use it.

A stub's stream has two threads of its own, one that takes messages from an iterator and one
that hands on what comes: a message and its answer change threads three times at the client.
Here who sends also waits at the call's completion queue, as in gRPC's blocking calls of one
message, and with what they are built on: cygrpc's segregated calls, which are not public.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_BEGUN, _ENDED, _CLOSED = "begun", "ended", "closed"
_SENT, _RECEIVED, _WOKEN = "sent", "received", "woken"


class CallEnded(grpc.RpcError):
    """How a call ended that did not end well, as other calls tell it."""

    def __init__(self, status: Any) -> None:
        self._status = status

    def code(self) -> grpc.StatusCode:
        return _CODES.get(self._status.code(), grpc.StatusCode.UNKNOWN)

    def details(self) -> str:
        details: str = self._status.details() or ""
        return details

    def trailing_metadata(self) -> Any:
        return self._status.trailing_metadata()


class Duplex:
    """One call, of at most ``timeout_s``. Of those that wait one at a time; the rest whenever.

    ``is_over`` when all is told that was begun: only then does gRPC let go of it.
    """

    def __init__(
        self, channel: grpc.Channel, method: str, *, timeout_s: float | None = None
    ) -> None:
        self.received: deque[bytes] = deque()
        self.is_over = False
        # None also if the server ended it well.
        self.error: grpc.RpcError | None = None
        self._is_sending = False
        self._is_receiving = False
        # What was begun and is not told. ``wake`` counts here, too.
        self._num_due = 2
        self._lock = threading.Lock()
        begin = (
            cygrpc.SendInitialMetadataOperation((), 0),
            cygrpc.ReceiveInitialMetadataOperation(0),
        )
        end = (cygrpc.ReceiveStatusOnClientOperation(0),)
        inner: Any = channel
        self._call = inner._channel.segregated_call(
            cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS,
            method.encode(),
            None,
            None if timeout_s is None else time.time() + timeout_s,
            (),
            None,
            ((begin, _BEGUN), (end, _ENDED)),
            None,
        )

    def send(self, message: bytes) -> None:
        """Sends a message; waits for the one before it, as long as the server does not take it."""
        while self._is_sending and not self.is_over:
            self.wait()
        self._is_sending = self._begin((cygrpc.SendMessageOperation(message, 0),), _SENT)

    def end(self) -> None:
        """Says that no message follows."""
        self._begin((cygrpc.SendCloseFromClientOperation(0),), _CLOSED)

    def receive(self) -> bytes | None:
        """The next message, waited for; None when the server has ended the call well.

        Raises ``error``.
        """
        while not self.received and not self.is_over:
            self.wait()
        if self.received:
            return self.received.popleft()
        if self.error is not None:
            raise self.error
        return None

    def wait(self) -> None:
        """Waits until anything happens: a message came, one was sent, the end, a ``wake``."""
        if self.is_over:
            return
        if not self._is_receiving:
            self._is_receiving = self._begin((cygrpc.ReceiveMessageOperation(0),), _RECEIVED)
        try:
            event = self._call.next_event()
        except BaseException:
            # By a signal. gRPC has let go of the call.
            self.is_over = True
            raise
        if event.tag is _RECEIVED:
            self._is_receiving = False
            message = event.batch_operations[0].message()
            if message is not None:
                self.received.append(message)
        elif event.tag is _SENT:
            self._is_sending = False
        elif event.tag is _ENDED and event.batch_operations[0].code():
            self.error = CallEnded(event.batch_operations[0])
        with self._lock:
            self._num_due -= 1
            self.is_over = self._num_due == 0

    def wake(self) -> None:
        """Ends a ``wait`` of another thread, or the next: a batch of nothing is done at once."""
        self._begin((), _WOKEN)

    def cancel(self) -> None:
        """Ends the call, which ``wait`` tells."""
        self._call.cancel(cygrpc.StatusCode.cancelled, "cancelled by the client")

    def hear_out(self) -> None:
        """After ``cancel``: until all is told."""
        while not self.is_over:
            self.wait()

    def _begin(self, operations: tuple[Any, ...], tag: str) -> bool:
        """False, and nothing is begun, once the call is over."""
        with self._lock:
            is_begun: bool = self._call.operate(operations, tag)
            self._num_due += is_begun
        return is_begun
