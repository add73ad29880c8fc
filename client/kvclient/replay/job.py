"""A request of the trace on its way through a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvclient.replay.pattern import Values, prefix_values
from kvclient.replay.settings import ReplaySettings
from kvclient.replay.trace import TraceRequest, output_tokens, prompt_tokens
from kvclient.replay.worker import Span


@dataclass(slots=True)
class Job:
    """All tokens it will ever have, and how far it is.

    ``num_known`` tokens have been sent to the server, ``num_computed`` are scheduled, the
    first ``num_final`` are to be computed.
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
    table: list[int] = field(default_factory=list)
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

    def growth(self, budget: int, stride: int, block_size: int) -> tuple[int, int]:
        """Tokens to compute in the next step, and how many of them are new to the server.

        A stride never crosses a block boundary, so it takes the same blocks at the same
        moments as that many steps of one token: only a boundary takes one.
        """
        left = self.num_known - self.num_computed
        if left > 0:
            return min(left, budget), 0
        to_boundary = block_size - self.num_computed % block_size
        count = min(self.num_final - self.num_computed, stride, to_boundary, budget)
        return count, count

    def lose(self) -> None:
        """The server knows nothing of it any more."""
        self.preemptions += self.handle != 0
        self.introduced = False
        self.handle = 0
        self.table = []
        self.num_computed = 0

    def span(self, start: int, stop: int, block_size: int) -> Span:
        """The tokens ``start`` to ``stop`` with their blocks."""
        blocks = self.table[start // block_size : -(-stop // block_size)]
        return Span(self.request_id, start, self.values[start:stop], blocks)


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
