"""Every reply is lost once: what is left is, to the last block, what a good wire leaves."""

from __future__ import annotations

from typing import Any

import pytest

from fake_wire import Faults
from kvcore.block import KVCacheBlock
from kvcore.block_pool import BlockPool
from kvcore.depot import Depot
from kvcore.view import PoolView
from simulation import Simulation

NUM_CALLS = 120


def state(depot: Depot) -> dict[str, Any]:
    """All that a depot knows, but for the names that differ from run to run."""
    pool = depot.pool
    order = {session.view: number for number, session in enumerate(depot.sessions.values())}
    return {
        "tables": [
            {
                request.request_id: (
                    session.manager.get_block_ids(request.request_id),
                    bytes(request.tokens),
                    request.handle,
                    request.status,
                    request.num_computed_tokens,
                    request.num_confirmed_tokens,
                    request.remembered_hit_tokens,
                    request.num_preemptions,
                )
                for request in session.requests.values()
            }
            for session in depot.sessions.values()
        ],
        "tickets": [list(session.tickets) for session in depot.sessions.values()],
        "steps": [(s.view.step, s.view.completed_step) for s in depot.sessions.values()],
        "index": [
            [(key, [block.block_id for block in index.copies(key)]) for key in index.entries]
            for index in pool.indexes
        ],
        "free queue": pool.free_queue.block_ids(),
        "blocks": [
            (
                block.ref_cnt,
                block.block_hash,
                order.get(block.pending_view),
                [(order[view], step) for view, step in held(pool, block)],
            )
            for block in pool.blocks
        ],
        "counters": depot.stats(),
    }


def held(pool: BlockPool, block: KVCacheBlock) -> list[tuple[PoolView, int]]:
    """The views that hold the block back, and for which steps."""
    if block.block_id in pool.holds.by_block:
        return list(pool.holds.by_block[block.block_id].items())
    return [] if block.held_by is None else [(block.held_by, block.held_step)]


@pytest.mark.parametrize("seed", range(5))
def test_a_retry_storm_leaves_what_a_good_wire_leaves(seed: int) -> None:
    good = Simulation(seed, Faults())
    stormy = Simulation(seed, Faults(first_replies=True))
    good.run_in_turns(NUM_CALLS)
    stormy.run_in_turns(NUM_CALLS)
    assert good.judge.num_replayed == 0
    assert stormy.judge.num_replayed == NUM_CALLS
    assert state(stormy.node.depot) == state(good.node.depot)
    assert good.node.depot.stats().live > 0  # there was something to be equal
