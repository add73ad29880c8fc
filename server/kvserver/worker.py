"""A worker attached under a session, for as long as its stream is open."""

from __future__ import annotations

import asyncio

from kvcore.session import Session


class Worker:
    """What its stream must be told, and when."""

    __slots__ = ("_news", "name", "session", "session_ended")

    def __init__(self, session: Session, name: str) -> None:
        self.session = session
        self.name = name
        self.session_ended = False
        self._news = asyncio.Event()

    def end_session(self) -> None:
        """The session is over; the stream says so at once."""
        self.session_ended = True
        self._news.set()

    def wake(self) -> None:
        """Have the stream look around."""
        self._news.set()

    async def wait(self, seconds: float) -> None:
        """Return after ``seconds``, or earlier when there is news."""
        try:
            await asyncio.wait_for(self._news.wait(), seconds)
        except (TimeoutError, asyncio.TimeoutError):
            return
        self._news.clear()
