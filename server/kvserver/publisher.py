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
from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvcore.errors import DataLoss, InvalidArgument, OutOfRange, ResourceExhausted, Unavailable
from kvcore.events import AllBlocksCleared, BlockStored
from kvcore.feed import Entry, RemovedBlocks, StoredBlocks
from kvdepot.v1 import event_pb2
from kvserver.event_batch import Batch, batches, num_events
from kvserver.subscriber import Subscriber

_FLUSH_SECONDS_MIN = 0.002
_FLUSH_SECONDS_MAX = 0.2
_FAN_OUT_PER_SECOND = 10_000  # messages to all subscribers together

_KINDS = {StoredBlocks: "stored", RemovedBlocks: "removed", AllBlocksCleared: "cleared"}


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
            count = num_events(entry)
            self._pending.append(entry)
            self._pending_events += count
            self.published[_KINDS[type(entry)]] += count
            self.next_sequence += count
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
        for batch in batches(entries, first):
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

    def snapshot_messages(self, stored: Iterable[StoredBlocks | BlockStored]) -> Iterator[bytes]:
        """The index as messages; taken and numbered at this moment, encoded as read."""
        sequence, now = self.next_sequence, time.time()
        taken = list(batches(stored, sequence)) or [Batch(sequence, 0, 0, now, ())]
        return self._snapshot_messages(taken, sequence)

    def _snapshot_messages(self, taken: list[Batch], sequence: int) -> Iterator[bytes]:
        for position, batch in enumerate(taken):
            whole = replace(batch, first_sequence=sequence).encoded(self.epoch)
            marks = event_pb2.StreamEventsResponse(
                snapshot=True, snapshot_end=position == len(taken) - 1
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
