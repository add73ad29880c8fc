"""The lazy facade: tables that always reach, no block for two, nothing left behind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvclient.facade import KVCacheManager
from lazy_scheduler import SmallScheduler
from test_facade import BLOCK_SIZE, FULL, MAX_MODEL_LEN, a_group

KINDS: dict[str, list[dict[str, Any]]] = {
    "full": [FULL],
    "windows": [
        FULL,
        a_group("sliding_window", sliding_window=9),
        a_group("sliding_window", sliding_window=14),
    ],
    "two-sizes": [
        a_group("full_attention", block_size=8),
        a_group("sliding_window", sliding_window=7),
    ],
    "chunks": [FULL, a_group("chunked_local_attention", attention_chunk_size=12)],
    "rswa": [a_group("rswa", rswa_window=6)],
    "mamba": [FULL, a_group("mamba", mamba_cache_mode="all")],
}
# Groups, blocks, steps in flight, drafts. In 30 blocks not all that runs fits.
WORKLOADS = {
    "full": ("full", 400, 1, 0),
    "full-unmarked": ("full", 400, None, 0),
    "full-short": ("full", 30, 1, 0),
    "full-ahead": ("full", 400, 2, 0),
    "full-ahead-short": ("full", 30, 2, 0),
    "full-drafts": ("full", 400, 1, 3),
    "full-drafts-short": ("full", 30, 1, 3),
    "windows": ("windows", 400, 1, 0),
    "windows-short": ("windows", 60, 2, 0),
    "two-sizes": ("two-sizes", 400, 1, 0),
    "two-sizes-short": ("two-sizes", 45, 1, 2),
    "chunks": ("chunks", 400, 1, 0),
    "chunks-short": ("chunks", 45, 2, 0),
    "rswa": ("rswa", 400, 1, 0),
    "rswa-short": ("rswa", 30, 1, 0),
    "mamba": ("mamba", 400, 1, 0),
}


def workload(server: Any, name: str, seed: int, *, strict: bool) -> SmallScheduler:
    """Runs it to its end; nothing may be left."""
    kind, _, steps_in_flight, num_drafts = WORKLOADS[name]
    sizes = tuple(group["block_size"] for group in KINDS[kind])
    with server.client() as client, client.open_session() as session:
        facade = KVCacheManager(session, strict=strict, steps_in_flight=steps_in_flight)
        scheduler = SmallScheduler(
            facade,
            seed,
            sizes=sizes,
            max_model_len=MAX_MODEL_LEN,
            depth=steps_in_flight or 1,
            num_drafts=num_drafts,
            # An early end draws on what is running, and that may differ.
            ends_early=not strict and name.endswith("short"),
        )
        scheduler.run()
        facade.settle()
        assert client.audit().violations == ()
        stats = client.stats()
        assert stats.num_requests == 0 and stats.blocks.live == 0
        assert facade.reset_prefix_cache() is True
        facade.close()
    return scheduler


@pytest.fixture(scope="module")
def server_of(serve: Any) -> Any:
    """A server for a workload, each kind started once."""
    servers: dict[Any, Any] = {}

    def server(name: str) -> Any:
        kind, num_blocks, *_ = WORKLOADS[name]
        if (kind, num_blocks) not in servers:
            servers[kind, num_blocks] = serve(
                num_blocks=num_blocks,
                max_model_len=MAX_MODEL_LEN,
                groups=json.dumps(KINDS[kind]),
                watermark=0,
                no_memory=True,
            )
        return servers[kind, num_blocks]

    return server


@pytest.mark.parametrize("name", [name for name in WORKLOADS if not name.endswith("short")])
def test_where_there_is_room_it_schedules_what_strict_does(server_of: Any, name: str) -> None:
    """Hits too, where tokens are known when their block is full."""
    lazy = workload(server_of(name), name, 1, strict=False)
    strict = workload(server_of(name), name, 1, strict=True)
    assert lazy.finished == strict.finished
    assert len(lazy.finished) == 40
    if WORKLOADS[name][2] != 2:
        assert lazy.trace == strict.trace


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", [name for name in WORKLOADS if name.endswith("short")])
def test_a_short_pool_preempts_and_goes_on(server_of: Any, name: str, seed: int) -> None:
    scheduler = workload(server_of(name), name, seed, strict=False)
    assert len(scheduler.finished) == 40
    assert scheduler.num_preempted > 0 or scheduler.num_refused > 0


assert BLOCK_SIZE == 4
