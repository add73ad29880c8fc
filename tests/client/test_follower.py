"""What a follower knows of the index, and of the bytes behind it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import cast

import numpy as np

from kvclient.client import Client
from kvclient.errors import OutOfRange, ResourceExhausted
from kvclient.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    IndexMirror,
)
from kvclient.replay.follower import Contents, Follower, differences
from kvclient.replay.pattern import prefix_sums
from patience import until

TOKENS = np.arange(50, 62, dtype="<u4")
SUMS = prefix_sums(TOKENS)


def stored(first: int, count: int, parent: bytes | None = None, group: int = 0) -> BlockStored:
    """Blocks ``first`` to ``first + count`` of TOKENS, of 4 tokens each."""
    return BlockStored(
        block_hashes=tuple(bytes([index]) for index in range(first, first + count)),
        parent_block_hash=parent,
        token_ids=TOKENS[4 * first : 4 * (first + count)].tobytes(),
        block_size=4,
        lora_id=None,
        lora_name=None,
        extra_keys=(),
        group=group,
        spec_kind="full_attention",
        medium="CPU",
    )


def batch(
    first_sequence: int, *events: Event, snapshot: bool = False, end: bool = False
) -> EventBatch:
    return EventBatch("epoch", first_sequence, 0.0, events, snapshot, end)


def test_a_snapshot_in_several_batches_is_one_index() -> None:
    mirror = IndexMirror()
    mirror.apply(batch(7, stored(0, 1), snapshot=True))
    assert mirror.next_sequence is None
    mirror.apply(batch(7, stored(1, 2, b"\0"), snapshot=True, end=True))
    assert mirror.hashes() == {b"\0", b"\1", b"\2"}
    mirror.apply(batch(7, BlockRemoved((b"\2",), 0, "CPU", "evicted")))
    assert (mirror.hashes(), mirror.next_sequence) == ({b"\0", b"\1"}, 8)
    # Another snapshot replaces all of it.
    mirror.apply(batch(9, stored(0, 1), snapshot=True, end=True))
    assert mirror.hashes() == {b"\0"}


def test_differences_name_the_blocks() -> None:
    ours, theirs = IndexMirror(), IndexMirror()
    ours.apply_events([stored(0, 2)])
    theirs.apply_events([stored(0, 1)])
    assert differences(ours, ours) == []
    assert differences(ours, theirs) == ["group 0: 1 blocks only in the mirror: 01"]
    assert differences(theirs, ours) == ["group 0: 1 blocks missing in the mirror: 01"]


class TooSlowClient:
    """Its event stream is cut off after the snapshot, and its cursor is no longer kept."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []
        self._closed = threading.Event()

    def stream_events(
        self, from_sequence: int | None = None, *, epoch: str = "", snapshot: bool = False
    ) -> TooSlowClient:
        self.asked.append(None if snapshot else from_sequence)
        if not snapshot:
            raise OutOfRange("not kept", reason="CURSOR_EXPIRED", field="from_sequence")
        return self

    def __iter__(self) -> Iterator[EventBatch]:
        if len(self.asked) == 1:
            yield batch(7, stored(0, 1), snapshot=True, end=True)
            raise ResourceExhausted("too slow", reason="SUBSCRIBER_TOO_SLOW", retryable=True)
        yield batch(900, stored(1, 1, b"\0"), snapshot=True, end=True)
        self._closed.wait(60)

    def close(self) -> None:
        self._closed.set()


def test_a_follower_behind_the_history_begins_anew() -> None:
    client = TooSlowClient()
    follower = Follower(cast(Client, client))
    until(lambda: follower.mirror.next_sequence == 900)
    follower.stop()
    assert client.asked == [None, 7, None]
    assert follower.error is None
    assert (follower.num_resumed, follower.num_begun_anew) == (2, 1)
    assert follower.mirror.hashes() == {b"\1"}


def test_what_others_write_is_not_judged() -> None:
    contents = Contents({b"of another trace"})
    contents.apply([stored(0, 1), stored(1, 2, b"\0")])
    assert contents.sums == {}
    contents = Contents({TOKENS[:4].tobytes()})
    contents.apply([stored(0, 2), stored(2, 1, b"\1")])
    assert set(contents.sums) == {(0, b"\0"), (0, b"\1"), (0, b"\2")}


def test_contents_follow_the_chain_through_separate_events() -> None:
    contents = Contents()
    contents.apply([stored(0, 1), stored(1, 2, b"\0")])
    assert {key: list(value) for key, value in contents.sums.items()} == {
        (0, bytes([index])): list(SUMS[4 * index : 4 * index + 4]) for index in range(3)
    }
    # A child may come after its parent went.
    contents.apply([BlockRemoved((b"\1", b"\2"), 0, "CPU", "evicted")])
    assert set(contents.sums) == {(0, b"\0")}
    contents.apply([stored(2, 1, b"\1"), stored(2, 1, b"never seen")])
    assert list(contents.sums[0, b"\2"]) == list(SUMS[8:])
    contents.apply([AllBlocksCleared(1)])
    assert contents.sums == {}


def test_a_group_that_keeps_some_blocks_leans_on_one_that_keeps_all() -> None:
    contents, mirror = Contents(), IndexMirror()
    events: list[Event] = [stored(0, 3), stored(2, 1, b"\1", group=1)]
    contents.apply(events)
    mirror.apply_events(events)
    assert list(contents.sums[1, b"\2"]) == list(SUMS[8:])
    assert mirror.hashes(1) == {b"\2"}
    # The same hash goes in one group, and stays in the other.
    contents.apply([BlockRemoved((b"\2",), 0, "CPU", "evicted")])
    assert set(contents.sums) == {(0, b"\0"), (0, b"\1"), (1, b"\2")}
