"""Sampled blocks: how long they live, lie idle, and wait for their next use."""

from __future__ import annotations

import pytest

from kvcore.block import KVCacheBlock
from kvcore.residency import ResidencySampler


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_block_s_life() -> None:
    clock = Clock()
    sampler = ResidencySampler(1.0, clock=clock)
    block, untouched = KVCacheBlock(1), KVCacheBlock(2)
    sampler.on_taken([block])
    sampler.on_taken([untouched])
    for clock.now in (1.0, 3.0, 4.0, 8.0, 16.0):
        sampler.on_touched(block)
    clock.now = 20.0
    sampler.on_evicted(block)
    sampler.on_evicted(untouched)
    first, second = sampler.drain()
    assert (first.lifetime_seconds, first.idle_seconds) == (20.0, 4.0)
    # Of the last four accesses.
    assert first.reuse_gaps_seconds == (1.0, 4.0, 8.0)
    assert (second.lifetime_seconds, second.idle_seconds, second.reuse_gaps_seconds) == (20, 20, ())
    assert sampler.drain() == []
    # Its life is over: another eviction of the same block says nothing.
    sampler.on_evicted(block)
    assert sampler.drain() == []


def test_samples_a_share_and_keeps_the_newest() -> None:
    sampler = ResidencySampler(0.25, max_evictions=100, seed=1)
    for block_id in range(4000):
        block = KVCacheBlock(block_id)
        sampler.on_taken([block])
        sampler.on_evicted(block)
    assert len(sampler.drain()) == 100

    counted = ResidencySampler(0.25, seed=1)
    for block_id in range(4000):
        block = KVCacheBlock(block_id)
        counted.on_taken([block])
        counted.on_evicted(block)
    assert len(counted.drain()) == pytest.approx(1000, rel=0.1)


def test_reset_forgets() -> None:
    sampler = ResidencySampler(1.0)
    block = KVCacheBlock(1)
    sampler.on_taken([block])
    sampler.reset()
    sampler.on_evicted(block)
    assert sampler.drain() == []
