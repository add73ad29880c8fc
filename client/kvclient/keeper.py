"""Renews the leases of a client's sessions, in one thread beside whatever they do."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import grpc

from kvclient import calls
from kvclient.errors import KVDepotError, from_rpc_error

if TYPE_CHECKING:
    from kvclient.session import Session

_JOIN_SECONDS = 2.0


class LeaseKeeper:
    """A daemon thread, there while sessions are open.

    It knows sessions weakly: one that nobody refers to any more is not renewed, so the
    server ends it, and takes back what it holds, when its lease runs out.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sessions: dict[int, weakref.ref[Session]] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, session: Session) -> None:
        """Renew it from now on."""
        with self._changed:
            if self._closed:
                return
            self._sessions[id(session)] = weakref.ref(session)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kvdepot-leases", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def remove(self, session: Session) -> None:
        """Renew it no more."""
        with self._changed:
            self._sessions.pop(id(session), None)
            self._changed.notify()

    def close(self) -> None:
        """Renew nothing any more."""
        with self._changed:
            self._closed = True
            self._sessions.clear()
            self._changed.notify()

    def join(self) -> None:
        """Wait for the thread's end, after ``close``."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                due_at = self._next_due()
                if due_at is None:
                    self._thread = None
                    return
                wait_s = due_at - time.monotonic()
                if wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
            self._renew()

    # The sessions are named in methods of their own, so that none is kept while waiting.

    def _next_due(self) -> float | None:
        """When the next renewal is due; None when no session is left."""
        for key, reference in list(self._sessions.items()):
            if reference() is None:
                del self._sessions[key]
        sessions = [session for session in (ref() for ref in self._sessions.values()) if session]
        return min((session._lease.due_at for session in sessions), default=None)

    def _renew(self) -> None:
        """Renew all that are due, at the same time, so that none waits for another."""
        with self._changed:
            sessions = [ref() for ref in self._sessions.values()]
        now = time.monotonic()
        asked = [
            (session, _Renewal(session))
            for session in sessions
            if session is not None and session._lease.due_at <= now
        ]
        for session, renewal in asked:
            try:
                renewal.wait()
            except KVDepotError as error:
                lost = session._lease.failed(error, time.monotonic())
                if lost is not None:
                    session._lose(lost)
            else:
                session._lease.renewed(renewal.asked_at)


class _Renewal:
    """A KeepAlive on its way."""

    def __init__(self, session: Session) -> None:
        call = calls.keep_alive(session.session_id, session.epoch)
        self.asked_at = time.monotonic()
        self._future: Any = None
        self._error: KVDepotError | None = None
        try:
            method = session.client._stubs.method(call.service, call.method)
            self._future = method.future(call.request, timeout=session._lease.attempt_s)
        except KVDepotError as error:
            self._error = error
        except ValueError:  # the channel was closed meanwhile
            self._error = calls.client_closed()

    def wait(self) -> None:
        """Until it is answered, or its time is over. Raises what it failed with."""
        if self._error is not None:
            raise self._error
        try:
            self._future.result()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
