"""A worker that says under which session it writes to the pool, for as long as it does."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import grpc

from kvclient import calls
from kvclient.errors import (
    CacheLost,
    FailedPrecondition,
    KVDepotError,
    Unavailable,
    from_rpc_error,
    lost_by,
    no_answer,
    stream_ended,
)

if TYPE_CHECKING:
    from kvclient.client import Client

_JOIN_SECONDS = 2.0
_HEARTBEATS = 3
"""The server may be silent for so many heartbeats."""


class AttachmentState:
    """What a worker has heard of the server, and whether it may still write."""

    def __init__(self) -> None:
        self._error: KVDepotError | None = None
        self._heard_at = 0.0
        self._silence_s_max = 0.0

    def heard(self, message: Any, now: float) -> None:
        """A message of the stream."""
        self._heard_at = now
        self._silence_s_max = _HEARTBEATS * message.heartbeat_seconds
        if message.session_ended and self._error is None:
            self._error = CacheLost(
                "the session is over: write no more under it", reason="SESSION_ENDED"
            )

    def ended(self, error: KVDepotError) -> None:
        """The stream is over."""
        if self._error is None:
            self._error = lost_by(error) or error

    def detached(self) -> None:
        """By the worker itself."""
        self.ended(FailedPrecondition("the worker is detached", reason="DETACHED"))

    def error(self, now: float) -> KVDepotError | None:
        """Why not to write any more; None while it is right to."""
        error = self._error
        if isinstance(error, CacheLost):
            return error.again()
        if error is not None:
            return type(error)(error.message, reason=error.reason, retryable=error.retryable)
        if now - self._heard_at > self._silence_s_max:
            return Unavailable(
                f"the server has been silent for {now - self._heard_at:.1f} s",
                reason="SERVER_SILENT",
                retryable=True,
            )
        return None


class Attachment:
    """One worker, attached from the moment this is made until ``close``.

    It stays attached when nobody refers to it, and ends with the process at the latest. The
    server says when the session is over: ask ``check`` before every write, and close.
    """

    def __init__(self, client: Client, session_id: str, epoch: str, name: str) -> None:
        self._client = client  # its channel carries the stream
        self._state = AttachmentState()
        self._answered = threading.Event()
        attach = client._stubs.method("KVTransferService", "AttachWorker")
        self._call = attach(calls.attach_worker(session_id, epoch, name))
        self._thread = threading.Thread(target=self._read, name="kvdepot-attachment", daemon=True)
        self._thread.start()
        if not self._answered.wait(client.timeout_s):
            self.close()
            raise no_answer(client.timeout_s)
        try:
            self.check()
        except KVDepotError:
            self.close()
            raise

    def check(self) -> None:
        """Raises when this worker must not write any more.

        CacheLost when the session is over; Unavailable when the server is gone or silent.
        """
        error = self._state.error(time.monotonic())
        if error is not None:
            raise error

    def close(self) -> None:
        """This worker writes no more; it is detached."""
        self._state.detached()
        self._call.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _read(self) -> None:
        try:
            for message in self._call:
                self._state.heard(message, time.monotonic())
                self._answered.set()
            self._state.ended(stream_ended())
        except grpc.RpcError as error:
            self._state.ended(from_rpc_error(error))
        finally:
            self._answered.set()
