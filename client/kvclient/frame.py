"""PullBlocksResponse, read by hand: protobuf's own way copies the data once more."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvclient.errors import InternalError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Frame:
    """``num_blocks`` blocks after ``first`` others: their bytes, checksums, or both."""

    first: int
    num_blocks: int
    data: memoryview
    checksums: Sequence[int]

    @property
    def block_bytes(self) -> int:
        """Of each block; 0 without data."""
        return len(self.data) // self.num_blocks if self.num_blocks else 0


def parse(message: bytes) -> Frame:
    """The message, without a copy of its data. InternalError if it is none."""
    view, end = memoryview(message), len(message)
    first = num_blocks = position = 0
    data = view[:0]
    checksums: Sequence[int] = ()
    try:
        while position < end:
            key, position = _varint(message, position)
            field, kind = key >> 3, key & 7
            if kind == _VARINT:
                value, position = _varint(message, position)
                if field == 1:
                    first = value
                elif field == 2:
                    num_blocks = value
                continue
            if kind == _BYTES:
                length, position = _varint(message, position)
            else:
                length = {_FIXED64: 8, _FIXED32: 4}[kind]
            content = view[position : position + length]
            position += length
            if len(content) != length:
                raise ValueError(length)
            if field == 3 and kind == _BYTES:
                data = content
            elif field == 4 and kind in (_BYTES, _FIXED64):
                checksums = (*checksums, *struct.unpack(f"<{length // 8}Q", content))
    except (ValueError, KeyError, IndexError, struct.error):
        raise _bad("a message of PullBlocks cannot be read") from None
    if len(checksums) not in (0, num_blocks) or (
        len(data) % num_blocks if num_blocks else len(data)
    ):
        raise _bad("the blocks' bytes do not match their number")
    return Frame(first, num_blocks, data, checksums)


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = message[position]
    position += 1
    if value < 0x80:
        return value, position
    value &= 0x7F
    shift = 7
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError(shift)


def _bad(message: str) -> InternalError:
    return InternalError(message, reason="BAD_REPLY")
