"""Where a depot stands, in figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcore.session import Session

if TYPE_CHECKING:
    from kvcore.depot import Depot


@dataclass(frozen=True, slots=True)
class DepotStats:
    """Where the pool stands. Token counts are since the start."""

    num_blocks: int
    live: int
    cached: int
    pinned: int
    in_transfer: int
    quarantined: int
    free: int
    usage: float
    num_sessions: int
    num_requests: int
    # Over, and held by workers that were attached under them.
    num_departed_sessions: int
    # Attached under open and departed sessions.
    num_workers: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preempted_queries: int
    preempted_hits: int
    evictions: int
    refusals: int
    generation: int
    reset_pending: bool


def depot_stats(depot: Depot) -> DepotStats:
    """Costs time per session, and per block held back."""
    states = depot.pool.states()
    lookups = depot.past_lookups
    for session in depot.sessions.values():
        lookups = add_lookups(session, lookups)
    return DepotStats(
        num_blocks=len(depot.pool.blocks),
        live=states.live,
        cached=states.cached,
        pinned=states.pinned,
        in_transfer=states.in_transfer,
        quarantined=states.quarantined,
        free=states.free,
        usage=depot.pool.usage,
        num_sessions=len(depot.sessions),
        num_requests=sum(len(session.requests) for session in depot.sessions.values()),
        num_departed_sessions=len(depot.departed),
        num_workers=sum(
            session.num_workers for session in (*depot.sessions.values(), *depot.departed.values())
        ),
        prefix_cache_queries=lookups[0],
        prefix_cache_hits=lookups[1],
        preempted_queries=lookups[2],
        preempted_hits=lookups[3],
        evictions=depot.pool.num_evictions,
        refusals=depot.num_refusals,
        generation=depot.generation,
        reset_pending=depot.resets.drain is not None,
    )


def add_lookups(session: Session, before: list[int]) -> list[int]:
    """``before`` (queries, hits, and both of preempted requests) and the session's."""
    stats = session.manager.prefix_cache_stats
    counts = (stats.queries, stats.hits, stats.preempted_queries, stats.preempted_hits)
    return [past + count for past, count in zip(before, counts, strict=True)]
