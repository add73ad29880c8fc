"""Steps in flight: scheduled, while their bytes are not all written yet."""

from __future__ import annotations

from collections import deque

from kvclient.replay.worker import StepWork, Worker
from kvclient.values import StepMark


class Pipeline:
    """Hands steps to the worker in order, some of them late (worker None: no bytes)."""

    def __init__(self, worker: Worker | None, steps_in_flight: int) -> None:
        self.mark = StepMark(0, 0)
        """What the calls of the present step say of themselves."""
        self.work = StepWork()
        """What the present step has for the worker."""
        self._worker = worker
        self._in_flight_max = steps_in_flight
        self._queue: deque[StepWork] = deque()

    def begin_step(self, *, drained: bool) -> None:
        """Enter the next step; ``drained``: once all before it are written."""
        self._complete(0 if drained else self._in_flight_max - 1)
        number = self.mark.step + 1
        completed = self._queue[0].step - 1 if self._queue else number - 1
        self.mark = StepMark(number, completed)
        self.work = StepWork(number)

    def end_step(self) -> None:
        """The step is scheduled."""
        self._queue.append(self.work)

    def drain(self) -> None:
        """Have all steps written."""
        self._complete(0)

    def _complete(self, in_flight: int) -> None:
        while len(self._queue) > in_flight:
            if self._worker is not None:
                self._worker.execute(self._queue[0])
            self._queue.popleft()
