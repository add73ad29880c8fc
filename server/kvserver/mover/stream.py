"""PullBlocks, from the peer's data address into our pages. Always there."""

from __future__ import annotations

from itertools import compress
from operator import eq
from typing import Any

import numpy as np
import xxhash

from kvclient.frame import Frame
from kvserver.mover.copying import Copy, PathFailed, Task


def run(task: Task) -> None:
    """Pull what is left. PathFailed when other blocks come."""
    for copy in task.copies:
        left = copy.left()
        if not len(left):
            continue
        request = task.request(copy, checksums=task.checksums)
        num_blocks = 0
        frames = task.peer.pull(task.reach.data_address, request, task.seconds_left())
        for frame in frames:
            batch = left[num_blocks : num_blocks + frame.num_blocks]
            num_blocks += frame.num_blocks
            if len(batch) != frame.num_blocks or frame.block_bytes != copy.block_bytes:
                raise PathFailed("BAD_PEER: it sent other blocks than those asked for")
            task.check(len(frame.data))
            _store(task, copy, batch, frame)
        if num_blocks != len(left):
            raise PathFailed("BAD_PEER: it sent too few blocks")


def _store(task: Task, copy: Copy, batch: Any, frame: Frame) -> None:
    task.store.check()
    size, good = copy.block_bytes, batch
    blocks = [frame.data[at : at + size] for at in range(0, len(frame.data), size)]
    if task.checksums:
        sums = [xxhash.xxh3_64_intdigest(block) for block in blocks]
        right = np.array([*map(eq, sums, frame.checksums)], bool)
        if len(right) < len(blocks):
            raise PathFailed("BAD_PEER: it sent too few checksums")
        # What it sums as it sends proves the way; what it had summed before, its own bytes, too.
        known = copy.sums[batch]
        right &= (known == 0) | (known == np.array(sums, np.uint64))
        good, blocks = batch[right], [*compress(blocks, right)]
    task.store.write(copy.group, copy.destination_ids[good].tolist(), blocks)
    task.finished(copy, good, len(batch) - len(good))
