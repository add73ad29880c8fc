"""The bytes of a pool, as a process that moves them has them: in a file, or on devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcore.memory import Span
from kvdepot.v1 import types_pb2
from kvserver.mover.devices import PoolDevices, on_devices, open_devices
from kvserver.mover.pages import PoolFile


class Store(Protocol):
    """Blocks by KV cache group and id; of each its pages, rank by rank, layer by layer."""

    @property
    def spans(self) -> Sequence[Sequence[Span]]:
        """By group: where a block's pages lie, on every rank."""

    @property
    def block_bytes(self) -> Sequence[int]:
        """By group, of all ranks."""

    def check(self) -> None:
        """DataLoss if the bytes are gone."""

    def blocks(self, group: int, block_ids: Sequence[int]) -> list[list[memoryview]]:
        """The pages of each block, in host memory, until the next call of this thread's."""

    def checksums(self, group: int, block_ids: Sequence[int]) -> list[int]:
        """XXH3-64 of each block."""

    def write(self, group: int, block_ids: Sequence[int], data: Sequence[memoryview]) -> None:
        """Fill blocks, each with its bytes; they are there for every process when it returns."""


def copy_blocks(
    source: Store,
    destination: Store,
    group: int,
    sources: Sequence[int],
    destinations: Sequence[int],
) -> None:
    """Blocks of one store into another's, in whichever layouts, of as many ranks.

    From device to device, or, where one of them is a file, by way of pinned memory.
    """
    step = len(sources)
    if isinstance(source, PoolDevices):
        if isinstance(destination, PoolDevices):
            destination.copy_from(source, group, sources, destinations)
            return
        step = source.step(group)
    for begin in range(0, len(sources), max(1, step)):
        blocks = source.blocks(group, sources[begin : begin + step])
        data = [block[0] if len(block) == 1 else memoryview(b"".join(block)) for block in blocks]
        destination.write(group, destinations[begin : begin + step], data)


def open_store(pool: types_pb2.PoolDescription) -> Store:
    """The bytes, for reading and writing. An error of ``kvclient`` or the core if not."""
    if on_devices(pool):
        return PoolDevices(pool, open_devices(pool))
    return PoolFile(pool, writable=True)
