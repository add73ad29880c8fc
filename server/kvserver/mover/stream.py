"""PullBlocks, from the peer's data address into our pages. Always there."""

from __future__ import annotations

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
    task.file.check()
    view, size, data = task.file.view, copy.block_bytes, frame.data
    right = np.ones(len(batch), bool)
    for number, block_id in enumerate(copy.destination_ids[batch].tolist()):
        begin = number * size
        if task.checksums:
            block = data[begin : begin + size]
            if not frame.checksums or xxhash.xxh3_64_intdigest(block) != frame.checksums[number]:
                right[number] = False
                continue
        for span in copy.destination:
            at = span.offset + block_id * span.stride
            view[at : at + span.nbytes] = data[begin : begin + span.nbytes]
            begin += span.nbytes
    task.finished(copy, batch[right], int(len(batch) - right.sum()))
