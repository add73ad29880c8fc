"""A Step: order, refusal, budget, and columns that do not fit together."""

from __future__ import annotations

import struct

import pytest

from building import content, make_depot, token_bytes
from kvcore.depot import Depot
from kvcore.errors import InvalidArgument
from kvcore.operation import (
    Cache,
    Free,
    FreeMode,
    Grow,
    OperationKind,
    Outcome,
    SlotRequest,
    Step,
    StepResult,
)
from kvcore.session import Session

ADMIT, GROW, CACHE, FREE = (
    OperationKind.ADMIT,
    OperationKind.GROW,
    OperationKind.CACHE,
    OperationKind.FREE,
)


def int32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def ints(column: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(column) // 4}i", column))


def new(request_id: str, start: int, stop: int, **fields: object) -> SlotRequest:
    return SlotRequest(request_id, content(range(start, stop)), lookup=True, **fields)  # type: ignore[arg-type]


def apply(depot: Depot, session: Session, step: Step) -> StepResult:
    session.begin(None, None)
    result = depot.step(session, step)
    assert depot.audit() == []
    return result


def test_a_day_in_columns() -> None:
    depot = make_depot(20)
    session = depot.open_session("")
    result = apply(
        depot, session, Step([(ADMIT, 2)], admissions=[new("a", 0, 8), new("b", 100, 103)])
    )
    assert [admission.new_blocks for admission in result.admissions] == [([1, 2],), ([3],)]
    handles = [admission.handle for admission in result.admissions]

    # Both append a token; a needs a block for it, b has room. c comes in between.
    result = apply(
        depot,
        session,
        Step(
            [(GROW, 1), (ADMIT, 1), (GROW, 1)],
            admissions=[new("c", 200, 202)],
            grow=Grow(
                int32(*handles), int32(8, 3), int32(1, 1), int32(8, 3), int32(1, 1),
                token_bytes([8, 103]),
            ),
        ),
    )  # fmt: skip
    assert result.grow_outcomes == b""
    assert ints(result.grow_counts[0]) == [1, 0]
    assert ints(result.grow_ids[0]) == [4]
    assert result.admissions[0].new_blocks == ([5],)

    result = apply(
        depot,
        session,
        Step(
            [(CACHE, 2), (FREE, 3)],
            cache=Cache(int32(handles[1], 999), int32(4, 4)),
            free=Free(
                int32(*handles, 999),
                bytes([FreeMode.FINISH, FreeMode.DETACH, FreeMode.FINISH]),
            ),
        ),
    )
    assert list(result.cache_outcomes) == [Outcome.OK, Outcome.UNKNOWN_HANDLE]
    assert list(result.free_outcomes) == [Outcome.OK, Outcome.OK, Outcome.UNKNOWN_HANDLE]
    tickets = struct.unpack("<3Q", result.free_tickets)
    assert (tickets[0], tickets[2]) == (0, 0)
    assert depot.return_blocks(session, tickets[1]) == 1
    # A handle is never used again.
    again = apply(depot, session, Step([(ADMIT, 1)], admissions=[new("a", 0, 8)]))
    assert again.admissions[0].handle not in handles


@pytest.mark.parametrize(
    ("stop", "outcomes"),
    [
        pytest.param(True, [Outcome.OK, Outcome.NO_FIT, Outcome.NOT_ATTEMPTED], id="stop"),
        pytest.param(False, [Outcome.OK, Outcome.NO_FIT, Outcome.OK], id="continue"),
    ],
)
def test_order_decides_who_gets_the_last_block(stop: bool, outcomes: list[Outcome]) -> None:
    depot = make_depot(6)
    session = depot.open_session("")
    result = apply(
        depot,
        session,
        Step(
            [(ADMIT, 3)],
            on_no_fit_stop=stop,
            admissions=[new("a", 0, 8), new("b", 100, 120), new("c", 200, 203)],
        ),
    )
    assert [admission.outcome for admission in result.admissions] == outcomes
    refusal = result.admissions[1].no_fit
    assert refusal is not None
    assert (refusal.needed_blocks, refusal.free_blocks) == (5, 3)
    assert ("c" in session.requests) is not stop


def test_growth_that_does_not_fit_stops_the_frees_behind_it() -> None:
    depot = make_depot(4)
    session = depot.open_session("")
    result = apply(depot, session, Step([(ADMIT, 2)], admissions=[new("a", 0, 4), new("b", 9, 17)]))
    handles = [admission.handle for admission in result.admissions]
    step = Step(
        [(GROW, 1), (FREE, 1)],
        grow=Grow(int32(handles[0]), int32(4), int32(1), int32(4), int32(1), token_bytes([4])),
        free=Free(int32(handles[1])),
    )
    result = apply(depot, session, step)
    assert list(result.grow_outcomes) == [Outcome.NO_FIT]
    assert list(result.free_outcomes) == [Outcome.NOT_ATTEMPTED]
    assert result.no_fit is not None
    assert result.no_fit.needed_blocks == 1
    # Preempt, and send the same again: the token is there already.
    apply(
        depot,
        session,
        Step([(FREE, 1)], free=Free(int32(handles[1]), bytes([FreeMode.PREEMPT]))),
    )
    result = apply(depot, session, step)
    assert result.grow_outcomes == b""
    assert session.requests.keys() == {"a"}


@pytest.mark.parametrize(
    ("fields", "num_new", "outcome"),
    [
        pytest.param({}, [10, 6], Outcome.OK, id="running-budget"),
        pytest.param({"max_new_tokens": 4}, [4, 4], Outcome.OK, id="own-limit"),
        pytest.param({"new_tokens_alignment": 4}, [10, 4], Outcome.OK, id="aligned-chunk"),
        pytest.param({"num_new_tokens": 7}, [7, 7], Outcome.OK, id="stated"),
        pytest.param({"num_new_tokens": 9}, [9, 0], Outcome.NO_BUDGET, id="beyond"),
    ],
)
def test_token_budget(fields: dict[str, int], num_new: list[int], outcome: Outcome) -> None:
    depot = make_depot(30)
    session = depot.open_session("")
    admissions = [new("a", 0, 10, **fields), new("b", 100, 110, **fields)]
    result = apply(depot, session, Step([(ADMIT, 2)], token_budget=16, admissions=admissions))
    assert [admission.num_new_tokens for admission in result.admissions] == num_new
    assert result.admissions[1].outcome is outcome


def test_a_broken_operation_is_named() -> None:
    depot = make_depot(20)
    session = depot.open_session("")
    handle = apply(
        depot, session, Step([(ADMIT, 1)], admissions=[new("a", 0, 8)])
    ).admissions[0].handle  # fmt: skip
    result = apply(
        depot,
        session,
        Step(
            [(GROW, 3)],
            on_no_fit_stop=False,
            grow=Grow(int32(handle, handle, 77), int32(-1, 8, 0), int32(1, 0, 1)),
        ),
    )
    assert list(result.grow_outcomes) == [
        Outcome.INVALID,
        Outcome.INVALID,
        Outcome.UNKNOWN_HANDLE,
    ]
    assert [error.index for error in result.errors] == [0, 1]
    assert "computed" in result.errors[0].error.message


@pytest.mark.parametrize(
    ("step", "field"),
    [
        pytest.param(Step([(9, 0)]), "runs.kind", id="kind"),
        pytest.param(Step([(GROW, 1)]), "runs.count", id="run-without-columns"),
        pytest.param(Step([], free=Free(int32(1))), "runs.count", id="columns-without-run"),
        pytest.param(Step([], grow=Grow(b"abc")), "grow.handles", id="part-of-an-int"),
        pytest.param(
            Step([(GROW, 1)], grow=Grow(int32(1), int32(), int32(1))),
            "grow.num_computed_tokens",
            id="short-column",
        ),
        pytest.param(
            Step(
                [(GROW, 1)],
                grow=Grow(int32(1), int32(1), int32(1), int32(0), int32(2), token_bytes([1])),
            ),
            "grow.tokens",
            id="missing-tokens",
        ),
        pytest.param(
            Step(
                [(GROW, 2)],
                grow=Grow(
                    int32(1, 1), int32(1, 1), int32(1, 1), int32(0, 0), int32(-1, 2),
                    token_bytes([1]),
                ),
            ),
            "grow.token_counts",
            id="negative-count",
        ),
        pytest.param(
            Step([(FREE, 1)], free=Free(int32(1), bytes([7]))), "free.modes", id="mode"
        ),
        pytest.param(
            Step([(FREE, 1)], free=Free(int32(1), b"", b"\0\0")), "free.did_not_run", id="flags"
        ),
    ],
)  # fmt: skip
def test_columns_that_do_not_fit_together(step: Step, field: str) -> None:
    depot = make_depot(20)
    session = depot.open_session("")
    with pytest.raises(InvalidArgument) as caught:
        apply(depot, session, step)
    assert caught.value.field == field


@pytest.mark.parametrize("stops", [True, False], ids=["stop", "continue"])
def test_a_step_deals_with_so_many_blocks(stops: bool) -> None:
    depot = make_depot(40, max_step_blocks=12)
    session = depot.open_session("")
    (admitted,) = apply(depot, session, Step([(ADMIT, 1)], admissions=[new("a", 0, 22)])).admissions
    handle = int32(admitted.handle)
    # Six blocks each time, of which five are a hit: the third time is too much.
    again = SlotRequest("a", lookup=True)
    result = apply(
        depot,
        session,
        Step(
            [(FREE, 1), (ADMIT, 1)] * 4,
            on_no_fit_stop=stops,
            admissions=[again] * 4,
            free=Free(handle * 4, bytes([FreeMode.PREEMPT] * 4)),
        ),
    )
    outcomes = [admission.outcome for admission in result.admissions]
    last = Outcome.NOT_ATTEMPTED if stops else Outcome.NO_BUDGET
    assert outcomes == [Outcome.OK, Outcome.OK, Outcome.NO_BUDGET, last]
    # The next Step begins anew.
    assert apply(depot, session, Step([(ADMIT, 1)], admissions=[again])).errors == []


def test_growth_is_of_so_many_blocks_a_step() -> None:
    depot = make_depot(40, max_step_blocks=5)
    session = depot.open_session("")
    admissions = [new(name, 100 * number, 100 * number + 4) for number, name in enumerate("ab")]
    admitted = apply(depot, session, Step([(ADMIT, 2)], admissions=admissions)).admissions
    first, second = (admission.handle for admission in admitted)
    rows = Grow(int32(first, second, first), int32(4, 4, 4), int32(20, 1, 20))
    result = apply(depot, session, Step([(GROW, 3)], on_no_fit_stop=False, grow=rows))
    # What needs no block is not held up.
    assert list(result.grow_outcomes) == [Outcome.OK, Outcome.NO_BUDGET, Outcome.OK]
    assert ints(result.grow_counts[0]) == [5, 0, 0]


def test_one_request_may_have_more_blocks_than_a_step_deals_with() -> None:
    depot = make_depot(40, max_step_blocks=1)
    session = depot.open_session("")
    step = Step([(ADMIT, 2)], admissions=[new("a", 0, 40), new("b", 100, 101)])
    result = apply(depot, session, step)
    assert [a.outcome for a in result.admissions] == [Outcome.OK, Outcome.NO_BUDGET]


def test_wrong_admissions_cost_what_they_looked_at() -> None:
    """Else a Step of them would hold up all other sessions for minutes."""
    depot = make_depot(40, max_step_blocks=12)
    session = depot.open_session("")
    wrong = SlotRequest("r", content(range(17)), lookup=True, num_external_computed_tokens=99)
    unknown = SlotRequest("nobody")
    step = Step([(ADMIT, 5)], on_no_fit_stop=False, admissions=[unknown, *[wrong] * 4])
    result = apply(depot, session, step)
    assert [admission.outcome for admission in result.admissions] == [
        *(Outcome.INVALID, Outcome.INVALID, Outcome.INVALID, Outcome.INVALID),
        Outcome.NO_BUDGET,
    ]
    assert [error.index for error in result.errors] == [0, 1, 2, 3]


def test_refused_cuts_cost_what_they_looked_at() -> None:
    depot = make_depot(40, max_step_blocks=12)
    one, two = depot.open_session("one"), depot.open_session("two")
    admitted = apply(depot, one, Step([(ADMIT, 1)], admissions=[new("r", 0, 17)]))
    depot.cache_blocks(one, "r", None, 17)
    apply(depot, two, Step([(ADMIT, 1)], admissions=[new("q", 0, 17)]))
    handle = admitted.admissions[0].handle

    def cut(num: int, offset: int) -> StepResult:
        columns = Grow(
            int32(*[handle] * num), int32(*[0] * num), int32(*[1] * num),
            int32(*[offset] * num), int32(*[1] * num), token_bytes([500] * num),
        )  # fmt: skip
        return apply(depot, one, Step([(GROW, num)], on_no_fit_stop=False, grow=columns))

    result = cut(5, 1)
    assert [error.error.reason for error in result.errors] == ["SHARED_BLOCK"] * 3
    assert list(result.grow_outcomes) == [Outcome.INVALID] * 3 + [Outcome.NO_BUDGET] * 2
    assert one.requests["r"].num_tokens == 17
