"""A Step: the operations of one scheduler step, in columns, applied in order."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore.columns import int32, little_endian, outcomes, tokens_by_row, uint8
from kvcore.content import write_tokens
from kvcore.errors import InvalidArgument, KVDepotError
from kvcore.growth import grow, is_settled
from kvcore.holders import explained
from kvcore.operation import (
    NO_CACHE,
    NO_FREE,
    NO_GROW,
    Free,
    FreeMode,
    Grow,
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
_ADMIT, _GROW, _CACHE = OperationKind.ADMIT, OperationKind.GROW, OperationKind.CACHE
_RUNNING = RequestStatus.RUNNING


def apply_step(depot: Depot, session: Session, step: Step) -> StepResult:
    """Apply ``step``. Columns that do not fit together raise, and nothing is done.

    What its growth filled is left for ``session.finish_growth()``.
    """
    return _StepRun(depot, session, step).run()


class _StepRun:
    """One Step under way: its columns, decoded, and what it has answered so far."""

    def __init__(self, depot: Depot, session: Session, step: Step) -> None:
        self.depot = depot
        self.session = session
        self.step = step
        no_entries: Sequence[int] = ()
        self.grow_handles = self.grow_computed = self.grow_new = no_entries
        self.grow_offsets = self.grow_appended = no_entries
        self.grow_tokens: Sequence[bytes] = ()
        self.cache_handles = self.cache_computed = self.free_handles = no_entries
        self.free_modes = self.free_did_not_run = b""
        if step.grow is not NO_GROW:
            self._decode_grow(step.grow)
        if step.cache is not NO_CACHE:
            self.cache_handles = int32(step.cache.handles, "cache.handles")
            self.cache_computed = int32(
                step.cache.num_computed_tokens,
                "cache.num_computed_tokens",
                len(self.cache_handles),
            )
        if step.free is not NO_FREE:
            self._decode_free(step.free)
        num_grow = len(self.grow_handles)
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
        self.cache_outcomes = bytearray()
        self.free_outcomes = bytearray()
        self.tickets: list[int] = []
        self.no_fit: NoFit | None = None
        self.refused = False
        self.errors: list[OperationError] = []

    def _decode_grow(self, grow: Grow) -> None:
        self.grow_handles = int32(grow.handles, "grow.handles")
        num_grow = len(self.grow_handles)
        self.grow_computed = int32(grow.num_computed_tokens, "grow.num_computed_tokens", num_grow)
        self.grow_new = int32(grow.num_new_tokens, "grow.num_new_tokens", num_grow)
        if not (grow.token_counts or grow.token_offsets or grow.tokens):
            self.grow_offsets = self.grow_appended = [0] * num_grow
            self.grow_tokens = [b""] * num_grow
            return
        self.grow_offsets = int32(grow.token_offsets, "grow.token_offsets", num_grow)
        self.grow_appended = int32(grow.token_counts, "grow.token_counts", num_grow)
        if min(self.grow_appended, default=0) < 0:
            raise InvalidArgument("a count is negative", field="grow.token_counts")
        if len(grow.tokens) != TOKEN_BYTES * sum(self.grow_appended):
            raise InvalidArgument(
                f"{len(grow.tokens)} bytes, where the counts sum to "
                f"{sum(self.grow_appended)} tokens of {TOKEN_BYTES}",
                field="grow.tokens",
            )
        self.grow_tokens = tokens_by_row(grow.tokens, self.grow_appended)

    def _decode_free(self, free: Free) -> None:
        self.free_handles = int32(free.handles, "free.handles")
        num_free = len(self.free_handles)
        self.free_modes = uint8(free.modes, "free.modes", num_free, FreeMode.FINISH)
        self.free_did_not_run = uint8(free.did_not_run, "free.did_not_run", num_free, 0)
        for mode in self.free_modes:
            if not FreeMode.FINISH <= mode <= FreeMode.DETACH:
                raise InvalidArgument(f"{mode} is not a FreeMode", field="free.modes")

    def _check_runs(self) -> None:
        # By kind, of which 0 is none.
        given = [
            0,
            len(self.step.admissions),
            len(self.grow_handles),
            len(self.cache_handles),
            len(self.free_handles),
        ]
        counted = [0] * len(given)
        for kind, count in self.step.runs:
            if not 0 < kind < len(given):
                raise InvalidArgument(f"{kind} is not an OperationKind", field="runs.kind")
            counted[kind] += count
        if counted != given:
            kind = next(kind for kind in OperationKind if counted[kind] != given[kind])
            raise InvalidArgument(
                f"the runs count {counted[kind]} {kind.name} operations, the columns hold "
                f"{given[kind]}",
                field="runs.count",
            )

    def run(self) -> StepResult:
        for kind, count in self.step.runs:
            if kind == _GROW:
                self._grow(count)
                continue
            self.session.finish_growth()
            if kind == _ADMIT:
                self._admit(count)
            elif kind == _CACHE:
                self._cache(count)
            else:
                self._free(count)
        return StepResult(
            admissions=self.admissions,
            grow_outcomes=outcomes(self.grow_outcomes),
            grow_counts=[little_endian(column) for column in self.grow_counts],
            grow_ids=[little_endian(column) for column in self.grow_ids],
            cache_outcomes=outcomes(self.cache_outcomes),
            free_outcomes=outcomes(self.free_outcomes),
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
                    self.refused = self.refused or result.outcome is Outcome.NO_FIT
                self._spend_blocks(self.session.requests.get(slots.request_id))
                self.admissions.append(result)
                if result.outcome is not Outcome.OK:
                    self._refuse()
            self.index += 1

    def _grow(self, count: int) -> None:
        session = self.session
        lookahead, present_step = self.step.grow.num_lookahead_tokens, session.view.step
        first, self.num_grown = self.num_grown, self.num_grown + count
        rows = slice(first, first + count)
        computed, new = self.grow_computed[rows], self.grow_new[rows]
        appended = self.grow_appended[rows]
        # What all rows together keep to is not looked at row by row.
        is_plain = (
            not self.stopped
            and min(computed, default=0) >= 0
            and min(new, default=1) > 0
            and (self.budget is None or sum(new) <= self.budget)
            and session.num_tokens + sum(appended) <= session.config.max_tokens_per_session
        )
        # Of the usual rows; counted in the end, as all rows together have room.
        num_new_tokens = num_appended_tokens = 0
        for position, request, num_computed, num_new, offset, num_appended, tokens in zip(
            range(first, first + count),
            map(session.by_handle.get, self.grow_handles[rows]),
            computed,
            new,
            self.grow_offsets[rows],
            appended,
            self.grow_tokens[rows],
            strict=True,
        ):
            if (
                is_plain
                and request is not None
                and (end := num_computed + num_new) <= (quiet_end := request.quiet_end)
                and (not lookahead or end + lookahead <= request.quiet_slots)
                and (offset == (num_tokens := request.num_tokens) or not tokens)
                and num_computed <= (num_tokens := num_tokens + num_appended) <= quiet_end
            ):
                # The usual row, of which there are hundreds: nothing but counts changes.
                if tokens:
                    request.tokens += tokens
                    request.num_tokens = num_tokens
                    num_appended_tokens += num_appended
                request.num_computed_tokens = num_computed
                request.registered_step = present_step
                num_new_tokens += num_new
                continue
            if self.stopped:
                self.grow_outcomes[position] = _NOT_ATTEMPTED
            elif request is None:
                self.grow_outcomes[position] = _UNKNOWN_HANDLE
            else:
                try:
                    outcome = self._grow_one(request, position, tokens, lookahead)
                except KVDepotError as error:
                    outcome = self._invalid(error, position - first)
                    self._spend_blocks(request)
                if outcome is _OK:
                    self._spend(num_new)
                else:
                    self.grow_outcomes[position] = outcome
                    self._refuse()
                    is_plain = is_plain and not self.stopped
        session.num_tokens += num_appended_tokens
        self._spend(num_new_tokens)
        self.index += count

    def _grow_one(
        self, request: Request, position: int, tokens: bytes, num_lookahead_tokens: int
    ) -> Outcome:
        num_computed, num_new = self.grow_computed[position], self.grow_new[position]
        if self.budget is not None and num_new > self.budget:
            return _NO_BUDGET
        session, manager = self.session, self.session.manager
        later = session.later
        if later is not None and request.handle in later.filled:
            session.finish_growth()
        if tokens:
            offset, num_appended = self.grow_offsets[position], self.grow_appended[position]
            if offset < 0:
                raise InvalidArgument(f"offset {offset} is negative", field="grow.token_offsets")
            if self.blocks_left <= 0 and offset != request.num_tokens:
                return _NO_BUDGET  # what is cut off is looked at block by block
            if (
                later is not None
                and offset == request.num_tokens
                and session.has_room(request, num_appended)
            ):
                request.tokens += tokens
                request.num_tokens += num_appended
                session.num_tokens += num_appended
                later.filled[request.handle] = (request, 0)
            else:
                session.finish_growth()
                write_tokens(session, request, offset, tokens)
        if (
            num_new <= 0
            or not 0 <= num_computed <= request.num_tokens
            or num_computed + num_new > manager.max_model_len
            or request.status is not _RUNNING
        ):
            raise _bad_growth(request.status, num_computed, num_new)
        if num_computed > request.quiet_slots and num_computed > session.num_slots(request):
            raise _bad_growth(request.status, num_computed, num_new)
        if self.blocks_left <= 0 and not is_settled(
            manager, request, num_computed, num_new, num_lookahead_tokens
        ):
            return _NO_BUDGET
        before, request.num_computed_tokens = request.num_computed_tokens, num_computed
        new_blocks = grow(manager, request, num_new, num_lookahead_tokens, later)
        if new_blocks is None:
            request.num_computed_tokens = before
            self.depot.num_refusals += 1
            if self.no_fit is None:
                self.no_fit = self._explained(manager.last_refusal)
            return _NO_FIT
        request.registered_step = session.view.step
        if new_blocks is not manager.no_blocks:
            for group, blocks in enumerate(new_blocks):
                if blocks:
                    num_blocks = self.grow_counts[group][position] = len(blocks)
                    self.blocks_left -= num_blocks
                    ids = self.grow_ids[group]
                    for block in blocks:
                        ids.append(block.block_id)
        return _OK

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

    def _spend_blocks(self, request: Request | None) -> None:
        """An admission, and what is refused as wrong, costs all the blocks that its request
        has, or would have: it may have looked at each.
        """
        self.blocks_left -= 1
        if request is not None:
            config = self.depot.config
            num_groups = len(config.kv_cache.groups)
            self.blocks_left -= num_groups * (request.num_tokens // config.hash_block_size)

    def _refuse(self) -> None:
        if self.step.on_no_fit_stop:
            self.stopped = True

    def _explained(self, refusal: NoFit | None) -> NoFit | None:
        """The refusal, with its holders if it is the Step's first."""
        if self.refused or refusal is None:
            return refusal
        self.refused = True
        return explained(self.depot, refusal)

    def _invalid(self, error: KVDepotError, row: int = 0) -> Outcome:
        """``row``: of the run, which counts when it is over."""
        self.errors.append(OperationError(self.index + row, error))
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
