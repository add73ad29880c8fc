"""A clock that stands still until it is told to go on."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(order=True)
class _Timer:
    at: float
    number: int
    callback: Callable[[], object] | None = field(compare=False)

    def cancel(self) -> None:
        """Call nobody."""
        self.callback = None


class FakeClock:
    """Seconds since it was made, and timers that go off while it is moved on."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[_Timer] = []
        self._made = 0

    def time(self) -> float:
        """Now."""
        return self.now

    def call_later(self, delay: float, callback: Callable[[], object], /) -> _Timer:
        """Have ``callback`` called when the clock has gone on so far."""
        self._made += 1
        timer = _Timer(self.now + delay, self._made, callback)
        heapq.heappush(self._timers, timer)
        return timer

    def advance(self, seconds: float) -> None:
        """Go on, from timer to timer."""
        end = self.now + seconds
        while self._timers and self._timers[0].at <= end:
            timer = heapq.heappop(self._timers)
            self.now = max(self.now, timer.at)
            if timer.callback is not None:
                timer.callback()
        self.now = end
