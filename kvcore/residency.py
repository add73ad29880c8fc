"""How long sampled blocks live, lie idle, and wait for their next use."""

from __future__ import annotations

import itertools
import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcore.block import KVCacheBlock

ACCESSES_KEPT = 4


@dataclass(frozen=True, slots=True)
class Eviction:
    """One sampled block's life, in seconds. Gaps are between its last accesses."""

    lifetime_seconds: float
    idle_seconds: float
    reuse_gaps_seconds: tuple[float, ...]


class ResidencySampler:
    """Follows a share of the blocks, as vLLM's v1/core/kv_cache_metrics.py.

    ``sample_rate`` in (0, 1]. At most ``max_evictions`` undrained evictions are
    kept, the newest.
    """

    def __init__(
        self,
        sample_rate: float,
        *,
        max_evictions: int = 65536,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        assert 0.0 < sample_rate <= 1.0
        self._log_passed_over = math.log1p(-sample_rate) if sample_rate < 1 else -math.inf
        self._clock = clock
        self._random = random.Random(seed)
        # Of the sampled blocks, by id. Public for the pool's loops, which may not afford
        # a call for each block that is not sampled.
        self.births: dict[int, float] = {}
        self._accesses: dict[int, deque[float]] = {}
        self._evictions: deque[Eviction] = deque(maxlen=max_evictions)
        # Blocks to pass over until the next one that is sampled.
        self._num_passed_over = self._draw()

    def on_taken(self, blocks: Sequence[KVCacheBlock]) -> None:
        """The blocks were given to a request."""
        position = self._num_passed_over
        while position < len(blocks):
            block_id = blocks[position].block_id
            self.births[block_id] = self._clock()
            self._accesses[block_id] = deque(maxlen=ACCESSES_KEPT)
            position += 1 + self._draw()
        self._num_passed_over = position - len(blocks)

    def on_touched(self, block: KVCacheBlock) -> None:
        """The block was hit."""
        accesses = self._accesses.get(block.block_id)
        if accesses is not None:
            accesses.append(self._clock())

    def on_evicted(self, block: KVCacheBlock) -> None:
        """The block is about to be given to somebody else, or lost its content."""
        birth = self.births.pop(block.block_id, None)
        if birth is None:
            return
        accesses = list(self._accesses.pop(block.block_id))
        now = self._clock()
        self._evictions.append(
            Eviction(
                lifetime_seconds=now - birth,
                idle_seconds=now - (accesses[-1] if accesses else birth),
                reuse_gaps_seconds=tuple(
                    later - earlier for earlier, later in itertools.pairwise(accesses)
                ),
            )
        )

    def _draw(self) -> int:
        """How many blocks to pass over, so that each is sampled with the same chance."""
        num_blocks = math.log(1.0 - self._random.random()) / self._log_passed_over
        return int(min(num_blocks, sys.maxsize))

    def reset(self) -> None:
        """Forget everything."""
        self.births.clear()
        self._accesses.clear()
        self._evictions.clear()

    def drain(self) -> list[Eviction]:
        """The evictions since the last drain."""
        evictions = list(self._evictions)
        self._evictions.clear()
        return evictions
