"""Pools on devices, moved by way of host memory, or from device to device.

What is here needs torch and no CUDA but for ``open_devices`` and pinning: it is tested on the
CPU's tensors, and has not run on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvclient import convert_pool
from kvclient.description import TensorView
from kvclient.mapping import open_mapping
from kvcore.errors import InvalidArgument
from kvdepot.v1 import types_pb2
from kvserver.mover.pages import checksum, spans_of

STAGING_BYTES = 4 << 20


def on_devices(pool: types_pb2.PoolDescription) -> bool:
    """Whether every rank's bytes are on a CUDA device."""
    return bool(pool.mappings) and all(m.HasField("cuda_ipc") for m in pool.mappings)


def open_devices(pool: types_pb2.PoolDescription) -> list[Any]:
    """All bytes of each rank, a uint8 tensor, mapped by CUDA IPC.

    FailedPrecondition, of ``kvclient``, where this process does not see a device.
    """
    return [
        open_mapping(convert_pool.pool_mapping(mapping)).tensor(
            TensorView("", "uint8", (mapping.num_bytes,), (1,), 0)
        )
        for mapping in pool.mappings
    ]


@dataclass(frozen=True, slots=True)
class _Group:
    """Of every rank, for each span, blocks first: its words, and where they are in a block."""

    views: Sequence[Sequence[tuple[Any, int, int]]]
    dtype: Any


class _Staging:
    """Blocks of one rank on their way: on the device, and in memory that it copies fast.

    That memory is pinned, and of no use between devices: it is made when first asked for.
    """

    def __init__(self, device: Any, nbytes: int) -> None:
        import torch

        self.there = torch.empty(nbytes, dtype=torch.uint8, device=device)

    @cached_property
    def here(self) -> Any:
        import torch

        pinned = self.there.device.type == "cuda"
        return torch.empty(self.there.numel(), dtype=torch.uint8, pin_memory=pinned)

    @cached_property
    def view(self) -> memoryview:
        return memoryview(self.here.numpy())


class PoolDevices:
    """A Store over ``tensors``: of each rank all its bytes, as uint8.

    For use from any thread, but for ``blocks``, whose answer lies in memory that all share.
    """

    def __init__(self, pool: types_pb2.PoolDescription, tensors: Sequence[Any]) -> None:
        self.spans = spans_of(pool)
        rank_bytes = [sum(span.nbytes for span in spans) for spans in self.spans]
        self.block_bytes = [len(tensors) * nbytes for nbytes in rank_bytes]
        self.num_ranks = len(tensors)
        self.tensors = tensors
        self._num_blocks = pool.num_blocks
        self._rank_bytes = rank_bytes
        self._groups = [self._views(group) for group in range(len(self.spans))]
        self._staging_bytes = max(STAGING_BYTES, *rank_bytes, 1)
        self._staging = [_Staging(tensor.device, self._staging_bytes) for tensor in tensors]
        self._lock = threading.RLock()

    def check(self) -> None:
        """Nothing can be told of them without touching them."""

    def step(self, group: int) -> int:
        """How many blocks are staged at once."""
        return self._staging_bytes // max(1, self._rank_bytes[group])

    def blocks(self, group: int, block_ids: Sequence[int]) -> list[list[memoryview]]:
        """As Store's; InvalidArgument for more than are staged at once."""
        size = self._rank_bytes[group]
        if len(block_ids) > self.step(group):
            raise InvalidArgument(f"{len(block_ids)} blocks are too many at once", field="blocks")
        with self._lock:
            for rank in range(len(self.tensors)):
                gathered = self._gather(rank, group, block_ids)
                self._words(self._staging[rank].here, group, len(block_ids)).copy_(gathered)
            views = [staging.view for staging in self._staging]
        return [
            [view[number * size : (number + 1) * size] for view in views]
            for number in range(len(block_ids))
        ]

    def checksums(self, group: int, block_ids: Sequence[int]) -> list[int]:
        """As Store's."""
        sums: list[int] = []
        for begin, end in self._steps(group, len(block_ids)):
            with self._lock:
                sums += [checksum(pages) for pages in self.blocks(group, block_ids[begin:end])]
        return sums

    def write(self, group: int, block_ids: Sequence[int], data: Sequence[memoryview]) -> None:
        """As Store's."""
        size = self._rank_bytes[group]
        for begin, end in self._steps(group, len(block_ids)):
            with self._writing():
                for rank, staging in enumerate(self._staging):
                    host = staging.view
                    for number, block in enumerate(data[begin:end]):
                        host[number * size : (number + 1) * size] = block[
                            rank * size : (rank + 1) * size
                        ]
                    there = self._words(staging.there, group, end - begin)
                    there.copy_(self._words(staging.here, group, end - begin))
                    self._scatter(rank, group, block_ids[begin:end], there)

    def copy_from(
        self, peer: PoolDevices, group: int, sources: Sequence[int], destinations: Sequence[int]
    ) -> None:
        """Blocks of ``peer`` into ours, from device to device, in whichever layouts."""
        for begin, end in self._steps(group, len(sources)):
            with self._writing():
                for rank, staging in enumerate(self._staging):
                    gathered = peer._gather(rank, group, sources[begin:end])
                    there = self._words(staging.there, group, end - begin)
                    there.copy_(gathered.view(there.dtype))
                    self._scatter(rank, group, destinations[begin:end], there)

    # --- one rank ---------------------------------------------------------------------

    def _views(self, group: int) -> _Group:
        import torch

        spans = self.spans[group]
        whole = all((span.offset | span.stride | span.nbytes) % 8 == 0 for span in spans)
        dtype, width = (torch.int64, 8) if whole else (torch.uint8, 1)
        ranks = []
        for tensor in self.tensors:
            words = tensor[: tensor.numel() // width * width].view(dtype)
            views, begin = [], 0
            for span in spans:
                count = span.nbytes // width
                view = words.as_strided(
                    (self._num_blocks, count), (span.stride // width, 1), span.offset // width
                )
                views.append((view, begin, begin + count))
                begin += count
            ranks.append(views)
        return _Group(ranks, dtype)

    def _steps(self, group: int, num_blocks: int) -> Iterator[tuple[int, int]]:
        step = self.step(group)
        for begin in range(0, num_blocks, step):
            yield begin, min(num_blocks, begin + step)

    def _words(self, staging: Any, group: int, num_blocks: int) -> Any:
        """So many blocks of a staging area, ``[num_blocks, words]``."""
        nbytes = num_blocks * self._rank_bytes[group]
        return staging[:nbytes].view(self._groups[group].dtype).view(num_blocks, -1)

    def _gather(self, rank: int, group: int, block_ids: Sequence[int]) -> Any:
        """Blocks together, ``[num_blocks, words]``, on the rank's device."""
        staged = self._words(self._staging[rank].there, group, len(block_ids))
        index = self._index(rank, block_ids)
        for view, begin, end in self._groups[group].views[rank]:
            staged[:, begin:end] = view.index_select(0, index)
        return staged

    def _scatter(self, rank: int, group: int, block_ids: Sequence[int], staged: Any) -> None:
        index = self._index(rank, block_ids)
        for view, begin, end in self._groups[group].views[rank]:
            view.index_copy_(0, index, staged[:, begin:end])

    def _index(self, rank: int, block_ids: Sequence[int]) -> Any:
        import torch

        return torch.tensor(list(block_ids), dtype=torch.int64, device=self.tensors[rank].device)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Afterwards what was written is there, for every process: none lands later.

        Also of what failed: its other half may be on its way.
        """
        import torch

        with self._lock:
            try:
                yield
            finally:
                for tensor in self.tensors:
                    if tensor.device.type == "cuda":
                        torch.cuda.synchronize(tensor.device)
