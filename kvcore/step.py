"""A Step: the operations of one scheduler step, in columns, applied in order."""

from __future__ import annotations

import struct
from array import array
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcore.content import write_tokens
from kvcore.errors import InvalidArgument, KVDepotError
from kvcore.holders import session_holds
from kvcore.operation import (
    FreeMode,
    NoFit,
    OperationError,
    OperationKind,
    Outcome,
    SlotResult,
    Step,
    StepResult,
)
from kvcore.request import TOKEN_BYTES, Request, RequestStatus
from kvcore.session import Session

if TYPE_CHECKING:
    from kvcore.depot import Depot

# Reading a member off its enum costs 0.1 us and more on Python 3.11: too much in a loop.
_OK, _NO_FIT, _NOT_ATTEMPTED = Outcome.OK, Outcome.NO_FIT, Outcome.NOT_ATTEMPTED
_UNKNOWN_HANDLE, _NO_BUDGET = Outcome.UNKNOWN_HANDLE, Outcome.NO_BUDGET
_RUNNING = RequestStatus.RUNNING


def apply_step(depot: Depot, session: Session, step: Step) -> StepResult:
    """Apply ``step``. Columns that do not fit together raise, and nothing is done."""
    return _StepRun(depot, session, step).run()


def _int32(column: bytes, name: str, count: int | None = None) -> list[int]:
    if len(column) % 4:
        raise InvalidArgument(f"{len(column)} bytes are not whole int32", field=name)
    if count is not None and len(column) != 4 * count:
        raise InvalidArgument(
            f"{len(column) // 4} entries, where the handles have {count}", field=name
        )
    return list(struct.unpack(f"<{len(column) // 4}i", column))


def _uint8(column: bytes, name: str, count: int, default: int) -> bytes:
    if column and len(column) != count:
        raise InvalidArgument(f"{len(column)} entries, where the handles have {count}", field=name)
    return column or bytes((default,)) * count


class _StepRun:
    """One Step under way: its columns, decoded, and what it has answered so far."""

    def __init__(self, depot: Depot, session: Session, step: Step) -> None:
        self.depot = depot
        self.session = session
        self.step = step
        grow, cache, free = step.grow, step.cache, step.free
        self.grow_handles = _int32(grow.handles, "grow.handles")
        num_grow = len(self.grow_handles)
        self.grow_computed = _int32(grow.num_computed_tokens, "grow.num_computed_tokens", num_grow)
        self.grow_new = _int32(grow.num_new_tokens, "grow.num_new_tokens", num_grow)
        self.appends = bool(grow.token_counts or grow.token_offsets or grow.tokens)
        if self.appends:
            self.token_offsets = _int32(grow.token_offsets, "grow.token_offsets", num_grow)
            self.token_counts = _int32(grow.token_counts, "grow.token_counts", num_grow)
            if min(self.token_counts, default=0) < 0:
                raise InvalidArgument("a count is negative", field="grow.token_counts")
            if len(grow.tokens) != TOKEN_BYTES * sum(self.token_counts):
                raise InvalidArgument(
                    f"{len(grow.tokens)} bytes, where the counts sum to "
                    f"{sum(self.token_counts)} tokens of {TOKEN_BYTES}",
                    field="grow.tokens",
                )
        self.cache_handles = _int32(cache.handles, "cache.handles")
        self.cache_computed = _int32(
            cache.num_computed_tokens, "cache.num_computed_tokens", len(self.cache_handles)
        )
        self.free_handles = _int32(free.handles, "free.handles")
        num_free = len(self.free_handles)
        self.free_modes = _uint8(free.modes, "free.modes", num_free, FreeMode.FINISH)
        self.free_did_not_run = _uint8(free.did_not_run, "free.did_not_run", num_free, 0)
        for mode in self.free_modes:
            if not FreeMode.FINISH <= mode <= FreeMode.DETACH:
                raise InvalidArgument(f"{mode} is not a FreeMode", field="free.modes")
        self._check_runs()

        self.budget = step.token_budget
        self.blocks_left = depot.config.max_step_blocks
        self.stopped = False
        self.index = 0
        self.admissions: list[SlotResult] = []
        groups = depot.config.kv_cache.groups
        self.num_grown = 0
        self.grow_outcomes = bytearray((_OK,)) * num_grow
        self.grow_counts = [array("i", bytes(4 * num_grow)) for _ in groups]
        self.grow_ids = [array("i") for _ in groups]
        self.token_position = 0
        self.cache_outcomes = bytearray()
        self.free_outcomes = bytearray()
        self.tickets: list[int] = []
        self.no_fit: NoFit | None = None
        self.refused = False
        self.errors: list[OperationError] = []

    def _check_runs(self) -> None:
        given = {
            OperationKind.ADMIT: len(self.step.admissions),
            OperationKind.GROW: len(self.grow_handles),
            OperationKind.CACHE: len(self.cache_handles),
            OperationKind.FREE: len(self.free_handles),
        }
        counted = dict.fromkeys(given, 0)
        for kind, count in self.step.runs:
            if kind not in counted:
                raise InvalidArgument(f"{kind} is not an OperationKind", field="runs.kind")
            counted[OperationKind(kind)] += count
        for kind, count in counted.items():
            if count != given[kind]:
                raise InvalidArgument(
                    f"the runs count {count} {kind.name} operations, the columns hold "
                    f"{given[kind]}",
                    field="runs.count",
                )

    def run(self) -> StepResult:
        for kind, count in self.step.runs:
            if kind == OperationKind.ADMIT:
                self._admit(count)
            elif kind == OperationKind.GROW:
                self._grow(count)
            elif kind == OperationKind.CACHE:
                self._cache(count)
            else:
                self._free(count)
        return StepResult(
            admissions=self.admissions,
            grow_outcomes=_outcomes(self.grow_outcomes),
            grow_counts=[_little_endian(column) for column in self.grow_counts],
            grow_ids=[_little_endian(column) for column in self.grow_ids],
            cache_outcomes=_outcomes(self.cache_outcomes),
            free_outcomes=_outcomes(self.free_outcomes),
            free_tickets=(
                struct.pack(f"<{len(self.tickets)}Q", *self.tickets) if any(self.tickets) else b""
            ),
            no_fit=self.no_fit,
            errors=self.errors,
            free_blocks=self.depot.pool.num_free_blocks(self.session.view),
        )

    def _admit(self, count: int) -> None:
        first = len(self.admissions)
        for slots in self.step.admissions[first : first + count]:
            if self.stopped:
                self.admissions.append(SlotResult(Outcome.NOT_ATTEMPTED))
            elif self.blocks_left <= 0:
                self.admissions.append(SlotResult(_NO_BUDGET))
                self._refuse()
            else:
                try:
                    result = self.depot.allocate_slots(
                        self.session, slots, self.budget, name_holders=not self.refused
                    )
                except KVDepotError as error:
                    result = SlotResult(self._invalid(error))
                else:
                    self._spend(result.num_new_tokens)
                    self._spend_blocks(slots.request_id)
                    self.refused = self.refused or result.outcome is Outcome.NO_FIT
                self.admissions.append(result)
                if result.outcome is not Outcome.OK:
                    self._refuse()
            self.index += 1

    def _grow(self, count: int) -> None:
        by_handle, lookahead = self.session.by_handle, self.step.grow.num_lookahead_tokens
        first, first_index = self.num_grown, self.index
        stop = first + count
        for position in range(first, stop):
            outcome = _OK
            tokens = self._appended(position) if self.appends else b""
            if self.stopped:
                outcome = _NOT_ATTEMPTED
            else:
                request = by_handle.get(self.grow_handles[position])
                if request is None:
                    outcome = _UNKNOWN_HANDLE
                elif self.budget is not None and self.grow_new[position] > self.budget:
                    outcome = _NO_BUDGET
                else:
                    try:
                        if tokens:
                            write_tokens(self.session, request, self._offset(position), tokens)
                        outcome = self._grow_one(request, position, lookahead)
                    except KVDepotError as error:
                        self.index = first_index + position - first
                        outcome = self._invalid(error)
                if outcome is not _OK and outcome is not _UNKNOWN_HANDLE:
                    self._refuse()
            if outcome is not _OK:
                self.grow_outcomes[position] = outcome
        self.num_grown = stop
        self.index = first_index + count

    def _grow_one(self, request: Request, position: int, num_lookahead_tokens: int) -> Outcome:
        session, manager = self.session, self.session.manager
        num_computed, num_new = self.grow_computed[position], self.grow_new[position]
        if (
            num_new <= 0
            or not 0 <= num_computed <= request.num_tokens
            or num_computed + num_new > manager.max_model_len
            or request.status is not _RUNNING
        ):
            raise _bad_growth(request.status, num_computed, num_new)
        if manager.is_settled(request, num_computed, num_new, num_lookahead_tokens):
            session.settle(request, num_computed)
        else:
            if num_computed > session.num_slots(request):
                raise _bad_growth(request.status, num_computed, num_new)
            if self.blocks_left <= 0:
                return _NO_BUDGET
            new_blocks = session.allocate(
                request, num_computed, num_new, num_lookahead_tokens=num_lookahead_tokens
            )
            if new_blocks is None:
                self.depot.num_refusals += 1
                if self.no_fit is None:
                    self.no_fit = self._explained(manager.last_refusal)
                return _NO_FIT
            for group, block_ids in enumerate(new_blocks.block_ids):
                self.grow_counts[group][position] = len(block_ids)
                self.grow_ids[group].extend(block_ids)
                self.blocks_left -= len(block_ids)
        if self.budget is not None:
            self._spend(num_new)
        return _OK

    def _appended(self, position: int) -> bytes:
        """The tokens of the operation at ``position``; they follow those before it."""
        start = self.token_position
        self.token_position = stop = start + TOKEN_BYTES * self.token_counts[position]
        return self.step.grow.tokens[start:stop]

    def _offset(self, position: int) -> int:
        offset = self.token_offsets[position]
        if offset < 0:
            raise InvalidArgument(f"offset {offset} is negative", field="grow.token_offsets")
        return offset

    def _cache(self, count: int) -> None:
        first = len(self.cache_outcomes)
        for position in range(first, first + count):
            request = self.session.by_handle.get(self.cache_handles[position])
            if self.stopped:
                outcome = Outcome.NOT_ATTEMPTED
            elif request is None:
                outcome = Outcome.UNKNOWN_HANDLE
            else:
                try:
                    self.depot.confirm_computed(
                        self.session, request, self.cache_computed[position]
                    )
                    outcome = Outcome.OK
                except KVDepotError as error:
                    outcome = self._invalid(error)
                    self._refuse()
            self.cache_outcomes.append(outcome)
            self.index += 1

    def _free(self, count: int) -> None:
        first = len(self.free_outcomes)
        for position in range(first, first + count):
            request = self.session.by_handle.get(self.free_handles[position])
            ticket = 0
            if self.stopped:
                outcome = Outcome.NOT_ATTEMPTED
            elif request is None:
                outcome = Outcome.UNKNOWN_HANDLE
            else:
                ticket = self.depot.free_request(
                    self.session,
                    request,
                    FreeMode(self.free_modes[position]),
                    bool(self.free_did_not_run[position]),
                )
                outcome = Outcome.OK
            self.free_outcomes.append(outcome)
            self.tickets.append(ticket)
            self.index += 1

    def _spend(self, num_tokens: int) -> None:
        if self.budget is not None:
            self.budget -= num_tokens

    def _spend_blocks(self, request_id: str) -> None:
        """An admission costs all the blocks that its request has, or would have."""
        config, request = self.depot.config, self.session.requests[request_id]
        num_groups = len(config.kv_cache.groups)
        self.blocks_left -= 1 + num_groups * (request.num_tokens // config.hash_block_size)

    def _refuse(self) -> None:
        if self.step.on_no_fit_stop:
            self.stopped = True

    def _explained(self, refusal: NoFit | None) -> NoFit | None:
        """The refusal, with its holders if it is the Step's first."""
        if self.refused or refusal is None:
            return refusal
        self.refused = True
        return replace(refusal, holders=session_holds(self.depot))

    def _invalid(self, error: KVDepotError) -> Outcome:
        self.errors.append(OperationError(self.index, error.reason, error.message))
        return Outcome.INVALID


def _bad_growth(status: RequestStatus, num_computed: int, num_new: int) -> InvalidArgument:
    if status is not RequestStatus.RUNNING:
        return InvalidArgument(
            f"the request is {status.name.lower()}: admit it first", field="grow.handles"
        )
    return InvalidArgument(
        f"{num_computed} computed and {num_new} new tokens: the computed ones must be in the "
        "request's tokens and slots, the new ones at least 1 and within max_model_len",
        field="grow.num_computed_tokens",
    )


def _outcomes(column: bytearray) -> bytes:
    return b"" if column.count(Outcome.OK) == len(column) else bytes(column)


def _little_endian(column: array[int]) -> bytes:
    return struct.pack(f"<{len(column)}i", *column)
