"""One follower of the event stream, and what waits for it to be read."""

from __future__ import annotations

import asyncio
from collections import deque

from kvcore.errors import ResourceExhausted


class Subscriber:
    """One stream's bounded queue. ``next`` waits for the batch after the last."""

    def __init__(self, batches_max: int, nbytes_max: int) -> None:
        self.idle = False
        self._batches_max = batches_max
        self._nbytes_max = nbytes_max
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._end: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, message: bytes) -> bool:
        """Queue one message; False, and the end of the stream, when it does not fit."""
        if (
            len(self._queue) >= self._batches_max
            or self._queued_bytes + len(message) > self._nbytes_max
        ):
            self._queue.clear()
            self.end(
                ResourceExhausted(
                    f"the subscriber lags by more than {self._batches_max} batches "
                    f"or {self._nbytes_max} bytes; resume from the last sequence seen",
                    reason="SUBSCRIBER_TOO_SLOW",
                    retryable=True,
                )
            )
            return False
        self._queue.append(message)
        self._queued_bytes += len(message)
        self._wake()
        return True

    def end(self, error: Exception) -> None:
        """End the stream with ``error`` once the queue is read."""
        self._end = error
        self._wake()

    def _wake(self) -> None:
        self.idle = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def num_queued(self) -> int:
        """Messages not read yet."""
        return len(self._queue)

    async def next(self) -> bytes:
        """The next message. Raises the error that ends the stream."""
        while not self._queue:
            if self._end is not None:
                raise self._end
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._queue.popleft()
        self._queued_bytes -= len(message)
        return message
