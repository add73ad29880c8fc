"""Steps: columns in, columns out, in order."""

from __future__ import annotations

from typing import Any

from kvdepot.v1 import cache_pb2
from kvdepot.v1.cache_pb2 import (
    OPERATION_KIND_ADMIT as ADMIT,
)
from kvdepot.v1.cache_pb2 import (
    OPERATION_KIND_CACHE as CACHE,
)
from kvdepot.v1.cache_pb2 import (
    OPERATION_KIND_FREE as FREE,
)
from kvdepot.v1.cache_pb2 import (
    OPERATION_KIND_GROW as GROW,
)
from serving import Scheduler, Serve, Served, from_int32s, int32s, tokens


def admission(request_id: str, *ids: int, **slots: Any) -> cache_pb2.SlotRequest:
    """One request, looked up and allocated."""
    content = cache_pb2.RequestContent(tokens=tokens(*ids))
    return cache_pb2.SlotRequest(request_id=request_id, content=content, lookup=True, **slots)


def step(
    served: Served, scheduler: Scheduler, runs: list[tuple[int, int]], **fields: Any
) -> cache_pb2.StepResponse:
    """One Step; vLLM's behaviour on a refusal unless told otherwise."""
    fields.setdefault("on_no_fit", cache_pb2.ON_NO_FIT_STOP)
    response: cache_pb2.StepResponse = served.cache.Step(
        cache_pb2.StepRequest(
            context=scheduler.context(),
            runs=[cache_pb2.Run(kind=kind, count=count) for kind, count in runs],
            **fields,
        )
    )
    return response


def grow(handles: list[int], computed: list[int], new: list[int]) -> cache_pb2.GrowColumns:
    """Growth of running requests, without new tokens."""
    return cache_pb2.GrowColumns(
        handles=int32s(*handles),
        num_computed_tokens=int32s(*computed),
        num_new_tokens=int32s(*new),
    )


def test_a_day_in_three_steps(served: Served) -> None:
    scheduler = served.open()
    admitted = step(
        served, scheduler, [(ADMIT, 2)], admissions=[admission("a", 1, 2, 3, 4), admission("b", 5)]
    )
    assert [a.outcome for a in admitted.admissions] == [cache_pb2.OUTCOME_OK] * 2
    tables = [list(table.ids) for a in admitted.admissions for table in a.new_blocks]
    assert tables == [[1], [2]]
    assert admitted.epoch == scheduler.opened.epoch
    assert admitted.free_blocks == 30

    a, b = (result.handle for result in admitted.admissions)
    columns = grow([a, b], [4, 1], [1, 1])
    columns.token_offsets = int32s(4, 1)
    columns.token_counts = int32s(1, 1)
    columns.tokens = tokens(41, 42)
    grown = step(served, scheduler, [(GROW, 2)], grow=columns)
    assert grown.grow.outcomes in (b"", bytes([cache_pb2.OUTCOME_OK] * 2))
    (group,) = grown.grow.new_blocks
    assert from_int32s(group.counts) == [1, 0]
    assert from_int32s(group.ids) == [3]
    assert not grown.HasField("op_seq")

    ended = step(
        served,
        scheduler,
        [(CACHE, 1), (FREE, 2)],
        cache=cache_pb2.CacheColumns(handles=int32s(a), num_computed_tokens=int32s(5)),
        free=cache_pb2.FreeColumns(handles=int32s(a, b)),
    )
    assert ended.free_blocks == 32
    assert not ended.errors
    assert served.stats().num_requests == 0
    served.assert_clean()


def test_order_decides_who_gets_the_last_block(serve: Serve) -> None:
    served = serve(num_blocks=4)
    scheduler = served.open()
    (a,) = step(served, scheduler, [(ADMIT, 1)], admissions=[admission("a", 1, 2, 3, 4)]).admissions
    late = step(
        served,
        scheduler,
        [(ADMIT, 1), (GROW, 1), (FREE, 1), (ADMIT, 1)],
        admissions=[admission("b", *range(8)), admission("c", 9)],
        grow=grow([a.handle], [4], [1]),
        free=cache_pb2.FreeColumns(handles=int32s(a.handle)),
    )
    assert late.admissions[0].outcome == cache_pb2.OUTCOME_OK
    assert list(late.grow.outcomes) == [cache_pb2.OUTCOME_NO_FIT]
    assert late.no_fit.needed_blocks == 1
    assert list(late.free.outcomes) == [cache_pb2.OUTCOME_NOT_ATTEMPTED]
    assert late.admissions[1].outcome == cache_pb2.OUTCOME_NOT_ATTEMPTED
    served.assert_clean()


def test_continue_goes_on_after_a_refusal(serve: Serve) -> None:
    served = serve(num_blocks=4)
    scheduler = served.open()
    response = step(
        served,
        scheduler,
        [(ADMIT, 2)],
        on_no_fit=cache_pb2.ON_NO_FIT_CONTINUE,
        admissions=[admission("large", *range(40)), admission("small", 1)],
    )
    assert [a.outcome for a in response.admissions] == [
        cache_pb2.OUTCOME_NO_FIT,
        cache_pb2.OUTCOME_OK,
    ]


def test_a_budget_chunks_what_it_cannot_take_whole(served: Served) -> None:
    scheduler = served.open()
    response = step(
        served,
        scheduler,
        [(ADMIT, 3)],
        token_budget=12,
        admissions=[
            admission("a", *range(6)),
            admission("b", *range(50, 90), max_new_tokens=8),
            admission("c", 1),
        ],
    )
    assert [a.num_new_tokens for a in response.admissions] == [6, 6, 0]
    assert response.admissions[2].outcome == cache_pb2.OUTCOME_NO_BUDGET


def test_a_broken_operation_is_told_and_the_others_go_on(served: Served) -> None:
    scheduler = served.open()
    (a,) = step(served, scheduler, [(ADMIT, 1)], admissions=[admission("a", 1, 2, 3)]).admissions
    response = step(
        served,
        scheduler,
        [(GROW, 3)],
        on_no_fit=cache_pb2.ON_NO_FIT_CONTINUE,
        grow=grow([a.handle, 999, a.handle], [-1, 3, 3], [1, 1, 1]),
    )
    assert list(response.grow.outcomes) == [
        cache_pb2.OUTCOME_INVALID,
        cache_pb2.OUTCOME_UNKNOWN_HANDLE,
        cache_pb2.OUTCOME_OK,
    ]
    assert [error.index for error in response.errors] == [0]
    served.assert_clean()


def test_a_detached_request_answers_its_ticket_in_the_column(served: Served) -> None:
    scheduler = served.open()
    (a,) = step(served, scheduler, [(ADMIT, 1)], admissions=[admission("a", 1, 2, 3)]).admissions
    response = step(
        served,
        scheduler,
        [(FREE, 1)],
        free=cache_pb2.FreeColumns(
            handles=int32s(a.handle), modes=bytes([cache_pb2.FREE_MODE_DETACH])
        ),
    )
    ticket = int.from_bytes(response.free.tickets, "little")
    returned = served.cache.ReturnBlocks(
        cache_pb2.ReturnBlocksRequest(context=scheduler.context(), ticket=ticket)
    )
    assert returned.num_blocks == 1
    served.assert_clean()
