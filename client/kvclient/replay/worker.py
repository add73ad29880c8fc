"""What a model worker does to the pool: writes computed tokens, reads hits.

It stands for the forward pass. A step's hits are read before its tokens are written, and
steps run in order, as on a device.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvclient.attachment import Attachment
from kvclient.pool import Pool
from kvclient.replay.pattern import WORD_BYTES, Values, salts

_TOKENS_AT_ONCE = 1 << 13  # bounds the temporary copies
_WRONG_HIT = "a hit holds other bytes than its prefix demands"


class WrongBytes(Exception):
    """A slot does not hold what its token prefix demands."""

    def __init__(self, request_id: str, position: int, block_id: int, what: str) -> None:
        super().__init__(f"request {request_id}: token {position}, block {block_id}: {what}")
        self.request_id = request_id
        self.position = position
        self.block_id = block_id
        self.what = what

    def __reduce__(self) -> tuple[object, ...]:
        return WrongBytes, (self.request_id, self.position, self.block_id, self.what)


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of a request, with the blocks that hold them."""

    request_id: str
    start: int
    values: Values
    block_ids: Sequence[int]
    """The blocks from the one that holds ``start``."""


@dataclass(slots=True)
class StepWork:
    """One step: hits to verify, tokens to write, and then finished requests to read again."""

    step: int = 0
    hits: list[Span] = field(default_factory=list)
    writes: list[Span] = field(default_factory=list)
    finished: list[Span] = field(default_factory=list)


class Worker:
    """Executes steps on a mapped pool of one group; ``attachment``: while it is attached."""

    def __init__(
        self,
        pool: Pool,
        *,
        attachment: Attachment | None = None,
        verify_sample: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.blocks_verified = 0
        self.blocks_reread = 0
        self.tokens_written = 0
        self.block_size = pool.block_size
        self._attachment = attachment
        self._verify_sample = verify_sample
        self._rng = random.Random(seed)
        layers = [pool.layer_bytes(name) for name in pool.layer_names]
        token_bytes = layers[0].shape[-1]
        if token_bytes % WORD_BYTES:
            raise ValueError(f"K of a token has {token_bytes} bytes, no multiple of {WORD_BYTES}")
        self._layers = [layer.view(np.uint64) for layer in layers]
        self._salts = salts(len(layers), token_bytes)

    def execute(self, work: StepWork) -> None:
        """Do one step. Raises WrongBytes, and what ``Attachment.check`` does.

        Blocks that this very step fills for one request and hits for another are read
        after the writes, as attention reads them; all other hits before.
        """
        if self._attachment is not None:
            self._attachment.check()
        filled = {block_id for span in work.writes for block_id in span.block_ids}
        late: list[Span] = []
        for span in work.hits:
            old, new = self._split(span, filled)
            self.blocks_verified += self._verify(old, _WRONG_HIT)
            if new is not None:
                late.append(new)
        self._write(work.writes)
        for span in late:
            self.blocks_verified += self._verify(span, _WRONG_HIT)
        for span in work.finished:
            self.blocks_reread += self._verify(span, "its computed bytes were lost before its end")

    def _split(self, span: Span, filled: set[int]) -> tuple[Span, Span | None]:
        """A hit, from position 0, up to its first block in ``filled``, and from there on."""
        for index, block_id in enumerate(span.block_ids):
            if block_id in filled:
                cut = index * self.block_size
                return (
                    Span(span.request_id, 0, span.values[:cut], span.block_ids[:index]),
                    Span(span.request_id, cut, span.values[cut:], span.block_ids[index:]),
                )
        return span, None

    def _write(self, spans: list[Span]) -> None:
        single: list[Span] = []
        for span in spans:
            whole, parts = self._cut(span)
            single += parts
            for blocks, values in self._chunks(whole):
                for layer, constants in zip(self._layers, self._salts, strict=True):
                    layer[blocks] = values[:, None, :, None] ^ constants[:, None, :]
            self.tokens_written += len(span.values)
        if not single:
            return
        # The decoded tokens of all requests at once.
        places = [self._places(span) for span in single]
        index = np.concatenate([place[0] for place in places])
        offsets = np.concatenate([place[1] for place in places])
        column = np.concatenate([span.values for span in single])[:, None]
        for layer, constants in zip(self._layers, self._salts, strict=True):
            for half in (0, 1):
                layer[index, half, offsets] = column ^ constants[half]

    def _verify(self, span: Span, what: str) -> int:
        """Reads a sample of the span's blocks; answers how many."""
        read = 0
        for piece in self._sampled(span):
            whole, parts = self._cut(piece)
            position = whole.start
            for blocks, values in self._chunks(whole):
                for layer, constants in zip(self._layers, self._salts, strict=True):
                    found = layer[blocks] ^ constants[:, None, :]
                    wrong = found != values[:, None, :, None]
                    if wrong.any():
                        at = int(wrong.any(axis=(1, 3)).argmax())
                        block_id = int(blocks[at // self.block_size])
                        raise WrongBytes(span.request_id, position + at, block_id, what)
                position += values.size
            for part in parts:
                index, offsets = self._places(part)
                for layer, constants in zip(self._layers, self._salts, strict=True):
                    for half in (0, 1):
                        found = layer[index, half, offsets] ^ constants[half]
                        wrong = (found != part.values[:, None]).any(axis=1)
                        if wrong.any():
                            at = int(wrong.argmax())
                            raise WrongBytes(span.request_id, part.start + at, int(index[at]), what)
            read += len(piece.block_ids)
        return read

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
                yield Span(span.request_id, start, values, [block_id])

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
            )
            for begin, end in ((head_stop, tail_start), (start, head_stop), (tail_start, stop))
        ]
        return parts[0], [part for part in parts[1:] if len(part.values)]

    def _chunks(self, whole: Span) -> Iterator[tuple[npt.NDArray[np.int64], Values]]:
        """Block ids, and the values of their tokens in a row each; some at a time."""
        size = self.block_size
        count = max(1, _TOKENS_AT_ONCE // size)
        values = whole.values.reshape(-1, size)
        for begin in range(0, len(values), count):
            rows = values[begin : begin + count]
            yield np.asarray(whole.block_ids[begin : begin + len(rows)], np.int64), rows

    def _places(self, span: Span) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Block id and offset of each token of the span."""
        positions = np.arange(span.start, span.start + len(span.values), dtype=np.int64)
        table = np.asarray(span.block_ids, np.int64)
        return (
            table[positions // self.block_size - span.start // self.block_size],
            positions % self.block_size,
        )
