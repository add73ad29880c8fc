"""Events in batches, as messages of the event stream: how many go into one, and its bytes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvcore.events import BlockStored
from kvcore.feed import Entry, RemovedBlocks, StoredBlocks, events_of
from kvdepot.v1 import event_pb2
from kvserver import convert_event

BATCH_EVENTS_MAX = 256
BATCH_BYTES_MAX = 1 << 20


@dataclass(slots=True)
class Batch:
    """Consecutive events. Encoded when first wanted; then only the bytes are kept."""

    first_sequence: int
    num_events: int
    nbytes: int  # about
    timestamp_seconds: float
    _entries: Sequence[Entry | BlockStored] | None
    _encoded: bytes = b""

    def encoded(self, epoch: str) -> bytes:
        """The StreamEventsResponse."""
        if self._entries is not None:
            self._encoded = event_pb2.StreamEventsResponse(
                epoch=epoch,
                first_sequence=self.first_sequence,
                timestamp_seconds=self.timestamp_seconds,
                events=[convert_event.event(event) for event in events_of(self._entries)],
            ).SerializeToString()
            self._entries = None
        return self._encoded

    def encoded_from(self, sequence: int, epoch: str) -> bytes:
        """The same, without the events before ``sequence``."""
        encoded = self.encoded(epoch)
        if sequence <= self.first_sequence:
            return encoded
        response = event_pb2.StreamEventsResponse.FromString(encoded)
        del response.events[: sequence - self.first_sequence]
        response.first_sequence = sequence
        return response.SerializeToString()


def batches(entries: Iterable[Entry | BlockStored], first_sequence: int) -> Iterator[Batch]:
    """``entries`` in batches within the bounds, numbered from ``first_sequence`` on."""
    now = time.time()
    parts: list[Entry | BlockStored] = []
    count, nbytes = 0, 0
    for entry in entries:
        size, start, stop = _nbytes(entry), 0, num_events(entry)
        while start < stop:
            room = min(BATCH_EVENTS_MAX - count, (BATCH_BYTES_MAX - nbytes) // size)
            if room <= 0 and parts:
                yield Batch(first_sequence, count, nbytes, now, parts)
                first_sequence += count
                parts, count, nbytes = [], 0, 0
                continue
            taken = min(max(room, 1), stop - start)
            if isinstance(entry, StoredBlocks | RemovedBlocks) and taken < stop:
                parts.append(entry.part(start, start + taken))
            else:
                parts.append(entry)
            start += taken
            count += taken
            nbytes += taken * size
    if parts:
        yield Batch(first_sequence, count, nbytes, now, parts)


def num_events(entry: Entry | BlockStored) -> int:
    """Events that ``entry`` stands for."""
    return len(entry) if isinstance(entry, StoredBlocks | RemovedBlocks) else 1


def _nbytes(entry: Entry | BlockStored) -> int:
    """About what one event of ``entry`` takes, encoded."""
    if isinstance(entry, StoredBlocks):
        run = entry.run
        keys = max(map(_keys_nbytes, run.extra_keys or ()), default=0)
        return 104 + len(run.tokens) // len(run.hashes) + keys
    if isinstance(entry, BlockStored):
        return 104 + len(entry.token_ids) + sum(map(_keys_nbytes, entry.extra_keys or ()))
    return 72 if isinstance(entry, RemovedBlocks) else 32


def _keys_nbytes(keys: tuple[Any, ...] | None) -> int:
    """About what a block's extra keys take: there may be many, of 512 characters each."""
    nbytes = 0
    for key in keys or ():
        text = key[0] if isinstance(key, tuple) else key
        nbytes += 24 + len(text.encode() if isinstance(text, str) else text)
    return nbytes
