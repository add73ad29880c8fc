"""A block that several sessions released waits for the last of their steps, however it came
to be free.
"""

from __future__ import annotations

from building import config
from kvcore.block_pool import BlockPool
from kvcore.check import check
from kvcore.manager import KVCacheManager
from kvcore.view import PoolView


def make_pool(num_views: int) -> tuple[BlockPool, list[PoolView]]:
    """Four blocks, and views that are in step 1."""
    pool = BlockPool(config(5).kv_cache)
    views = [pool.open_view() for _ in range(num_views)]
    for view in views:
        view.begin_step(1, 0)
    return pool, views


def free_for(pool: BlockPool, views: list[PoolView]) -> list[int]:
    """What each view can take, once the counts are known to be right."""
    assert check(KVCacheManager(config(5), pool, views[0])) == []
    return [pool.num_free_blocks(view) for view in views]


def test_a_shared_block_waits_for_all_who_released_it() -> None:
    pool, views = make_pool(3)
    first, second, third = views
    blocks = pool.take(1, first)
    pool.touch(blocks)
    pool.free(blocks, first)
    assert pool.holds.num_kept == 1
    pool.free(blocks, second)
    # Two wait for it, so neither may take it before the other's step has completed.
    assert free_for(pool, views) == [3, 3, 3]
    assert blocks[0].held_by is pool.holds.several
    second.begin_step(2, 1)
    assert free_for(pool, views) == [4, 3, 3]
    third.begin_step(2, 1)
    assert free_for(pool, views) == [4, 3, 3]
    first.begin_step(2, 1)
    assert free_for(pool, views) == [4, 4, 4]


def test_the_last_to_release_may_have_completed_first() -> None:
    pool, views = make_pool(2)
    first, second = views
    blocks = pool.take(1, first)
    pool.touch(blocks)
    pool.free(blocks, first)
    second.begin_step(1, 1)
    pool.free(blocks, second)
    assert free_for(pool, views) == [4, 3]
    first.begin_step(1, 1)
    assert free_for(pool, views) == [4, 4]


def test_a_hit_does_not_end_what_a_block_waits_for() -> None:
    pool, views = make_pool(2)
    first, second = views
    blocks = pool.take(1, first)
    pool.free(blocks, first)
    assert free_for(pool, views) == [4, 3]
    pool.touch(blocks)
    assert (pool.holds.num_kept, free_for(pool, views)) == (1, [3, 3])
    second.begin_step(1, 1)
    pool.free(blocks, second)
    assert (pool.holds.num_kept, free_for(pool, views)) == (0, [4, 3])
    # In use again, and first's step completes meanwhile: nothing is left to wait for.
    pool.touch(blocks)
    first.begin_step(1, 1)
    pool.free(blocks, second)
    assert free_for(pool, views) == [4, 4]
