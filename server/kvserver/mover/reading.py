"""NIXL: our agent reads the peer's registered memory into our blocks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcore.memory import Span
from kvserver.mover.copying import Copy, PathFailed, Stuck, Task
from kvserver.mover.nixl import KINDS, AgentFailed, ReadingAgent, Region
from kvserver.mover.pages import pieces_of

BATCH_BYTES = 16 << 20
_IN_FLIGHT = 3
_POLL_SECONDS = 20e-6
# Between two looks at the deadline.
_POLLS = 64
# What a read in flight gets to end by itself when the import is over.
_SETTLE_SECONDS = 0.5


def run(task: Task, agent: ReadingAgent) -> None:
    """Read what is left. Stuck when reads are in flight that do not end.

    A read that was let go of still lands: so nothing is let go of.
    """
    theirs, mappings = _regions(task), task.peer_pool.mappings
    if len(theirs) != len(agent.regions):
        raise PathFailed("the peer's pool has another number of ranks than ours")
    if any(r.nbytes < mapping.num_bytes for r, mapping in zip(theirs, mappings, strict=True)):
        raise PathFailed("the peer's memory is not of a kind that is read here")
    try:
        name = agent.connect(task.reach.nixl_agent)
    except AgentFailed as error:
        raise PathFailed(f"the peer's agent cannot be met: {error}") from None
    failed = False
    try:
        for copy in task.copies:
            if len(copy.left()):
                _read(task, copy, agent, name, theirs)
    except AgentFailed as error:
        failed = True
        raise PathFailed(f"the read failed: {error}") from None
    finally:
        agent.disconnect(name, failed=failed)


def _regions(task: Task) -> list[Region]:
    """Of the peer, one a mapping. PathFailed if it tells of others."""
    told = task.reach.nixl_regions
    kinds = {region.kind for region in told}
    if len(told) != len(task.peer_pool.mappings) or len(kinds) != 1 or not kinds <= KINDS:
        raise PathFailed("the peer's memory is not of a kind that is read here")
    return [Region(r.kind, r.device, r.address, r.nbytes) for r in told]


def _read(
    task: Task, copy: Copy, agent: ReadingAgent, name: str, regions: Sequence[Region]
) -> None:
    pieces = pieces_of(copy.source, copy.destination)
    sources = [piece.source for piece in pieces]
    destinations = [piece.destination for piece in pieces]
    sums = task.sums(copy)
    flights: deque[tuple[Any, ...]] = deque()

    def land() -> None:
        batch, *handles = flights[0]
        _wait(task, agent, handles[0])
        flights.popleft()
        agent.release(*handles)
        task.arrived(copy, batch, sums)

    try:
        for batch in task.batches(copy, BATCH_BYTES):
            task.store.check()
            ours = rows_of(agent.regions, destinations, copy.destination_ids[batch])
            theirs = rows_of(regions, sources, copy.source_ids[batch])
            kinds = agent.regions[0].kind, regions[0].kind
            flights.append((batch, *_begin(agent, name, ours, theirs, kinds)))
            if len(flights) == _IN_FLIGHT:
                land()
        while flights:
            land()
    finally:
        _settle(agent, [flight[1] for flight in flights])
        for _, *handles in flights:
            agent.release(*handles)


def _begin(
    agent: ReadingAgent, name: str, ours: Any, theirs: Any, kinds: tuple[str, str]
) -> list[Any]:
    """A read that has begun, and its two lists: to be released. One that fails leaves nothing."""
    begun: list[Any] = []
    try:
        for owner, rows, kind in (("", ours, kinds[0]), (name, theirs, kinds[1])):
            begun.append(agent.prepare(owner, rows, kind))
        numbers = np.arange(len(ours), dtype=np.int32)
        return [agent.read(begun[0], begun[1], numbers), *begun]
    except BaseException:
        agent.release(*begun)
        raise


def rows_of(regions: Sequence[Region], spans: Sequence[Span], ids: Any) -> Any:
    """(address, nbytes, device) of every span of every block, ``[rows, 3]``, rank by rank."""
    rows = np.zeros((len(regions), len(spans), len(ids), 3), np.uint64)
    for region, of_rank in zip(regions, rows, strict=True):
        for span, of_span in zip(spans, of_rank, strict=True):
            of_span[:, 0] = region.address + span.offset + ids.astype(np.uint64) * span.stride
            of_span[:, 1] = span.nbytes
            of_span[:, 2] = region.device
    return rows.reshape(-1, 3)


def _wait(task: Task, agent: ReadingAgent, reading: Any) -> None:
    while True:
        for _ in range(_POLLS):
            if agent.done(reading):
                return
            time.sleep(_POLL_SECONDS)
        task.check()


def _settle(agent: ReadingAgent, readings: Sequence[Any]) -> None:
    """Every read is over, well or not, or it is Stuck."""
    until = time.monotonic() + _SETTLE_SECONDS
    for reading in readings:
        while True:
            try:
                if agent.done(reading):
                    break
            except AgentFailed:
                break
            if time.monotonic() > until:
                raise Stuck
            time.sleep(_POLL_SECONDS)
