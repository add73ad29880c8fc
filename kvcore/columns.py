"""A Step's columns: little-endian bytes, one entry an operation."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from itertools import accumulate

from kvcore.errors import InvalidArgument
from kvcore.operation import Outcome
from kvcore.request import TOKEN_BYTES

_IS_LITTLE = sys.byteorder == "little" and array("i").itemsize == 4


def int32(column: bytes, name: str, count: int | None = None) -> tuple[int, ...]:
    """The integers. InvalidArgument unless they are whole, and ``count`` if that is given."""
    if len(column) % 4:
        raise InvalidArgument(f"{len(column)} bytes are not whole int32", field=name)
    if count is not None and len(column) != 4 * count:
        raise InvalidArgument(
            f"{len(column) // 4} entries, where the handles have {count}", field=name
        )
    return struct.unpack(f"<{len(column) // 4}i", column)


def uint8(column: bytes, name: str, count: int, default: int) -> bytes:
    """The column; if it is empty, ``count`` times the default."""
    if column and len(column) != count:
        raise InvalidArgument(f"{len(column)} entries, where the handles have {count}", field=name)
    return column or bytes((default,)) * count


def tokens_by_row(tokens: bytes, counts: Sequence[int]) -> Sequence[bytes]:
    """Each row's tokens; the counts sum to what there is."""
    if counts and counts.count(counts[0]) == len(counts):
        return struct.unpack(f"{TOKEN_BYTES * counts[0]}s" * len(counts), tokens)
    stops = [TOKEN_BYTES * stop for stop in accumulate(counts)]
    return [tokens[start:stop] for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


def outcomes(column: bytearray) -> bytes:
    """The column; empty if all are OK."""
    return b"" if column.count(Outcome.OK) == len(column) else bytes(column)


def little_endian(column: array[int]) -> bytes:
    """The column of int32 as it travels."""
    return column.tobytes() if _IS_LITTLE else struct.pack(f"<{len(column)}i", *column)
