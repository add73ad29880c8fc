"""Renews the leases of an asyncio client's sessions, in one task beside whatever they do."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from typing import TYPE_CHECKING

from kvclient import calls
from kvclient.errors import KVDepotError

if TYPE_CHECKING:
    from kvclient.aio.session import Session


class LeaseKeeper:
    """A task, there while sessions are open; see ``kvclient.keeper.LeaseKeeper``."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._sessions: dict[int, weakref.ref[Session]] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def add(self, session: Session) -> None:
        """Renew it from now on."""
        if self._closed:
            return
        self._sessions[id(session)] = weakref.ref(session)
        self._changed.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="kvdepot-leases")

    def remove(self, session: Session) -> None:
        """Renew it no more."""
        self._sessions.pop(id(session), None)
        self._changed.set()

    async def close(self) -> None:
        """Renew nothing any more."""
        self._closed = True
        self._sessions.clear()
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        try:
            while (due_at := self._next_due()) is not None:
                wait_s = due_at - time.monotonic()
                if wait_s > 0:
                    self._changed.clear()
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), wait_s)
                    continue
                await self._renew_due()
        finally:
            self._task = None

    # The sessions are named in methods of their own, so that none is kept while waiting.

    def _next_due(self) -> float | None:
        """When the next renewal is due; None when no session is left."""
        for key, reference in list(self._sessions.items()):
            if reference() is None:
                del self._sessions[key]
        sessions = [session for session in (ref() for ref in self._sessions.values()) if session]
        return min((session._lease.due_at for session in sessions), default=None)

    async def _renew_due(self) -> None:
        """Renew all that are due, at the same time, so that none waits for another."""
        now = time.monotonic()
        sessions = [ref() for ref in self._sessions.values()]
        await asyncio.gather(
            *[
                _renew(session)
                for session in sessions
                if session is not None and session._lease.due_at <= now
            ]
        )


async def _renew(session: Session) -> None:
    lease = session._lease
    asked_at = time.monotonic()
    try:
        await session.client._send(
            calls.keep_alive(session.session_id, session.epoch), lease.attempt_s
        )
    except KVDepotError as error:
        lost = lease.failed(error, time.monotonic())
        if lost is not None:
            session._lose(lost)
    else:
        lease.renewed(asked_at)
