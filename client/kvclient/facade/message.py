"""One message of the facade: its operations, as a Step, and what may be answered to them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvclient.errors import InternalError, NotFound, of_operation
from kvclient.facade.operation import Ask, Introduction
from kvclient.values import (
    Cache,
    Free,
    Grow,
    OperationKind,
    Outcome,
    SlotRequest,
    Step,
    StepResult,
)

# NO_BUDGET: the message before it has taken all the blocks that one may take.
_EXPECTED = (
    *(Outcome.OK, Outcome.NO_FIT, Outcome.HIT_CHANGED),
    *(Outcome.RESETTING, Outcome.NO_BUDGET),
)
_NO_GROW, _NO_CACHE, _NO_FREE = Grow(), Cache(), Free()

Queued = tuple[OperationKind, object, int]
"""A growth with its Ask; or a Cache or Free with the handle, and the tokens, or the mode,
negative if the request did not run.
"""


class Message:
    """What is ``queued``, asks ahead, admissions and introductions, in this order.

    Of the admissions some may fail behind the first ``num_certain``, and introductions may.
    """

    __slots__ = (
        "_caches",
        "_frees",
        "_num_before",
        "_num_certain",
        "_runs",
        "admissions",
        "asks",
        "introductions",
    )

    def __init__(
        self,
        queued: Sequence[Queued],
        ahead: Sequence[Ask],
        admissions: Sequence[SlotRequest],
        introductions: Sequence[Introduction],
        *,
        num_certain: int,
    ) -> None:
        runs: list[tuple[OperationKind, int]] = []
        asks: list[Ask] = []
        caches: list[tuple[int, int]] = []
        frees: list[tuple[int, int]] = []
        for kind, subject, argument in queued:
            if runs and runs[-1][0] is kind:
                runs[-1] = (kind, runs[-1][1] + 1)
            else:
                runs.append((kind, 1))
            if isinstance(subject, Ask):
                asks.append(subject)
            else:
                assert isinstance(subject, int)
                column = caches if kind is OperationKind.CACHE else frees
                column.append((subject, argument))
        if ahead:
            asks.extend(ahead)
            runs.append((OperationKind.GROW, len(ahead)))
        self.asks = asks
        self.admissions = admissions
        self.introductions = introductions
        self._runs = runs
        self._caches = caches
        self._frees = frees
        self._num_before = len(queued) + len(ahead)
        self._num_certain = num_certain

    @property
    def freed(self) -> list[int]:
        """Handles."""
        return [handle for handle, _ in self._frees]

    @property
    def holds_more(self) -> bool:
        """Than admissions and introductions."""
        return bool(self._num_before)

    def step(self, token_budget: int | None) -> Step:
        """``token_budget`` is what the admissions may schedule together."""
        introduced = [one.slots for one in self.introductions if one.slots is not None]
        slots = [*self.admissions, *introduced]
        runs = [*self._runs, (OperationKind.ADMIT, len(slots))] if slots else self._runs
        if token_budget is not None:
            # It counts for growth, too, which is none of this budget's.
            token_budget += sum([ask.num_new for ask in self.asks])
        return Step(
            runs,
            on_no_fit_stop=False,
            token_budget=token_budget,
            admissions=slots,
            grow=_grow(self.asks),
            cache=Cache(*zip(*self._caches, strict=True)) if self._caches else _NO_CACHE,
            free=_free(self._frees),
        )

    def check(self, result: StepResult) -> None:
        """Raises for an outcome that no caller can go on from."""
        for error in result.errors:
            if error.index < self._num_before + self._num_certain:
                raise of_operation(error)
        outcomes = {admission.outcome for admission in result.admissions[: self._num_certain]}
        outcomes.update(map(Outcome, result.grow.outcomes))
        outcomes.update(map(Outcome, result.cache_outcomes))
        outcomes.update(map(Outcome, result.free_outcomes))
        for outcome in outcomes:
            if outcome is Outcome.UNKNOWN_HANDLE:
                raise NotFound("the server does not know the request", reason="UNKNOWN_HANDLE")
            if outcome not in _EXPECTED:
                raise InternalError(f"an operation answered {outcome.name}", reason="BAD_REPLY")


def _grow(asks: list[Ask]) -> Grow:
    if not asks:
        return _NO_GROW
    # Of a dozen values: an array each costs five times as much.
    pack = struct.Struct(f"<{len(asks)}i").pack
    return Grow(
        handles=pack(*[ask.known.handle for ask in asks]),
        num_computed_tokens=pack(*[ask.num_computed for ask in asks]),
        num_new_tokens=pack(*[ask.num_new for ask in asks]),
        token_offsets=pack(*[ask.offset for ask in asks]),
        token_counts=pack(*[len(ask.tokens) // 4 for ask in asks]),
        tokens=b"".join([ask.tokens for ask in asks]),
        num_lookahead_tokens=asks[0].lookahead,
    )


def _free(frees: list[tuple[int, int]]) -> Free:
    if not frees:
        return _NO_FREE
    did_not_run = [mode < 0 for _, mode in frees]
    return Free(
        [handle for handle, _ in frees],
        bytes([abs(mode) for _, mode in frees]),
        bytes(did_not_run) if any(did_not_run) else b"",
    )
