"""NIXL: our agent reads the peer's registered memory into our blocks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvserver.mover.copying import Copy, PathFailed, Stuck, Task
from kvserver.mover.nixl import AgentFailed, ReadingAgent
from kvserver.mover.pages import Piece, file_of, pieces_of

BATCH_BYTES = 16 << 20
_IN_FLIGHT = 3
_POLL_SECONDS = 20e-6
# Between two looks at the deadline.
_POLLS = 64
# What a read in flight gets to end by itself when the import is over.
_SETTLE_SECONDS = 0.5


def run(task: Task, agent: ReadingAgent | None) -> None:
    """Read what is left. Stuck when reads are in flight that do not end.

    A read that was let go of still lands: so nothing is let go of.
    """
    assert agent is not None  # it was offered
    region, mapping = task.reach.nixl_regions[0], file_of(task.peer_pool)
    if region.kind != "DRAM" or mapping is None or region.nbytes < mapping.num_bytes:
        raise PathFailed("the peer's memory is not of a kind that is read here")
    try:
        name = agent.connect(task.reach.nixl_agent)
    except AgentFailed as error:
        raise PathFailed(f"the peer's agent cannot be met: {error}") from None
    try:
        for copy in task.copies:
            if len(copy.left()):
                _read(task, copy, agent, name, region.address)
    except AgentFailed as error:
        raise PathFailed(f"the read failed: {error}") from None
    finally:
        agent.disconnect(name)


def _read(task: Task, copy: Copy, agent: ReadingAgent, name: str, address: int) -> None:
    pieces = pieces_of(copy.source, copy.destination)
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
            lists = (
                agent.prepare("", _rows(pieces, copy.destination_ids[batch], agent.address)),
                agent.prepare(name, _rows(pieces, copy.source_ids[batch], address, theirs=True)),
            )
            rows = np.arange(len(batch) * len(pieces), dtype=np.int32)
            flights.append((batch, agent.read(*lists, rows), *lists))
            if len(flights) == _IN_FLIGHT:
                land()
        while flights:
            land()
    finally:
        _settle(agent, [flight[1] for flight in flights])
        for _, *handles in flights:
            agent.release(*handles)


def _rows(pieces: Sequence[Piece], ids: Any, address: int, *, theirs: bool = False) -> Any:
    """(address, nbytes, device) of every piece of every block."""
    spans = [piece.source if theirs else piece.destination for piece in pieces]
    rows = np.zeros((len(spans), len(ids), 3), np.uint64)
    for number, span in enumerate(spans):
        rows[number, :, 0] = address + span.offset + ids.astype(np.uint64) * span.stride
        rows[number, :, 1] = span.nbytes
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
