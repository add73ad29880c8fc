"""The publisher alone: numbering, history, queues and batching."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
import uvloop

from kvcore.errors import (
    DataLoss,
    InvalidArgument,
    KVDepotError,
    OutOfRange,
    ResourceExhausted,
    Unavailable,
)
from kvcore.events import AllBlocksCleared
from kvcore.feed import ContentKind, Entry, RemovedBlocks, StoredBlocks, StoredRun, events_of
from kvdepot.v1 import event_pb2
from kvserver import convert_event
from kvserver.event_batch import BATCH_BYTES_MAX
from kvserver.publisher import Publisher


def make(**options: Any) -> Publisher:
    defaults: dict[str, Any] = {
        "history_events": 100,
        "history_bytes": 1 << 20,
        "queue_batches": 4,
        "queue_bytes": 1 << 20,
        "subscribers_max": 2,
        "heartbeat_seconds": 60.0,
    }
    return Publisher("epoch-1", **(defaults | options))


def stored(number: int) -> StoredBlocks:
    run = StoredRun(
        ContentKind(2, 0, "full_attention", None, "CPU"),
        parent_hash=None,
        hashes=[number.to_bytes(32, "big")],
        tokens=b"\1\0\0\0" * 2,
    )
    return StoredBlocks(run, 0, 1)


def removed(*hashes: bytes) -> RemovedBlocks:
    return RemovedBlocks(list(hashes), 0, "CPU", "evicted")


def on_loop(story: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await story()

    uvloop.run(run())


def decode(messages: Iterable[bytes]) -> list[event_pb2.StreamEventsResponse]:
    return [event_pb2.StreamEventsResponse.FromString(message) for message in messages]


def sequences(messages: Iterable[bytes]) -> list[int]:
    return [
        response.first_sequence + position
        for response in decode(messages)
        for position in range(len(response.events))
    ]


def test_events_are_numbered_batched_and_resumed_from_within_a_batch() -> None:
    async def story() -> None:
        publisher = make()
        live, first = publisher.subscribe()
        assert list(first) == []
        publisher.publish([stored(1), removed(b"h" * 32), AllBlocksCleared(3)])
        publisher.publish([stored(2)])
        message = await live.next()
        assert sequences([message]) == [0, 1, 2, 3]
        kinds = [event.WhichOneof("event") for event in decode([message])[0].events]
        assert kinds == ["block_stored", "block_removed", "all_blocks_cleared", "block_stored"]
        _, first = publisher.subscribe(epoch="epoch-1", from_sequence=2)
        assert sequences(first) == [2, 3]
        assert dict(publisher.published) == {"stored": 2, "removed": 1, "cleared": 1}

    on_loop(story)


@pytest.mark.parametrize("num_tokens", [16, 600, 8192], ids="{} tokens a block".format)
def test_entries_of_the_feed_are_sent_as_their_events(num_tokens: int) -> None:
    run = StoredRun(
        ContentKind(num_tokens, 0, "full_attention", None, "CPU"),
        parent_hash=b"p" * 32,
        hashes=[bytes([number]) * 32 for number in range(32)],
        tokens=bytes(range(128)) * num_tokens,
        extra_keys=[("adapter", f"salt {number}") for number in range(32)],
        lora_id=3,
        lora_name="adapter",
    )
    entries: list[Entry] = [
        StoredBlocks(run, 0, 31),
        removed(*[bytes([number]) * 32 for number in range(250)]),
        AllBlocksCleared(2),
        *[StoredBlocks(run, 5, 32)] * 9,
        removed(b"h" * 32),
    ]
    one_by_one: list[Entry] = []
    for entry in entries:
        if isinstance(entry, AllBlocksCleared):
            one_by_one.append(entry)
        else:
            one_by_one += [entry.part(number, number + 1) for number in range(len(entry))]
    events = list(events_of(entries))

    async def story() -> None:
        whole, single = (make(history_events=10_000, history_bytes=1 << 30) for _ in range(2))
        whole.publish(entries)
        single.publish(one_by_one)
        assert whole.next_sequence == single.next_sequence == len(events)
        assert whole.published == single.published
        streams = []
        for publisher in (whole, single):
            _, first = publisher.subscribe(from_sequence=0)
            responses = decode(first)
            for response in responses:
                response.ClearField("timestamp_seconds")
            streams.append(responses)
        assert streams[0] == streams[1]
        assert [event for batch in streams[0] for event in batch.events] == [
            convert_event.event(event) for event in events
        ]

    on_loop(story)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(None, id="no keys"),
        pytest.param(("adapter", "salt"), id="few"),
        pytest.param(tuple(("\U0001f600" * 512, at) for at in range(16)), id="pictures"),
        pytest.param((b"d" * 32,), id="digests"),
    ],
)
def test_a_batch_is_about_as_large_as_it_counts(keys: tuple[Any, ...] | None) -> None:
    run = StoredRun(
        ContentKind(16, 0, "full_attention", None, "CPU"),
        parent_hash=b"p" * 32,
        hashes=[bytes([number]) * 32 for number in range(32)],
        tokens=bytes(64 * 32),
        extra_keys=None if keys is None else [keys] * 32,
    )

    async def story() -> None:
        publisher = make(history_events=10_000, history_bytes=1 << 30)
        publisher.publish([StoredBlocks(run, 0, 32)] * 20)
        _, first = publisher.subscribe(from_sequence=0)
        messages = list(first)
        assert len(sequences(messages)) == 640
        assert max(map(len, messages)) <= BATCH_BYTES_MAX
        counted = sum(batch.nbytes for batch in publisher._history)
        assert 0.7 < sum(map(len, messages)) / counted < 1.3
        snapshot = list(publisher.snapshot_messages([run.event(0) for _ in range(640)]))
        assert max(map(len, snapshot)) <= BATCH_BYTES_MAX

    on_loop(story)


def test_resuming_includes_what_is_pending() -> None:
    async def story() -> None:
        publisher = make()
        publisher.publish([stored(1)])
        subscriber, first = publisher.subscribe(from_sequence=0)
        assert sequences(first) == [0]
        publisher.publish([stored(2)])
        assert sequences([await subscriber.next()]) == [1]

    on_loop(story)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param({"epoch": "epoch-0"}, DataLoss, id="another epoch"),
        pytest.param({"from_sequence": 1}, OutOfRange, id="expired"),
        pytest.param({"from_sequence": 6}, OutOfRange, id="in the future"),
        pytest.param(
            {"from_sequence": 3, "fresh": True}, InvalidArgument, id="cursor and snapshot"
        ),
        pytest.param({"from_sequence": 2}, None, id="oldest kept"),
        pytest.param({"from_sequence": 5}, None, id="next"),
        pytest.param({}, None, id="now"),
    ],
)
def test_cursors(arguments: dict[str, Any], error: type[KVDepotError] | None) -> None:
    async def story() -> None:
        publisher = make(history_events=3)
        for number in range(5):
            publisher.publish([stored(number)])
            publisher.flush()
        if error is None:
            publisher.subscribe(**arguments)
            return
        with pytest.raises(error):
            publisher.subscribe(**arguments)
        assert publisher.num_subscribers == 0

    on_loop(story)


def test_a_slow_subscriber_is_cut_off_and_others_are_not() -> None:
    async def story() -> None:
        publisher = make(queue_batches=4)
        slow, _ = publisher.subscribe()
        quick, _ = publisher.subscribe()
        seen = []
        for number in range(6):
            publisher.publish([stored(number)])
            publisher.flush()
            seen.append(await quick.next())
        assert sequences(seen) == list(range(6))
        with pytest.raises(ResourceExhausted, match="lags"):
            await slow.next()
        assert (publisher.num_subscribers, publisher.cut_off) == (1, 1)

    on_loop(story)


def test_bytes_bound_the_queue_too() -> None:
    async def story() -> None:
        publisher = make(queue_bytes=100)
        slow, _ = publisher.subscribe()
        for number in range(2):
            publisher.publish([stored(number)])
            publisher.flush()
        with pytest.raises(ResourceExhausted, match="100 bytes"):
            await slow.next()

    on_loop(story)


def test_bytes_bound_the_history_too() -> None:
    async def story() -> None:
        publisher = make(history_bytes=200)
        for number in range(9):
            publisher.publish([stored(number)])
            publisher.flush()
        with pytest.raises(OutOfRange):
            publisher.subscribe(from_sequence=0)
        assert sequences(publisher.subscribe(from_sequence=8)[1]) == [8]

    on_loop(story)


def test_subscribers_are_limited() -> None:
    async def story() -> None:
        publisher = make(subscribers_max=1)
        first, _ = publisher.subscribe()
        with pytest.raises(ResourceExhausted):
            publisher.subscribe()
        publisher.unsubscribe(first)
        publisher.subscribe()

    on_loop(story)


@pytest.mark.parametrize("count", [0, 1, 700])
def test_a_snapshot_has_the_sequence_of_its_moment(count: int) -> None:
    async def story() -> None:
        publisher = make()
        publisher.publish([stored(1)])
        publisher.subscribe(fresh=True)
        here = [event for number in range(count) for event in stored(number).events()]
        messages = publisher.snapshot_messages(here)
        publisher.publish([stored(2)])
        responses = decode(messages)
        assert sum(len(response.events) for response in responses) == count
        assert all(response.snapshot and response.first_sequence == 1 for response in responses)
        assert [response.snapshot_end for response in responses] == [
            *([False] * (len(responses) - 1)),
            True,
        ]

    on_loop(story)


def test_a_heartbeat_goes_to_the_idle_only() -> None:
    async def story() -> None:
        publisher = make(heartbeat_seconds=0.02)
        subscriber, _ = publisher.subscribe()
        publisher.publish([stored(1)])
        first, second = decode([await subscriber.next(), await subscriber.next()])
        assert (first.first_sequence, len(first.events)) == (0, 1)
        assert (second.first_sequence, len(second.events)) == (1, 0)
        assert second.epoch == "epoch-1"
        publisher.close()

    on_loop(story)


def test_closing_ends_streams_after_what_was_published() -> None:
    async def story() -> None:
        publisher = make()
        subscriber, _ = publisher.subscribe()
        waiting = asyncio.ensure_future(publisher.subscribe()[0].next())
        await asyncio.sleep(0)
        publisher.publish([stored(1)])
        publisher.close()
        assert sequences([await subscriber.next()]) == [0]
        assert sequences([await waiting]) == [0]
        with pytest.raises(Unavailable):
            await subscriber.next()
        with pytest.raises(Unavailable):
            publisher.subscribe()

    on_loop(story)
