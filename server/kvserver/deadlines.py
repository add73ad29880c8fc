"""Deadlines of many things on one timer: leases, quarantines, resets that wait."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

logger = logging.getLogger(__name__)

# A timer this late says that the whole process stood still.
_STALL_SECONDS = 0.5
_HEAP_SLACK = 64


class Clock(Protocol):
    """What is needed of an event loop; tests bring one of their own."""

    def time(self) -> float:
        """Seconds, since some moment."""

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Any:
        """Calls ``callback`` after ``delay`` seconds; what it answers has ``cancel``."""


@dataclass(slots=True)
class _Entry:
    deadline: float
    seconds: float
    passed: Callable[[], None]
    number: int


class Deadlines:
    """Calls back when a deadline passes. ``renew`` costs no more than a look-up.

    A renewed entry stays where it is in the heap, and is put back when its old deadline
    comes up; so there is one timer, and it fires once per entry and period at most.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._given_clock = clock
        self._entries: dict[Hashable, _Entry] = {}
        # (deadline when pushed, number, key); a number is pushed once at a time.
        self._heap: list[tuple[float, int, Hashable]] = []
        self._last_number = 0
        self._timer: Any = None
        self._fires_at = 0.0
        self._excused = False

    @property
    def _clock(self) -> Clock:
        return asyncio.get_running_loop() if self._given_clock is None else self._given_clock

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def set(self, key: Hashable, seconds: float, passed: Callable[[], None]) -> None:
        """Call ``passed`` once, ``seconds`` from now, unless renewed or dropped before."""
        self._last_number += 1
        deadline = self._clock.time() + seconds
        self._entries[key] = _Entry(deadline, seconds, passed, self._last_number)
        heapq.heappush(self._heap, (deadline, self._last_number, key))
        if len(self._heap) > 2 * len(self._entries) + _HEAP_SLACK:
            self._heap = [
                (entry.deadline, entry.number, key) for key, entry in self._entries.items()
            ]
            heapq.heapify(self._heap)
        self._arm()

    def renew(self, key: Hashable) -> None:
        """Begin the entry's seconds anew."""
        entry = self._entries[key]
        entry.deadline = self._clock.time() + entry.seconds

    def drop(self, key: Hashable) -> bool:
        """Forget the entry; False if there is none."""
        return self._entries.pop(key, None) is not None

    def seconds(self, key: Hashable) -> float:
        """The entry's whole time."""
        return self._entries[key].seconds

    def remaining_seconds(self, key: Hashable) -> float:
        """The entry's time from now, 0 if it is up."""
        return max(0.0, self._entries[key].deadline - self._clock.time())

    def close(self) -> None:
        """Forget all."""
        self._entries.clear()
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at: float | None = None) -> None:
        """Have the timer fire for the earliest entry, or at ``at``."""
        if at is None:
            if not self._heap or (self._excused and self._timer is not None):
                return
            at = self._heap[0][0]
        if self._timer is not None:
            if self._fires_at <= at:
                return
            self._timer.cancel()
        clock = self._clock
        self._fires_at = at
        self._timer = clock.call_later(max(0.0, at - clock.time()), self._fire)

    def _fire(self) -> None:
        self._timer = None
        now = self._clock.time()
        if now - self._fires_at > _STALL_SECONDS and not self._excused:
            # Renewals sent meanwhile wait in the sockets: they are read before anything ends.
            self._excused = True
            self._arm(now + _STALL_SECONDS)
            return
        self._excused = False
        heap, entries = self._heap, self._entries
        passed = []
        while heap and heap[0][0] <= now:
            _, number, key = heapq.heappop(heap)
            entry = entries.get(key)
            if entry is None or entry.number != number:
                continue
            if entry.deadline > now:
                heapq.heappush(heap, (entry.deadline, number, key))
            else:
                del entries[key]
                passed.append(entry.passed)
        self._arm()
        for callback in passed:
            try:
                callback()
            except Exception:
                # The others' time is up all the same.
                logger.exception("what follows a deadline failed")
