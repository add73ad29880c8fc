"""An asyncio loop whose clock jumps to the next thing to do: hours pass at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar
from unittest import mock

Result = TypeVar("Result")

TICK_SECONDS = 1e-9
"""Each turn of the loop takes a moment, or who waits for less than a float can tell waits on."""


class _Jump(selectors.SelectSelector):
    """Instead of waiting for input, of which there is none, moves the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever happen")
        self.now += max(timeout, TICK_SECONDS)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Timers fire in the order of their times, without waiting; there is no input or output."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jump.now


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine on a virtual loop of its own; nothing of it is left behind."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    with mock.patch("time.monotonic", loop.time):
        try:
            return loop.run_until_complete(work)
        finally:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            asyncio.set_event_loop(None)
            loop.close()
