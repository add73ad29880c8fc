"""A server, two schedulers A and B, and what they do in stories of faults."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvclient import Client
from kvclient.client import Session
from kvclient.events import BlockStored
from kvclient.pool import Pool, map_pool
from kvclient.values import Content, Outcome, ResetMode, SlotRequest, SlotResult, StepMark
from manual_clock import ManualClock
from serving import TIMEOUT_SECONDS, Served

LEASE_SECONDS = 10.0
NUM_USABLE = 16
PROMPT = range(100, 110)
"""Two full blocks, and a half."""
OTHER = range(200, 210)
REFUSE, FORCE = ResetMode.REFUSE, ResetMode.FORCE


@dataclass
class Stage:
    """A server, and two schedulers on it."""

    served: Served
    client: Client
    clock: ManualClock
    a: Session
    b: Session

    @property
    def states(self) -> tuple[int, int, int, int]:
        """Live, cached, quarantined and free blocks; the audit must be clean."""
        self.served.assert_clean()
        blocks = self.served.stats().blocks
        return blocks.live, blocks.cached, blocks.quarantined, blocks.free

    def refs(self, block_id: int) -> int:
        """References of a block."""
        return self.served.server.node.depot.pool.blocks[block_id].ref_cnt

    def pass_time(self, seconds: float) -> None:
        """Nobody renews a lease meanwhile."""
        self.served.loop.call(lambda: self.clock.advance(seconds))

    def pool(self) -> Pool:
        """The bytes."""
        return map_pool(self.a.pool)


def admit(session: Session, request_id: str, prompt: Any, *mark: int, **slots: Any) -> SlotResult:
    """Look up and allocate; the mark, if any, is (step, completed step)."""
    content = prompt if isinstance(prompt, Content) else Content(list(prompt))
    step = StepMark(*mark) if mark else None
    return session.allocate_slots(SlotRequest(request_id, content, lookup=True, **slots), mark=step)


def table(result: SlotResult) -> list[int]:
    """The block table after an admission."""
    assert result.outcome is Outcome.OK, result
    return [*result.hit_blocks[0], *result.new_blocks[0]]


def fill(session: Session, request_id: str, num_blocks: int, first: int = 5000) -> list[int]:
    """Take so many blocks for other content, and leave them in use."""
    return table(admit(session, request_id, range(first, first + 4 * num_blocks)))


def written(session: Session, request_id: str, prompt: Any = PROMPT) -> list[int]:
    """A prompt admitted, computed, confirmed, and over: its full blocks are hits for all."""
    blocks = table(admit(session, request_id, prompt))
    tokens = prompt.tokens if isinstance(prompt, Content) else prompt
    assert session.cache_blocks(request_id, len(tokens))
    assert session.free(request_id).known
    end_step(session)
    return blocks


def wait_for(condition: Callable[[], object]) -> None:
    """Until it is true, or raises."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def end_step(session: Session) -> None:
    """Blocks that were freed before are everybody's now."""
    assert not session.free("nobody").known


def mark_blocks(pool: Pool, block_ids: list[int], values: list[int]) -> None:
    """Fill each block with a byte of its own."""
    for layer in pool.layer_names:
        view = pool.layer_bytes(layer)
        for block_id, value in zip(block_ids, values, strict=True):
            view[block_id] = value


def stored_hashes(client: Client) -> list[bytes]:
    """What everybody can read, parents first."""
    found: list[bytes] = []
    with client.stream_events(snapshot=True) as batches:
        for batch in batches:
            for event in batch.events:
                if isinstance(event, BlockStored):
                    found += event.block_hashes
            if batch.snapshot_end:
                break
    return found
