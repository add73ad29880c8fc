"""What a model worker does to the pool: writes computed tokens, reads hits.

It stands for the forward pass. A step's hits are read before its tokens are written, and
steps run in order, as on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvclient.pool import Pool
from kvclient.replay.pattern import WORD_BYTES, Values, salts

_TOKENS_AT_ONCE = 1 << 16  # bounds the temporary copies
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
    """Executes steps on a mapped pool of one group."""

    def __init__(self, pool: Pool, *, verify_sample: float = 1.0, seed: int = 0) -> None:
        self.blocks_verified = 0
        self.blocks_reread = 0
        self.tokens_written = 0
        self.block_size = pool.block_size
        self._verify_sample = verify_sample
        self._rng = np.random.default_rng(seed)
        layers = [pool.layer_bytes(name) for name in pool.layer_names]
        token_bytes = layers[0].shape[-1]
        if token_bytes % WORD_BYTES:
            raise ValueError(f"K of a token has {token_bytes} bytes, no multiple of {WORD_BYTES}")
        self._layers = [layer.view(np.uint64) for layer in layers]
        self._salts = salts(len(layers), token_bytes)

    def execute(self, work: StepWork) -> None:
        """Do one step. Raises WrongBytes.

        Blocks that this very step fills for one request and hits for another are read
        after the writes, as attention reads them; all other hits before.
        """
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
        if not spans:
            return
        places = [self._places(span) for span in spans]
        blocks = np.concatenate([place[0] for place in places])
        offsets = np.concatenate([place[1] for place in places])
        values = np.concatenate([span.values for span in spans])
        for begin in range(0, len(values), _TOKENS_AT_ONCE):
            part = slice(begin, begin + _TOKENS_AT_ONCE)
            column = values[part, None]
            for layer, constants in zip(self._layers, self._salts, strict=True):
                for half in (0, 1):
                    layer[blocks[part], half, offsets[part]] = column ^ constants[half]
        self.tokens_written += len(values)

    def _verify(self, span: Span, what: str) -> int:
        """Reads a sample of the span's blocks; answers how many."""
        values = span.values
        if not len(values):
            return 0
        blocks, offsets = self._places(span)
        positions = np.arange(span.start, span.start + len(values))
        first_block = span.start // self.block_size
        read = len(span.block_ids)
        if self._verify_sample < 1:
            chosen = self._rng.random(read) < self._verify_sample
            mask = chosen[positions // self.block_size - first_block]
            blocks, offsets, positions = blocks[mask], offsets[mask], positions[mask]
            values = values[mask]
            read = int(chosen.sum())
        for begin in range(0, len(values), _TOKENS_AT_ONCE):
            part = slice(begin, begin + _TOKENS_AT_ONCE)
            column = values[part, None]
            for layer, constants in zip(self._layers, self._salts, strict=True):
                for half in (0, 1):
                    found = layer[blocks[part], half, offsets[part]] ^ constants[half]
                    wrong = (found != column).any(axis=1)
                    if wrong.any():
                        at = begin + int(wrong.argmax())
                        raise WrongBytes(span.request_id, int(positions[at]), int(blocks[at]), what)
        return read

    def _places(self, span: Span) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Block id and offset of each token of the span."""
        positions = np.arange(span.start, span.start + len(span.values), dtype=np.int64)
        table = np.asarray(span.block_ids, np.int64)
        return (
            table[positions // self.block_size - span.start // self.block_size],
            positions % self.block_size,
        )
