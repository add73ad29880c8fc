"""StreamEvents followed as a router does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import grpc
import pytest

from kvcore.feed import RemovedBlocks
from kvdepot.v1 import event_pb2
from kvserver.event_batch import BATCH_EVENTS_MAX
from serving import BLOCK_SIZE, Scheduler, Serve, Served, detail_of, eventually, refused, tokens

PROMPT = tokens(*range(1, 11))


def each_event(stream: Iterator[Any]) -> Iterator[tuple[int, event_pb2.Event]]:
    """Sequence and event, one by one."""
    for batch in stream:
        for position, event in enumerate(batch.events):
            yield batch.first_sequence + position, event


def events(stream: Iterator[Any], count: int) -> list[tuple[int, event_pb2.Event]]:
    """The next ``count`` events."""
    return list(islice(each_event(stream), count))


def cache_prompt(scheduler: Scheduler, request_id: str, prompt: bytes = PROMPT) -> None:
    """Leave the prompt's full blocks cached, ready and unreferenced."""
    assert scheduler.admit(request_id, prompt).num_new_tokens
    scheduler.free(request_id)
    scheduler.free(request_id)


def hashes_in(found: list[tuple[int, event_pb2.Event]]) -> list[bytes]:
    return [h for _, event in found for h in event.block_stored.block_hashes]


def test_stored_only_once_ready_then_removed_then_cleared(serve: Serve) -> None:
    served = serve(num_blocks=4)
    scheduler = served.open()
    feed = each_event(served.follow())
    scheduler.admit("a", PROMPT, step=1, completed_step=0)
    assert served.stats().next_event_sequence == 0
    scheduler.free("a", step=2, completed_step=1)
    scheduler.free("a", step=3, completed_step=2)

    stored: list[tuple[int, event_pb2.Event]] = []
    while len(hashes_in(stored)) < 2:
        stored.append(next(feed))
    assert [sequence for sequence, _ in stored] == list(range(len(stored)))
    first = stored[0][1].block_stored
    assert not first.HasField("parent_block_hash")
    assert first.block_size == BLOCK_SIZE
    assert first.medium == "CPU"
    assert b"".join(event.block_stored.token_ids for _, event in stored) == PROMPT[:32]

    scheduler.admit("b", tokens(*range(100, 111)), step=4, completed_step=3)
    removed: list[bytes] = []
    while len(removed) < 2:
        _, event = next(feed)
        assert event.block_removed.reason == event_pb2.REMOVAL_REASON_EVICTED
        assert event.block_removed.medium == "CPU"
        removed += event.block_removed.block_hashes
    assert sorted(removed) == sorted(hashes_in(stored))

    scheduler.free("b", step=5, completed_step=5)
    scheduler.reset(step=6, completed_step=5)
    kinds: list[str] = []
    while "all_blocks_cleared" not in kinds:
        _, event = next(feed)
        kinds.append(str(event.WhichOneof("event")))
    assert event.all_blocks_cleared.generation == 1


def test_resuming_is_gapless(served: Served) -> None:
    scheduler = served.open()
    for number in range(5):
        cache_prompt(scheduler, f"r{number}", tokens(*range(number * 10, number * 10 + 5)))
    total = served.stats().next_event_sequence
    assert total == 5
    whole = events(served.follow(from_sequence=0), total)
    rest = events(served.follow(from_sequence=3, epoch=scheduler.opened.epoch), 2)
    assert rest == whole[3:]
    assert [sequence for sequence, _ in whole] == list(range(total))


def test_a_snapshot_goes_over_into_the_feed(served: Served) -> None:
    scheduler = served.open()
    cache_prompt(scheduler, "before")
    stream = served.follow(snapshot=True)
    batch = next(stream)
    present: list[bytes] = []
    while True:
        assert batch.snapshot
        assert batch.first_sequence == served.stats().next_event_sequence
        for event in batch.events:
            stored = event.block_stored
            assert not stored.HasField("parent_block_hash") or stored.parent_block_hash in present
            present += stored.block_hashes
        if batch.snapshot_end:
            break
        batch = next(stream)
    assert len(present) == 2
    cache_prompt(scheduler, "after", tokens(9, 9, 9, 9, 9))
    ((sequence, event),) = events(stream, 1)
    assert sequence == batch.first_sequence
    assert event.block_stored.block_hashes[0] not in present


@pytest.mark.parametrize(
    ("request_fields", "code"),
    [
        pytest.param({"epoch": "other"}, grpc.StatusCode.DATA_LOSS, id="another epoch"),
        pytest.param({"from_sequence": 0}, grpc.StatusCode.OUT_OF_RANGE, id="expired"),
        pytest.param({"from_sequence": 99}, grpc.StatusCode.OUT_OF_RANGE, id="in the future"),
        pytest.param(
            {"from_sequence": 1, "snapshot": True},
            grpc.StatusCode.INVALID_ARGUMENT,
            id="cursor and snapshot",
        ),
    ],
)
def test_cursors_that_cannot_be_served(
    serve: Serve, request_fields: dict[str, Any], code: grpc.StatusCode
) -> None:
    served = serve(event_history=1)
    scheduler = served.open()
    for number in range(3):
        cache_prompt(scheduler, f"r{number}", tokens(*range(number * 10, number * 10 + 5)))
        served.loop.call(served.server.node.publisher.flush)
    request = event_pb2.StreamEventsRequest(**request_fields)
    detail = refused(lambda: next(served.event.StreamEvents(request, timeout=60)), code)
    if code is grpc.StatusCode.DATA_LOSS:
        assert detail.current_epoch == scheduler.opened.epoch


def test_a_subscriber_that_does_not_read_is_cut_off(serve: Serve) -> None:
    served = serve(event_queue=8)
    stalled, reading = served.follow(), served.follow()
    publisher = served.server.node.publisher
    removed = RemovedBlocks([b"h" * 32] * BATCH_EVENTS_MAX, 0, "CPU", "evicted")

    def burst() -> None:
        publisher.publish([removed])
        publisher.flush()

    total = 0
    for _ in range(4000):
        served.loop.call(burst)
        total += len(next(reading).events)
        if publisher.cut_off:
            break
    assert publisher.cut_off == 1
    assert served.stats().num_event_subscribers == 1
    with pytest.raises(grpc.RpcError) as caught:
        list(stalled)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail_of(caught.value).retryable
    # It goes on where it was, or takes a snapshot.
    assert total == publisher.next_sequence


def test_heartbeats_tell_that_all_is_well(serve: Serve) -> None:
    served = serve(event_heartbeat_seconds=0.05)
    beat = next(served.follow())
    assert not beat.events
    assert (beat.first_sequence, beat.epoch) == (0, served.server.node.depot.epoch)


def test_subscribers_are_limited_and_leave(serve: Serve) -> None:
    served = serve(max_subscribers=1)
    first = served.follow()
    refused(
        lambda: next(served.event.StreamEvents(event_pb2.StreamEventsRequest(), timeout=60)),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )
    first.cancel()
    eventually(lambda: not served.stats().num_event_subscribers)
    served.follow()
