"""A request of the trace on its way through a scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvclient.replay.pages import Span
from kvclient.replay.pattern import Values, prefix_values
from kvclient.replay.rows import GroupRows
from kvclient.replay.settings import ReplaySettings
from kvclient.replay.trace import TraceRequest, output_tokens, prompt_tokens
from kvclient.tables import RequestTables, recycles


@dataclass(slots=True)
class Job:
    """All tokens it will ever have, and how far it is.

    ``num_known`` tokens have been sent to the server, ``num_computed`` are scheduled, the
    first ``num_final`` are to be computed. ``tables`` None: it holds no blocks.
    """

    request: TraceRequest
    tokens: bytes
    values: Values
    unary: bool
    num_known: int
    num_final: int
    num_computed: int = 0
    introduced: bool = False
    handle: int = 0
    tables: RequestTables | None = None
    preemptions: int = 0

    @property
    def prefills_by_calls(self) -> bool:
        """Whether its next tokens go by AllocateSlots; decode growth goes in Steps."""
        return self.unary and self.num_computed < self.num_known

    @property
    def request_id(self) -> str:
        """Its name at the server."""
        return self.request.request_id

    def tokens_between(self, start: int, stop: int) -> bytes:
        """Tokens as they travel."""
        return self.tokens[4 * start : 4 * stop]

    def growth(
        self, budget: int, stride: int, block_size: int, alignment: int = 0
    ) -> tuple[int, int]:
        """Tokens to compute in the next step, and how many of them are new to the server.

        A stride never crosses a block boundary, so it takes the same blocks at the same
        moments as that many steps of one token: only a boundary takes one. ``alignment``:
        see ``aligned``.
        """
        left = self.num_known - self.num_computed
        if left > 0:
            count = min(left, budget)
            return aligned(self.num_computed, count, self.num_known, alignment), 0
        to_boundary = block_size - self.num_computed % block_size
        count = min(self.num_final - self.num_computed, stride, to_boundary, budget)
        return count, count

    def lose(self) -> None:
        """The server knows nothing of it any more."""
        self.preemptions += self.handle != 0
        self.introduced = False
        self.handle = 0
        self.tables = None
        self.num_computed = 0

    def reads(self, rows: GroupRows, num_tokens: int) -> Iterator[Span]:
        """What the token after ``num_tokens`` looks at."""
        for first, last in rows.read(num_tokens, self.request.input_length):
            yield self._span(rows, first, last, num_tokens)

    def window(self, rows: GroupRows, start: int, stop: int) -> Iterator[Span]:
        """What computing ``start`` to ``stop`` looks at in a group that recycles blocks.

        States always; windows when the table may have changed.
        """
        size = rows.block_size
        crosses = -(-start // size) != -(-stop // size)
        if start and recycles(rows.spec) and (crosses or rows.spec.kind == "mamba"):
            yield from self.reads(rows, start)

    def writes(self, rows: GroupRows, start: int, stop: int) -> Span:
        """What computing the tokens ``start`` to ``stop`` leaves."""
        return self._span(rows, *rows.written(start, stop), stop)

    def _span(self, rows: GroupRows, first: int, last: int, num_tokens: int) -> Span:
        assert self.tables is not None
        per_row, per_block = rows.tokens_per_row, rows.rows_per_block
        if per_row == 1:
            values = self.values[first:last]
        else:
            ends = np.minimum(np.arange(first + 1, last + 1) * per_row, num_tokens)
            values = self.values[ends - 1]
        table = self.tables.blocks[rows.group]
        blocks = table[first // per_block : -(-last // per_block)]
        return Span(self.request_id, first, values, blocks, rows.group)


def aligned(start: int, count: int, num_known: int, alignment: int) -> int:
    """``count`` tokens from ``start`` on, cut so that a step ends where a state is kept.

    As vLLM does for Mamba states kept at steps' ends: at multiples of ``alignment``, the last
    of which before the end gets a step of its own. 0: no such need.
    """
    if not alignment:
        return count
    last = num_known - num_known % alignment
    if start + count < last:
        return count - (start + count) % alignment if start % alignment == 0 else count
    return last - start if start < last < start + count else count


def num_computed_at_last(request: TraceRequest, settings: ReplaySettings) -> int:
    """Tokens that get slots in all. The last token of an output is sampled, never computed."""
    num_output = request.output_length if settings.decode else 0
    return request.input_length + max(0, num_output - 1)


def make_job(request: TraceRequest, settings: ReplaySettings) -> Job:
    """A waiting job."""
    tokens = prompt_tokens(request, settings.seed)
    if settings.decode:
        tokens = np.concatenate([tokens, output_tokens(request, settings.seed)])
    return Job(
        request=request,
        tokens=tokens.tobytes(),
        values=prefix_values(tokens),
        unary=_goes_by_unary_calls(request, settings),
        num_known=request.input_length,
        num_final=num_computed_at_last(request, settings),
    )


def _goes_by_unary_calls(request: TraceRequest, settings: ReplaySettings) -> bool:
    """Every so many of each scheduler's requests."""
    every = settings.unary_every
    return every > 0 and request.index // settings.schedulers % every == 0
