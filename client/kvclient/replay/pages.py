"""The bytes of one KV cache group: rows written, and read again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvclient.pool import Pool
from kvclient.replay.errors import WrongBytes
from kvclient.replay.pattern import Values
from kvclient.replay.rows import GroupRows
from kvclient.slots import NULL_BLOCK

_ROWS_AT_ONCE = 1 << 13  # bounds the temporary copies


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of a request in one group, with the blocks that hold them."""

    request_id: str
    start: int
    values: Values
    block_ids: Sequence[int]
    """The blocks from the one that holds ``start``."""
    group: int = 0


class GroupPages:
    """One group's layers in a mapped pool."""

    def __init__(
        self, pool: Pool, rows: GroupRows, *, verify_sample: float, rng: random.Random
    ) -> None:
        self.rows = rows
        self.block_size = rows.rows_per_block
        self._verify_sample = verify_sample
        self._rng = rng
        self._layers = [
            (pool.layer_bytes(layer.name).view(np.uint64), layer.salts) for layer in rows.layers
        ]

    def null_block(self) -> bytes:
        """What stands in the null block, which nobody writes."""
        return b"".join(pages[NULL_BLOCK].tobytes() for pages, _ in self._layers)

    def write(self, spans: list[Span]) -> None:
        """Fill rows. WrongBytes for one that has no block of its own."""
        single: list[Span] = []
        for span in spans:
            self._require_blocks(span, "the null block would be written")
            whole, parts = self._cut(span)
            single += parts
            for blocks, values in self._chunks(whole):
                for pages, constants in self._layers:
                    pages[blocks] = values[:, None, :, None] ^ constants[:, None, :]
        if not single:
            return
        # The decoded tokens of all requests at once.
        places = [self._places(span) for span in single]
        index = np.concatenate([place[0] for place in places])
        offsets = np.concatenate([place[1] for place in places])
        column = np.concatenate([span.values for span in single])[:, None]
        for pages, constants in self._layers:
            for part, words in enumerate(constants):
                pages[index, part, offsets] = column ^ words

    def verify(self, span: Span, what: str) -> int:
        """Read a sample of the span's blocks; answers how many. Raises WrongBytes."""
        self._require_blocks(span, "the null block stands where the attention looks")
        read = 0
        for piece in self._sampled(span):
            whole, parts = self._cut(piece)
            row = whole.start
            for blocks, values in self._chunks(whole):
                for pages, constants in self._layers:
                    wrong = pages[blocks] ^ constants[:, None, :] != values[:, None, :, None]
                    if wrong.any():
                        at = int(wrong.any(axis=(1, 3)).argmax())
                        raise self._wrong(span, row + at, int(blocks[at // self.block_size]), what)
                row += values.size
            for part in parts:
                index, offsets = self._places(part)
                for pages, constants in self._layers:
                    for half, words in enumerate(constants):
                        found = pages[index, half, offsets] ^ words
                        wrong = (found != part.values[:, None]).any(axis=1)
                        if wrong.any():
                            at = int(wrong.argmax())
                            raise self._wrong(span, part.start + at, int(index[at]), what)
            read += len(piece.block_ids)
        return read

    def require_zeros_behind(self, span: Span, what: str) -> None:
        """WrongBytes if anything lies behind the span in its last block."""
        stop = span.start + len(span.values)
        offset = stop % self.block_size
        if offset and any(pages[span.block_ids[-1], :, offset:].any() for pages, _ in self._layers):
            raise self._wrong(span, stop, span.block_ids[-1], what)

    def split(self, span: Span, filled: set[int]) -> tuple[Span, Span | None]:
        """A span up to its first block in ``filled``, and from there on."""
        for index, block_id in enumerate(span.block_ids):
            if block_id in filled:
                cut = max(0, (span.start // self.block_size + index) * self.block_size - span.start)
                request_id, group = span.request_id, span.group
                return (
                    Span(request_id, span.start, span.values[:cut], span.block_ids[:index], group),
                    Span(
                        request_id,
                        span.start + cut,
                        span.values[cut:],
                        span.block_ids[index:],
                        group,
                    ),
                )
        return span, None

    def _require_blocks(self, span: Span, what: str) -> None:
        for index, block_id in enumerate(span.block_ids):
            if block_id == NULL_BLOCK:
                row = max(span.start, (span.start // self.block_size + index) * self.block_size)
                raise self._wrong(span, row, NULL_BLOCK, what)

    def _wrong(self, span: Span, row: int, block_id: int, what: str) -> WrongBytes:
        position = row * self.rows.tokens_per_row
        return WrongBytes(span.request_id, self.rows.group, position, block_id, what)

    def _sampled(self, span: Span) -> Iterator[Span]:
        """All of the span, or those of its blocks that the sample takes."""
        if self._verify_sample >= 1:
            yield span
            return
        size = self.block_size
        first = span.start // size
        for index, block_id in enumerate(span.block_ids):
            if self._rng.random() < self._verify_sample:
                start = max(span.start, (first + index) * size)
                stop = (first + index + 1) * size
                values = span.values[start - span.start : stop - span.start]
                yield Span(span.request_id, start, values, [block_id], span.group)

    def _cut(self, span: Span) -> tuple[Span, list[Span]]:
        """The whole blocks of the span, and what sticks out before and behind them."""
        size, start, stop = self.block_size, span.start, span.start + len(span.values)
        head_stop = min(-(-start // size) * size, stop)
        tail_start = max(stop // size * size, head_stop)
        parts = [
            Span(
                span.request_id,
                begin,
                span.values[begin - start : end - start],
                span.block_ids[begin // size - start // size :],
                span.group,
            )
            for begin, end in ((head_stop, tail_start), (start, head_stop), (tail_start, stop))
        ]
        return parts[0], [part for part in parts[1:] if len(part.values)]

    def _chunks(self, whole: Span) -> Iterator[tuple[npt.NDArray[np.int64], Values]]:
        """Block ids, and the values of their rows in a row each; some at a time."""
        size = self.block_size
        count = max(1, _ROWS_AT_ONCE // size)
        values = whole.values.reshape(-1, size)
        for begin in range(0, len(values), count):
            rows = values[begin : begin + count]
            yield np.asarray(whole.block_ids[begin : begin + len(rows)], np.int64), rows

    def _places(self, span: Span) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Block id and offset of each row of the span."""
        positions = np.arange(span.start, span.start + len(span.values), dtype=np.int64)
        table = np.asarray(span.block_ids, np.int64)
        return (
            table[positions // self.block_size - span.start // self.block_size],
            positions % self.block_size,
        )
