"""Where a pool's pages are in its file, and the file."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from kvcore.errors import DataLoss, InvalidArgument
from kvcore.memory import Span, joined
from kvdepot.v1 import types_pb2

_MADV_POPULATE_WRITE = 23
_TOUCH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of every block that lie together in two pools."""

    source: Span
    destination: Span

    @property
    def dtype(self) -> str:
        """The widest word, of numpy's, of which everything is a multiple."""
        a, b = self.source, self.destination
        return "u1" if (a.offset | a.stride | a.nbytes | b.offset | b.stride) % 8 else "<i8"


def file_of(pool: types_pb2.PoolDescription) -> types_pb2.PoolMapping | None:
    """The file of a pool; None of one on CUDA devices, or without bytes."""
    if len(pool.mappings) == 1 and pool.mappings[0].HasField("file"):
        return pool.mappings[0]
    return None


def spans_of(pool: types_pb2.PoolDescription) -> list[list[Span]]:
    """For each KV cache group, the spans that make up a block, in the order of its pages.

    InvalidArgument for a description by which a page would lie outside of the pool.
    """
    groups: list[list[Span]] = [[] for _ in pool.groups]  # a span a page
    pool_bytes = pool.mappings[0].num_bytes if pool.mappings else 0
    positions = [0] * len(groups)
    for layer in pool.layers:
        if layer.group >= len(groups):
            raise InvalidArgument(f"layer {layer.name!r} is of no group", field="layers")
        group = pool.groups[layer.group]
        specs, position = group.layer_specs, positions[layer.group]
        positions[layer.group] += 1
        nbytes = (specs[position] if position < len(specs) else group.spec).page_size_bytes
        offset, stride = layer.offset_bytes, layer.block_stride_bytes
        if offset + (pool.num_blocks - 1) * stride + nbytes > pool_bytes or nbytes > stride:
            raise InvalidArgument(f"layer {layer.name!r} lies outside of the pool", field="layers")
        groups[layer.group].append(Span(offset, stride, nbytes))
    return [joined(pages) for pages in groups]


def checksum(pages: Sequence[memoryview]) -> int:
    """XXH3-64 of a block's bytes."""
    if len(pages) == 1:
        return xxhash.xxh3_64_intdigest(pages[0])
    running = xxhash.xxh3_64()
    for page in pages:
        running.update(page)
    return running.intdigest()


def block_bytes(spans: Sequence[Span]) -> int:
    """Of one block."""
    return sum(span.nbytes for span in spans)


def pieces_of(source: Sequence[Span], destination: Sequence[Span]) -> list[Piece]:
    """What to copy for each block of a group, so that its bytes keep their order."""
    pieces = []
    left, right = list(reversed(source)), list(reversed(destination))
    while left and right:
        a, b = left.pop(), right.pop()
        nbytes = min(a.nbytes, b.nbytes)
        pieces.append(Piece(Span(a.offset, a.stride, nbytes), Span(b.offset, b.stride, nbytes)))
        for rest, span in ((left, a), (right, b)):
            if span.nbytes > nbytes:
                rest.append(Span(span.offset + nbytes, span.stride, span.nbytes - nbytes))
    if left or right:
        raise InvalidArgument("the blocks of both pools differ in size", field="fingerprint")
    return pieces


class PoolFile:
    """The mapping of a pool's file in this process."""

    def __init__(self, pool: types_pb2.PoolDescription, *, writable: bool) -> None:
        mapping = file_of(pool)
        if mapping is None:
            raise InvalidArgument("the pool's bytes are in no file", field="mappings")
        self.path = mapping.file.path
        self.nbytes = mapping.num_bytes
        self.num_blocks = pool.num_blocks
        self.spans = spans_of(pool)
        self.block_bytes = [block_bytes(spans) for spans in self.spans]
        flags = os.O_RDWR if writable else os.O_RDONLY
        # A peer may name anything: opening a pipe would wait for a writer.
        self.fd = os.open(self.path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.check()
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self.mapping = mmap.mmap(self.fd, self.nbytes, prot=access)
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(self.mapping)

    def check(self) -> None:
        """DataLoss if somebody cut the file short: whoever touches what is gone, dies."""
        size = self.status().st_size
        if size < self.nbytes:
            raise DataLoss(
                f"the pool's file {self.path} was cut short: it has {size} of {self.nbytes} bytes; "
                "restart the server",
                reason="MAPPING_TRUNCATED",
            )

    def touch(self) -> None:
        """Map every page ahead, at the lowest priority: the first write to each costs most.

        Where the kernel cannot (it is Linux 5.14's), the first writes are slower.
        """
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for begin in range(0, self.nbytes, _TOUCH_BYTES):
            part = ctypes.c_size_t(min(_TOUCH_BYTES, self.nbytes - begin))
            if libc.madvise(ctypes.c_void_p(address + begin), part, _MADV_POPULATE_WRITE):
                return

    def status(self) -> os.stat_result:
        """Of the file."""
        return os.fstat(self.fd)

    def array(self, span: Span, dtype: str) -> Any:
        """A numpy array over the span of every block, ``[num_blocks, words]``."""
        import numpy as np

        width = np.dtype(dtype).itemsize
        return np.ndarray(
            (self.num_blocks, span.nbytes // width),
            dtype,
            buffer=self.mapping,
            offset=span.offset,
            strides=(span.stride, width),
        )

    def blocks(self, group: int, block_ids: Sequence[int]) -> list[list[memoryview]]:
        """As Store's, without a copy."""
        view, found = self.view, []
        for block_id in block_ids:
            begins = [(span.offset + block_id * span.stride, span) for span in self.spans[group]]
            found.append([view[begin : begin + span.nbytes] for begin, span in begins])
        return found

    def checksums(self, group: int, block_ids: Sequence[int]) -> list[int]:
        """As Store's."""
        return [checksum(pages) for pages in self.blocks(group, block_ids)]

    def write(self, group: int, block_ids: Sequence[int], data: Sequence[memoryview]) -> None:
        """As Store's."""
        view, spans = self.view, self.spans[group]
        for block_id, block in zip(block_ids, data, strict=True):
            begin = 0
            for span in spans:
                at = span.offset + block_id * span.stride
                view[at : at + span.nbytes] = block[begin : begin + span.nbytes]
                begin += span.nbytes

    def close(self) -> None:
        """Unmap; nothing made of it may be in use."""
        self.view.release()
        self.mapping.close()
        os.close(self.fd)
