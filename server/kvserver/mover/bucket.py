"""A limit on bytes a second."""

from __future__ import annotations

import threading
import time

_BURST_SECONDS = 0.05
# What goes at once takes no longer than this, so that progress is seen and a stop is heard.
_SLICE_SECONDS = 0.25


class Bucket:
    """Says how long to wait before so many bytes may go; 0 bytes a second: no limit."""

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        # When all that was asked for so far will have gone.
        self._free_at = 0.0

    def slice_of(self, num_bytes: int) -> int:
        """How many of ``num_bytes``, of which as many as possible should go at once, may."""
        if not self._rate:
            return num_bytes
        return min(num_bytes, max(1, int(self._rate * _SLICE_SECONDS)))

    def delay(self, num_bytes: int) -> float:
        """Seconds to wait before ``num_bytes`` may go; they are booked."""
        if not self._rate:
            return 0.0
        with self._lock:
            now = time.monotonic()
            begin = max(self._free_at, now - _BURST_SECONDS)
            self._free_at = begin + num_bytes / self._rate
            return max(0.0, begin - now)
