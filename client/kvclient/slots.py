"""Block tables and slot mappings, as attention kernels take them. Plain lists.

A slot is a token's place in the pool: ``block_id * block_size + offset``. Where a table
holds the null block (id 0) nothing is kept: such tokens have no slot, but -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from kvclient.errors import InvalidArgument

SLOT_PADDING = -1
TABLE_PADDING = NULL_BLOCK = 0


def slot_mapping(
    block_ids: Sequence[int],
    block_size: int,
    start: int,
    num_tokens: int,
    pad_to: int | None = None,
) -> list[int]:
    """Slots of the tokens ``start`` to ``start + num_tokens``, padded with -1 to ``pad_to``.

    ``block_ids`` is the request's whole table. ValueError when it is too short for
    the tokens, or ``pad_to`` is less than ``num_tokens``.
    """
    if block_size <= 0 or start < 0 or num_tokens < 0:
        raise ValueError("block_size must be positive, start and num_tokens not negative")
    end = start + num_tokens
    if end > len(block_ids) * block_size:
        raise ValueError(f"{len(block_ids)} blocks of {block_size} tokens do not hold {end} tokens")
    padding = 0 if pad_to is None else pad_to - num_tokens
    if padding < 0:
        raise ValueError(f"{num_tokens} tokens cannot be padded to {pad_to}")
    slots: list[int] = []
    while start < end:
        offset = start % block_size
        run = min(block_size - offset, end - start)
        block_id = block_ids[start // block_size]
        if block_id == NULL_BLOCK:
            slots.extend([SLOT_PADDING] * run)
        else:
            first = block_id * block_size + offset
            slots.extend(range(first, first + run))
        start += run
    slots.extend([SLOT_PADDING] * padding)
    return slots


def block_table(tables: Sequence[Sequence[int]], width: int | None = None) -> list[list[int]]:
    """One row a request, padded with 0 to ``width`` (default: the longest row).

    ValueError when a row is longer.
    """
    if width is None:
        width = max((len(row) for row in tables), default=0)
    for row in tables:
        if len(row) > width:
            raise ValueError(f"a table of {len(row)} blocks is wider than {width}")
    return [[*row, *[TABLE_PADDING] * (width - len(row))] for row in tables]


def checked_tables(tables: Sequence[Sequence[int]], num_blocks: int) -> list[list[int]]:
    """One row of block ids a request, as lists. InvalidArgument for any other shape."""
    if not _is_list(tables):
        raise _wrong_shape("tables", tables)
    return [_checked_row(row, f"tables[{i}]", num_blocks) for i, row in enumerate(tables)]


def checked_counts(counts: Sequence[int], num_rows: int, field: str) -> list[int]:
    """One number a request, none negative. InvalidArgument for anything else."""
    if not _is_list(counts) or len(counts) != num_rows:
        found = f"{len(counts)} entries" if _is_list(counts) else repr(counts)
        raise InvalidArgument(
            f"{field} must have one number a row of tables, {num_rows} in all; got {found}",
            field=field,
        )
    numbers = []
    for i, count in enumerate(counts):
        try:
            numbers.append(index(count))
        except TypeError:
            numbers.append(-1)
        if numbers[-1] < 0:
            raise InvalidArgument(
                f"{field}[{i}] must be a whole number, not negative; got {count!r}",
                field=f"{field}[{i}]",
            )
    return numbers


def _checked_row(row: Any, field: str, num_blocks: int) -> list[int]:
    if not _is_list(row):
        raise _wrong_shape(field, row)
    try:
        ids = list(map(index, row))
    except TypeError:
        raise _wrong_shape(field, row) from None
    if ids and not 0 <= min(ids) <= max(ids) < num_blocks:
        wrong = next(block_id for block_id in ids if not 0 <= block_id < num_blocks)
        raise InvalidArgument(
            f"{field}: block {wrong} is not one of 0 to {num_blocks - 1}", field=field
        )
    return ids


def _is_list(value: Any) -> bool:
    """Lists, tuples, arrays and tensors of one dimension or more."""
    return (
        hasattr(value, "__len__")
        and getattr(value, "ndim", 1) > 0
        and not isinstance(value, (str, bytes, dict))
    )


def _wrong_shape(field: str, value: Any) -> InvalidArgument:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return InvalidArgument(
        f"{field}: tables are a list of rows, a request each, of whole block ids of one KV cache "
        f"group; of a request's tables take one, tables[group]. Got {shown}",
        field=field,
    )
