"""Follows the event stream: mirrors the index, and knows what every block must hold.

BlockStored carries the token ids and the parent, so a follower computes the pattern of each
block without ever having seen the request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Set

import numpy as np

from kvclient.client import Client
from kvclient.errors import (
    DataLoss,
    KVDepotError,
    OutOfRange,
    ResourceExhausted,
    Unavailable,
)
from kvclient.event_stream import Stream
from kvclient.events import BlockRemoved, BlockStored, Event, IndexMirror
from kvclient.replay.pattern import Values, prefix_sums

_AWAY_SECONDS = 0.2  # before a server that cannot be reached is asked again
_REMEMBERED_MAX = 1 << 20  # blocks whose end is kept for their children


class Contents:
    """What each block that is here must hold, by group and hash, from the tokens of its events.

    Hashes of all groups are of one chain, so a parent may have been seen in any group.
    Only of chains that begin with one of ``roots``, the tokens of a first block: others
    at work on the same server write what they like. None: of all.
    """

    def __init__(self, roots: Set[bytes] | None = None) -> None:
        self._roots = roots
        self.sums: dict[tuple[int, bytes], Values] = {}
        self._ends: dict[bytes, tuple[int, int]] = {}  # position and sum after the block

    def apply(self, events: Iterable[Event]) -> None:
        """Take in events, in order. A block whose parent was never seen stays unknown."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self.sums.pop((event.group, block_hash), None)
            else:
                self.sums.clear()

    def _store(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        end = (0, 0) if parent is None else self._ends.get(parent)
        if end is None or (event.extra_keys and any(event.extra_keys)):
            return
        position, before = end
        size = event.block_size
        roots = self._roots
        if not position and roots is not None and event.token_ids[: 4 * size] not in roots:
            return
        sums = prefix_sums(np.frombuffer(event.token_ids, "<u4"), position, before)
        for index, block_hash in enumerate(event.block_hashes):
            block = sums[index * size : (index + 1) * size]
            position += size
            self.sums[event.group, block_hash] = block
            self._ends[block_hash] = (position, int(block[-1]))
        while len(self._ends) > _REMEMBERED_MAX:
            del self._ends[next(iter(self._ends))]


class Follower:
    """A thread on one event stream, resumed when it is cut off as too slow.

    Behind what the server keeps it begins anew with a snapshot. ``persists``: so it does
    when the server was away and restarted.
    """

    def __init__(
        self, client: Client, roots: Set[bytes] | None = None, *, persists: bool = False
    ) -> None:
        self.mirror = IndexMirror()
        self.contents = Contents(roots)
        self._roots = roots
        self.lock = threading.Lock()
        self.num_events = 0
        self.num_resumed = 0
        self.num_begun_anew = 0
        """Of these, how often from a snapshot."""
        self.error: str | None = None
        self.ready = threading.Event()
        """Set once the first snapshot is in, or the follower gave up."""
        self._client = client
        self._persists = persists
        self._stopping = False
        self._stream: Stream | None = None
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Follow no more."""
        self._stopping = True
        if self._stream is not None:
            self._stream.close()
        self._thread.join()

    def compare(self, timeout_seconds: float = 30.0) -> list[str]:
        """How the mirror differs from a snapshot taken now; empty: not at all.

        Both are compared at the same sequence; on a server where others are at work
        that takes some tries.
        """
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            fresh = IndexMirror()
            with self._client.stream_events(snapshot=True) as batches:
                for batch in batches:
                    fresh.apply(batch)
                    if batch.snapshot_end:
                        break
            assert fresh.next_sequence is not None
            while time.monotonic() < deadline and self.error is None:
                with self.lock:
                    reached = self.mirror.next_sequence
                    if reached == fresh.next_sequence:
                        return differences(self.mirror, fresh)
                if reached is not None and reached > fresh.next_sequence:
                    break
                time.sleep(0.005)
            if self.error is not None:
                return [f"the event stream broke: {self.error}"]
        return [f"the mirror did not reach the server within {timeout_seconds} s"]

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._follow()
                except ResourceExhausted:  # too slow for a moment; nothing is lost
                    self.num_resumed += 1
                except OutOfRange as error:
                    if error.reason != "CURSOR_EXPIRED":
                        raise
                    self._begin_anew()
                except DataLoss:
                    if not self._persists:
                        raise
                    self._begin_anew()
                except Unavailable:
                    if not self._persists:
                        raise
                    self.num_resumed += 1
                    time.sleep(_AWAY_SECONDS)
        except (KVDepotError, ValueError) as error:
            if not self._stopping:
                self.error = str(error)
        finally:
            self.ready.set()

    def _begin_anew(self) -> None:
        self.num_resumed += 1
        self.num_begun_anew += 1
        with self.lock:
            self.mirror, self.contents = IndexMirror(), Contents(self._roots)

    def _follow(self) -> None:
        if self.mirror.next_sequence is None:  # at first, or cut off within the snapshot
            self.mirror, self.contents = IndexMirror(), Contents(self._roots)
        mirror = self.mirror
        if mirror.next_sequence is None:
            self._stream = self._client.stream_events(snapshot=True)
        else:
            self._stream = self._client.stream_events(mirror.next_sequence, epoch=mirror.epoch)
        for batch in self._stream:
            with self.lock:
                mirror.apply(batch)
                self.contents.apply(batch.events)
                self.num_events += 0 if batch.snapshot else len(batch.events)
            if mirror.next_sequence is not None:
                self.ready.set()


def differences(mirror: IndexMirror, fresh: IndexMirror) -> list[str]:
    """How ``mirror`` differs from ``fresh``; empty: not at all."""
    found = []
    for group in sorted(mirror.blocks.keys() | fresh.blocks.keys()):
        ours, theirs = mirror.hashes(group), fresh.hashes(group)
        for what, hashes in (
            ("missing in the mirror", theirs - ours),
            ("only in the mirror", ours - theirs),
        ):
            if hashes:
                named = ", ".join(block_hash.hex() for block_hash in sorted(hashes)[:3])
                found.append(f"group {group}: {len(hashes)} blocks {what}: {named}")
    return found
