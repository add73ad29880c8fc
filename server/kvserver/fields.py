"""The fields of a message, counted before it is read.

An empty message within another takes two bytes on the wire, hundreds in memory, and some
time: millions of them would hold up everybody, and no limit of the calls is asked before.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

from kvcore.errors import ResourceExhausted

Descriptor: TypeAlias = Any
"""Of a message; each implementation of protobuf has its own."""

FIELD_BYTES_MIN, FIELDS_FEW = 128, 1 << 16
"""A message may have one field for so many of the bytes that it may have, or so many if that
is more.
"""
_VARINT_BYTES_MAX = 10
_BYTE_MAX = 0x7F  # of a number of one byte
_VARINT, _FIXED64, _LENGTH, _GROUP, _GROUP_END, _FIXED32 = range(6)


def require_few_fields(raw: bytes, message: Descriptor, maximum: int) -> None:
    """ResourceExhausted if ``raw`` has more fields, those of messages within it included.

    What is no message is left to whoever reads it.
    """
    try:
        _count(raw, 0, len(raw), message, maximum)
    except _Malformed:
        return


class _Malformed(Exception):
    """From here on, nobody reads it."""


@cache
def _messages_within(message: Descriptor) -> dict[int, Descriptor]:
    return {
        field.number: field.message_type
        for field in message.fields
        if field.message_type is not None
    }


def _count(raw: bytes, at: int, stop: int, message: Descriptor | None, left: int) -> int:
    """How many of ``left`` fields remain after those of ``raw[at:stop]``."""
    within = {} if message is None else _messages_within(message)
    depth = 0  # of groups, none of which is known: what is in one is no field of the message
    while at < stop:
        if not left:
            raise ResourceExhausted(
                "the message has too many fields; send it in parts", reason="TOO_MANY_FIELDS"
            )
        left -= 1
        tag = raw[at]
        at += 1
        if tag > _BYTE_MAX:
            tag, at = _varint(raw, at - 1, stop)
        kind = tag & 7
        if kind == _LENGTH:
            # Of one byte mostly, which costs no call.
            length = raw[at] if at < stop else _BYTE_MAX + 1
            at += 1
            if length > _BYTE_MAX:
                length, at = _varint(raw, at - 1, stop)
            if length > stop - at:
                raise _Malformed
            inner = None if depth else within.get(tag >> 3)
            if inner is not None and length:
                left = _count(raw, at, at + length, inner, left)
            at += length
        elif kind == _VARINT:
            _, at = _varint(raw, at, stop)
        elif kind == _FIXED64:
            at += 8
        elif kind == _FIXED32:
            at += 4
        elif kind == _GROUP:
            depth += 1
        elif kind == _GROUP_END:
            depth -= 1
        else:
            raise _Malformed
    return left


def _varint(raw: bytes, at: int, stop: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = 0
    for shift in range(0, 7 * _VARINT_BYTES_MAX, 7):
        if at == stop:
            raise _Malformed
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _Malformed
