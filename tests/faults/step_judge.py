"""A Step's answer, held against the model operation by operation."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from kvdepot.v1 import cache_pb2 as pb
from model_state import INVALID, Divergence, Refusal, Request, Session, agree, ints_of, tokens_of

if TYPE_CHECKING:
    from model import Model


class StepJudge:
    """One Step's operations against its answer, in order."""

    def __init__(self, model: Model, session: Session, call: Any, reply: Any) -> None:
        self.model, self.session, self.call, self.reply = model, session, call, reply
        self.stopping = call.on_no_fit != pb.ON_NO_FIT_CONTINUE
        self.stopped = self.refused = False
        self.budget = call.token_budget if call.HasField("token_budget") else None
        self.no_fit: tuple[int, ...] | None = None
        self.done = dict.fromkeys(range(1, 5), 0)
        self.tokens = 0
        columns = reply.grow.new_blocks[0]
        self.counts, self.ids = ints_of(columns.counts), ints_of(columns.ids)

    def run(self) -> None:
        call, reply = self.call, self.reply
        operations = (None, self._admit, self._grow, self._cache, self._free)
        for run in call.runs:
            operate = operations[run.kind]
            assert operate is not None
            for _ in range(run.count):
                operate(self.done[run.kind])
                self.done[run.kind] += 1
        if self.ids:
            raise Divergence(f"blocks {self.ids} belong to no growth")
        found = no_fit(reply.no_fit) if reply.HasField("no_fit") else None
        agree("first refused growth", found, self.no_fit)
        agree("free_blocks", reply.free_blocks, self.model.free_blocks(self.session))

    def _outcome(self, outcomes: bytes, at: int, expected: str) -> None:
        found = outcomes[at] if outcomes else pb.OUTCOME_OK
        agree(f"outcome {at}", pb.Outcome.Name(found), f"OUTCOME_{expected}")
        if expected not in ("OK", "UNKNOWN_HANDLE") and self.stopping:
            self.stopped = True

    def _admit(self, at: int) -> None:
        result = self.reply.admissions[at]
        if self.stopped:
            agree("admission", pb.Outcome.Name(result.outcome), "OUTCOME_NOT_ATTEMPTED")
            return
        try:
            slots = self.call.admissions[at]
            outcome = self.model.allocate(
                self.session, slots, result, self.budget, name_holders=not self.refused
            )
            self.refused = self.refused or outcome == "NO_FIT"
        except Refusal:
            outcome = "INVALID"
        self._outcome(bytes([result.outcome]), 0, outcome)
        if outcome == "OK" and self.budget is not None:
            self.budget -= result.num_new_tokens

    def _grow(self, at: int) -> None:
        columns = self.call.grow
        count = ints_of(columns.token_counts)[at] if columns.token_counts else 0
        tokens = tokens_of(columns.tokens)[self.tokens : self.tokens + count]
        self.tokens += count
        offset = ints_of(columns.token_offsets)[at] if columns.token_offsets else 0
        outcome, num_blocks = "NOT_ATTEMPTED", 0
        if not self.stopped:
            outcome, num_blocks = self._grow_one(
                self.session.by_handle(ints_of(columns.handles)[at]),
                ints_of(columns.num_computed_tokens)[at],
                ints_of(columns.num_new_tokens)[at],
                (offset, tokens),
            )
        self._outcome(self.reply.grow.outcomes, at, outcome)
        agree("blocks of growth", self.counts[at], num_blocks)

    def _grow_one(
        self, request: Request | None, computed: int, new: int, written: tuple[int, list[int]]
    ) -> tuple[str, int]:
        model, size = self.model, self.model.block_size
        if request is None:
            return "UNKNOWN_HANDLE", 0
        if self.budget is not None and new > self.budget:
            return "NO_BUDGET", 0
        try:
            if written[1]:
                model.write(self.session, request, *written)
        except Refusal:
            return "INVALID", 0
        if (
            new <= 0
            or not 0 <= computed <= min(len(request.tokens), len(request.table) * size)
            or computed + new > model.max_model_len
            or not request.running
        ):
            return "INVALID", 0
        lookahead = self.call.grow.num_lookahead_tokens
        num_slots = min(computed + new + lookahead, model.max_model_len)
        needed = max(-(-num_slots // size) - len(request.table), 0)
        free = model.free_blocks(self.session)
        if needed > free:
            if self.no_fit is None:
                self.no_fit = (needed, free, 0, 0)
                model.check_holders(self.reply.no_fit, named=not self.refused)
            self.refused = True
            return "NO_FIT", 0
        taken, self.ids = self.ids[:needed], self.ids[needed:]
        model.take(self.session, request, taken, -(-num_slots // size))
        model.register(self.session, request, min(computed + new, len(request.tokens)))
        request.allocated_in = self.session.step
        request.computed = computed
        if self.budget is not None:
            self.budget -= new
        return "OK", needed

    def _cache(self, at: int) -> None:
        request = self.session.by_handle(ints_of(self.call.cache.handles)[at])
        outcome = "NOT_ATTEMPTED"
        if not self.stopped:
            outcome = "UNKNOWN_HANDLE"
            if request is not None:
                outcome = "OK"
                num_tokens = ints_of(self.call.cache.num_computed_tokens)[at]
                try:
                    if num_tokens < 0:
                        raise Refusal(INVALID)
                    self.model.confirm(self.session, request, num_tokens)
                except Refusal:
                    outcome = "INVALID"
        self._outcome(self.reply.cache.outcomes, at, outcome)

    def _free(self, at: int) -> None:
        columns = self.call.free
        request = self.session.by_handle(ints_of(columns.handles)[at])
        tickets = self.reply.free.tickets
        ticket = struct.unpack_from("<Q", tickets, 8 * at)[0] if tickets else 0
        outcome = "NOT_ATTEMPTED"
        if not self.stopped:
            outcome = "UNKNOWN_HANDLE" if request is None else "OK"
            if request is not None:
                mode = columns.modes[at] if columns.modes else pb.FREE_MODE_FINISH
                did_not_run = bool(columns.did_not_run[at]) if columns.did_not_run else False
                self.model.free(self.session, request, mode, did_not_run, ticket)
        self._outcome(self.reply.free.outcomes, at, outcome)


def no_fit(message: Any) -> tuple[int, int, int, int]:
    """A refusal, without who holds the blocks."""
    return (
        message.needed_blocks,
        message.free_blocks,
        message.reserved_blocks,
        message.watermark_blocks,
    )
