"""The truth feed: events numbered, kept for resuming, and fanned out to subscribers.

Nothing a subscriber does slows an allocation: publishing appends to a list; batches are
made and encoded once for all subscribers, at a pace that bounds the fan-out; and a
subscriber that falls behind its bounded queue is dropped, never waited for. What nobody
reads never becomes events: the history keeps the feed's entries.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcore.errors import DataLoss, InvalidArgument, OutOfRange, ResourceExhausted, Unavailable
from kvcore.events import AllBlocksCleared, BlockStored
from kvcore.feed import Entry, RemovedBlocks, StoredBlocks, events_of
from kvdepot.v1 import event_pb2
from kvserver import convert

BATCH_EVENTS_MAX = 256
BATCH_BYTES_MAX = 1 << 20

_FLUSH_SECONDS_MIN = 0.002
_FLUSH_SECONDS_MAX = 0.2
_FAN_OUT_PER_SECOND = 10_000  # messages to all subscribers together

_KINDS = {StoredBlocks: "stored", RemovedBlocks: "removed", AllBlocksCleared: "cleared"}


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
                events=[convert.event(event) for event in events_of(self._entries)],
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


class Publisher:
    """Numbers events from 0 and serves them to subscribers. Lives on one event loop."""

    def __init__(
        self,
        epoch: str,
        *,
        history_events: int,
        history_bytes: int,
        queue_batches: int,
        queue_bytes: int,
        subscribers_max: int,
        heartbeat_seconds: float,
    ) -> None:
        self.epoch = epoch
        self.next_sequence = 0
        self.published: Counter[str] = Counter()
        self.cut_off = 0
        self._history_events_max = history_events
        self._history_bytes_max = history_bytes
        self._queue_batches = queue_batches
        self._queue_bytes = queue_bytes
        self._subscribers_max = subscribers_max
        self._heartbeat_seconds = heartbeat_seconds
        self._pending: list[Entry] = []
        self._pending_events = 0
        self._history: deque[Batch] = deque()
        self._history_events = 0
        self._history_bytes = 0
        self._subscribers: set[Subscriber] = set()
        self._flush_timer: asyncio.TimerHandle | None = None
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def num_subscribers(self) -> int:
        """Streams being served; those cut off do not count."""
        return len(self._subscribers)

    def publish(self, entries: Iterable[Entry]) -> None:
        """Number the events of ``entries``, in order, and have them sent soon."""
        for entry in entries:
            num_events = _num_events(entry)
            self._pending.append(entry)
            self._pending_events += num_events
            self.published[_KINDS[type(entry)]] += num_events
            self.next_sequence += num_events
        if self._flush_timer is None and self._pending:
            pace = len(self._subscribers) / _FAN_OUT_PER_SECOND
            delay = min(max(pace, _FLUSH_SECONDS_MIN), _FLUSH_SECONDS_MAX)
            if not self._subscribers:  # nobody waits, and who comes is given what is pending
                delay = _FLUSH_SECONDS_MAX
            self._flush_timer = asyncio.get_running_loop().call_later(delay, self.flush)

    def flush(self) -> None:
        """Batch and queue what is pending."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if not self._pending:
            return
        entries, self._pending = self._pending, []
        first = self.next_sequence - self._pending_events
        self._pending_events = 0
        for batch in _batches(entries, first):
            self._keep(batch)
            if self._subscribers:
                message = batch.encoded(self.epoch)
                for subscriber in list(self._subscribers):
                    if not subscriber.put(message):
                        self._subscribers.discard(subscriber)
                        self.cut_off += 1

    def subscribe(
        self, *, epoch: str = "", from_sequence: int | None = None, fresh: bool = False
    ) -> tuple[Subscriber, Iterator[bytes]]:
        """A new subscriber, and what it must be sent before its queue.

        ``from_sequence`` None: from now on. ``fresh``: the subscriber takes a snapshot
        first, so a cursor makes no sense. Raises DataLoss, OutOfRange, InvalidArgument,
        ResourceExhausted or Unavailable.
        """
        if self._closed:
            raise Unavailable("the server is stopping", reason="DRAINING", retryable=True)
        if fresh and from_sequence is not None:
            raise InvalidArgument("snapshot excludes from_sequence", field="from_sequence")
        if epoch and epoch != self.epoch:
            raise DataLoss(
                "the cursor is of another epoch; begin with a snapshot",
                reason="EPOCH_CHANGED",
                field="epoch",
            )
        self.flush()
        oldest = self._history[0].first_sequence if self._history else self.next_sequence
        if from_sequence is not None and not oldest <= from_sequence <= self.next_sequence:
            raise OutOfRange(
                f"sequence {from_sequence} is not kept; "
                f"{oldest} to {self.next_sequence} can be resumed from",
                reason="CURSOR_EXPIRED" if from_sequence < oldest else "CURSOR_IN_FUTURE",
                field="from_sequence",
            )
        if len(self._subscribers) >= self._subscribers_max:
            raise ResourceExhausted(
                f"there are {self._subscribers_max} subscribers already",
                reason="TOO_MANY_SUBSCRIBERS",
                retryable=True,
            )
        subscriber = Subscriber(self._queue_batches, self._queue_bytes)
        self._subscribers.add(subscriber)
        if self._heartbeat_timer is None:
            self._arm_heartbeat()
        start = self.next_sequence if from_sequence is None else from_sequence
        backlog = [
            batch for batch in self._history if batch.first_sequence + batch.num_events > start
        ]
        return subscriber, (batch.encoded_from(start, self.epoch) for batch in backlog)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Forget ``subscriber``, if it is not forgotten yet."""
        self._subscribers.discard(subscriber)

    def close(self) -> None:
        """Send what is pending and end every stream."""
        self.flush()
        self._closed = True
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
            self._heartbeat_timer = None
        for subscriber in self._subscribers:
            subscriber.end(Unavailable("the server is stopping", reason="DRAINING", retryable=True))
        self._subscribers.clear()

    def snapshot_messages(self, stored: Sequence[BlockStored]) -> Iterator[bytes]:
        """The index as messages; taken and numbered at this moment, encoded as read."""
        sequence, now = self.next_sequence, time.time()
        batches = list(_batches(stored, sequence)) or [Batch(sequence, 0, 0, now, ())]
        return self._snapshot_messages(batches, sequence)

    def _snapshot_messages(self, batches: list[Batch], sequence: int) -> Iterator[bytes]:
        for position, batch in enumerate(batches):
            whole = replace(batch, first_sequence=sequence).encoded(self.epoch)
            marks = event_pb2.StreamEventsResponse(
                snapshot=True, snapshot_end=position == len(batches) - 1
            )
            # Messages concatenated are messages merged.
            yield whole + marks.SerializeToString()

    def _keep(self, batch: Batch) -> None:
        self._history.append(batch)
        self._history_events += batch.num_events
        self._history_bytes += batch.nbytes
        while self._history and (
            self._history_events > self._history_events_max
            or self._history_bytes > self._history_bytes_max
        ):
            oldest = self._history.popleft()
            self._history_events -= oldest.num_events
            self._history_bytes -= oldest.nbytes

    def _arm_heartbeat(self) -> None:
        loop = asyncio.get_running_loop()
        self._heartbeat_timer = loop.call_later(self._heartbeat_seconds, self._beat)

    def _beat(self) -> None:
        """Tell subscribers that were sent nothing since the last beat that all is well."""
        self.flush()
        if not self._subscribers:
            self._heartbeat_timer = None
            return
        message = event_pb2.StreamEventsResponse(
            epoch=self.epoch, first_sequence=self.next_sequence, timestamp_seconds=time.time()
        ).SerializeToString()
        for subscriber in self._subscribers:
            if subscriber.idle and not subscriber.num_queued:
                subscriber.put(message)
            subscriber.idle = True
        self._arm_heartbeat()


def _num_events(entry: Entry | BlockStored) -> int:
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


def _batches(entries: Iterable[Entry | BlockStored], first_sequence: int) -> Iterator[Batch]:
    now = time.time()
    parts: list[Entry | BlockStored] = []
    num_events, nbytes = 0, 0
    for entry in entries:
        size, start, stop = _nbytes(entry), 0, _num_events(entry)
        while start < stop:
            room = min(BATCH_EVENTS_MAX - num_events, (BATCH_BYTES_MAX - nbytes) // size)
            if room <= 0 and parts:
                yield Batch(first_sequence, num_events, nbytes, now, parts)
                first_sequence += num_events
                parts, num_events, nbytes = [], 0, 0
                continue
            taken = min(max(room, 1), stop - start)
            if isinstance(entry, StoredBlocks | RemovedBlocks) and taken < stop:
                parts.append(entry.part(start, start + taken))
            else:
                parts.append(entry)
            start += taken
            num_events += taken
            nbytes += taken * size
    if parts:
        yield Batch(first_sequence, num_events, nbytes, now, parts)
