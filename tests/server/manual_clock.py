"""Time that passes when a test says so."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Timer:
    """One pending callback."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """It is not called any more."""
        self.callback = None


class ManualClock:
    """What Deadlines asks of an event loop."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.num_timers_set = 0
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = count()

    def time(self) -> float:
        """Seconds since some moment."""
        return self.now

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        """As an event loop's."""
        timer = Timer(callback)
        self.num_timers_set += 1
        heapq.heappush(self._timers, (self.now + delay, next(self._numbers), timer))
        return timer

    @property
    def num_timers(self) -> int:
        """Timers that wait."""
        return sum(timer.callback is not None for _, _, timer in self._timers)

    def advance(self, seconds: float) -> None:
        """Let time pass, and call what becomes due, each at its moment."""
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            at, _, timer = heapq.heappop(self._timers)
            self.now = max(self.now, at)
            if timer.callback is not None:
                timer.callback()
        self.now = end

    def stall(self, seconds: float) -> None:
        """Time passes, and nothing is called: the process stood still."""
        self.now += seconds
