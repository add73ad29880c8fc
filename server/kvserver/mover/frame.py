"""PullBlocksResponse, written by hand: protobuf's own way copies the data three times."""

from __future__ import annotations

import struct
from collections.abc import Sequence

# Field numbers and wire types: first, num_blocks: varints; data, checksums: bytes.
_FIRST, _NUM_BLOCKS, _DATA, _CHECKSUMS = b"\x08", b"\x10", b"\x1a", b"\x22"


def frame(
    first: int, num_blocks: int, pages: Sequence[memoryview], checksums: Sequence[int]
) -> bytes:
    """The message, in which ``pages`` lie back to back: their only copy."""
    num_bytes = sum(map(len, pages))
    parts: list[bytes | memoryview] = [_FIRST + _varint(first) + _NUM_BLOCKS + _varint(num_blocks)]
    if checksums:
        packed = struct.pack(f"<{len(checksums)}Q", *checksums)
        parts.append(_CHECKSUMS + _varint(len(packed)) + packed)
    if num_bytes:
        parts.append(_DATA + _varint(num_bytes))
        parts += pages
    return b"".join(parts)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
