"""What a caller can get wrong: a typed error that names the field, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvdepot.v1 import cache_pb2, types_pb2
from kvdepot.v1.cache_pb2 import RequestContent, Run
from serving import Scheduler, Served, int32s, refused, tokens

PROMPT = tokens(*range(1, 11))
UINT32_MAX = (1 << 32) - 1
UINT64_MAX = (1 << 64) - 1

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
EXISTS = grpc.StatusCode.ALREADY_EXISTS
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED

Call = Callable[[Scheduler], Any]


def slots(**fields: Any) -> Call:
    """AllocateSlots for the running request."""
    fields = {"num_computed_tokens": 10, "num_new_tokens": 1} | fields
    return lambda s: s.allocate(fields.get("request_id", "running"), **_without_id(fields))


def _without_id(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "request_id"}


def fresh(request_id: str = "new", **content: Any) -> Call:
    """GetComputedBlocks that introduces a request."""
    return lambda s: s.stub.GetComputedBlocks(
        cache_pb2.GetComputedBlocksRequest(
            context=s.context(), request_id=request_id, content=RequestContent(**content)
        ),
        timeout=60,
    )


def step(**fields: Any) -> Call:
    """A Step of one grow operation, unless told otherwise."""
    fields = {
        "runs": [Run(kind=cache_pb2.OPERATION_KIND_GROW, count=1)],
        "on_no_fit": cache_pb2.ON_NO_FIT_STOP,
        "grow": grow(),
    } | fields
    return lambda s: s.stub.Step(cache_pb2.StepRequest(context=s.context(), **fields), timeout=60)


def grow(**columns: bytes) -> cache_pb2.GrowColumns:
    """One operation's columns; the handle is nobody's."""
    defaults = {
        "handles": int32s(77),
        "num_computed_tokens": int32s(10),
        "num_new_tokens": int32s(1),
    }
    return cache_pb2.GrowColumns(**(defaults | columns))


def in_context(**context: Any) -> Call:
    """A Free of nobody, under a context of its own."""

    def call(scheduler: Scheduler) -> Any:
        fields = {
            "session_id": scheduler.opened.session_id,
            "epoch": scheduler.opened.epoch,
        } | context
        return scheduler.stub.Free(
            cache_pb2.FreeRequest(
                context=types_pb2.CallContext(**fields),
                request_id="nobody",
                mode=cache_pb2.FREE_MODE_FINISH,
            ),
            timeout=60,
        )

    return call


CASES = [
    # Who calls.
    pytest.param(
        lambda s: s.stub.OpenSession(cache_pb2.OpenSessionRequest(name="x" * 1025)),
        INVALID,
        "name",
        id="an endless name",
    ),
    pytest.param(in_context(session_id=""), INVALID, "session_id", id="no session"),
    pytest.param(in_context(session_id="0" * 36), NOT_FOUND, "session_id", id="unknown session"),
    pytest.param(in_context(epoch="earlier"), PRECONDITION, "epoch", id="earlier epoch"),
    pytest.param(in_context(op_seq=0), PRECONDITION, "op_seq", id="op_seq zero"),
    pytest.param(in_context(op_seq=UINT64_MAX), PRECONDITION, "op_seq", id="op_seq huge"),
    pytest.param(in_context(step=3), INVALID, "completed_step", id="step alone"),
    pytest.param(
        in_context(step=3, completed_step=4), INVALID, "completed_step", id="completed beyond step"
    ),
    # Request ids.
    pytest.param(fresh(""), INVALID, "request_id", id="empty request id"),
    pytest.param(fresh("x" * 100_000, tokens=PROMPT), INVALID, "request_id", id="endless id"),
    pytest.param(lambda s: s.lookup("unknown"), NOT_FOUND, "request_id", id="unknown request"),
    pytest.param(
        lambda s: s.allocate("unknown", num_new_tokens=1), NOT_FOUND, "request_id", id="allocate it"
    ),
    pytest.param(
        fresh("waiting", tokens=tokens(9, 9), extra_keys=types_pb2.ExtraKeys(cache_salt="s")),
        EXISTS,
        "",
        id="same id, other extra keys",
    ),
    # Content.
    pytest.param(fresh(tokens=b"\1\2\3"), INVALID, "tokens", id="half a token"),
    pytest.param(
        fresh(tokens=PROMPT, token_offset=1), NOT_FOUND, "request_id", id="introduced late"
    ),
    pytest.param(fresh("waiting", tokens=PROMPT, token_offset=11), INVALID, "offset", id="a gap"),
    pytest.param(
        fresh(
            tokens=PROMPT,
            extra_keys=types_pb2.ExtraKeys(prompt_embeds_digests=[b"short"]),
        ),
        INVALID,
        "extra_keys",
        id="digest of wrong length",
    ),
    pytest.param(
        fresh(
            tokens=PROMPT,
            extra_keys=types_pb2.ExtraKeys(
                multimodal=[types_pb2.MultimodalItem(identifier="a", offset=1, length=0)]
            ),
        ),
        INVALID,
        "extra_keys",
        id="item without length",
    ),
    pytest.param(
        fresh(
            tokens=PROMPT,
            extra_keys=types_pb2.ExtraKeys(
                multimodal=[
                    types_pb2.MultimodalItem(identifier=name, offset=offset, length=1)
                    for name, offset in (("a", 5), ("b", 1))
                ]
            ),
        ),
        INVALID,
        "extra_keys",
        id="items out of order",
    ),
    pytest.param(
        fresh(tokens=PROMPT, extra_keys=types_pb2.ExtraKeys(lora_name="n" * 10_000)),
        INVALID,
        "extra_keys",
        id="endless adapter name",
    ),
    pytest.param(
        fresh(
            tokens=PROMPT,
            extra_keys=types_pb2.ExtraKeys(
                multimodal=[types_pb2.MultimodalItem(identifier="i" * 10_000, offset=1, length=1)]
            ),
        ),
        INVALID,
        "extra_keys",
        id="endless identifier",
    ),
    pytest.param(
        fresh(
            tokens=PROMPT,
            extra_keys=types_pb2.ExtraKeys(
                multimodal=[
                    types_pb2.MultimodalItem(identifier=str(index), offset=index // 4, length=9)
                    for index in range(12)
                ]
            ),
        ),
        INVALID,
        "extra_keys.multimodal",
        id="items heaped on one token",
    ),
    # Counts.
    pytest.param(slots(num_new_tokens=0), INVALID, "num_new_tokens", id="no new tokens"),
    pytest.param(slots(num_new_tokens=UINT32_MAX), INVALID, "num_new_tokens", id="too many new"),
    pytest.param(
        slots(num_computed_tokens=UINT32_MAX),
        INVALID,
        "num_computed_tokens",
        id="too many computed",
    ),
    pytest.param(
        fresh("waiting", tokens=PROMPT, token_offset=UINT32_MAX), EXHAUSTED, "tokens", id="too long"
    ),
    pytest.param(
        slots(num_external_computed_tokens=UINT32_MAX),
        INVALID,
        "num_external_computed_tokens",
        id="external",
    ),
    pytest.param(
        slots(request_id="waiting", num_computed_tokens=0, num_new_computed_tokens=UINT32_MAX),
        INVALID,
        "num_new_computed_tokens",
        id="a hit nobody had",
    ),
    pytest.param(
        lambda s: s.cache("running", UINT32_MAX),
        INVALID,
        "num_computed_tokens",
        id="cache too many",
    ),
    # Modes.
    pytest.param(lambda s: s.free("running", 0), INVALID, "mode", id="mode unspecified"),
    pytest.param(lambda s: s.free("running", 99), INVALID, "mode", id="mode unknown"),
    pytest.param(
        lambda s: s.stub.ReturnBlocks(
            cache_pb2.ReturnBlocksRequest(context=s.context(), ticket=UINT64_MAX)
        ),
        NOT_FOUND,
        "ticket",
        id="unknown ticket",
    ),
    # Order.
    pytest.param(lambda s: s.reset(), PRECONDITION, "", id="reset while busy"),
    # Steps.
    pytest.param(step(on_no_fit=9), INVALID, "on_no_fit", id="on_no_fit unknown"),
    pytest.param(step(runs=[Run(kind=0, count=1)]), INVALID, "runs", id="kind unspecified"),
    pytest.param(step(runs=[Run(kind=9, count=1)]), INVALID, "runs", id="kind unknown"),
    pytest.param(step(runs=[Run(kind=2, count=2)]), INVALID, "", id="runs longer than columns"),
    pytest.param(step(runs=[]), INVALID, "", id="columns longer than runs"),
    pytest.param(
        step(runs=[Run(kind=2, count=UINT32_MAX)] * 3), EXHAUSTED, "runs", id="endless runs"
    ),
    pytest.param(step(grow=grow(handles=b"\1\2\3")), INVALID, "grow.handles", id="half a handle"),
    pytest.param(
        step(grow=grow(num_new_tokens=int32s(1, 2))), INVALID, "grow", id="columns of two lengths"
    ),
    pytest.param(
        step(grow=grow(token_counts=int32s(1))), INVALID, "grow", id="counts without offsets"
    ),
    pytest.param(
        step(grow=grow(token_offsets=int32s(10), token_counts=int32s(3), tokens=tokens(1))),
        INVALID,
        "grow",
        id="fewer tokens than counted",
    ),
    pytest.param(
        step(grow=grow(token_offsets=int32s(10), token_counts=int32s(-1), tokens=tokens(1))),
        INVALID,
        "grow",
        id="negative count",
    ),
    pytest.param(
        step(
            runs=[Run(kind=4, count=1)],
            grow=None,
            free=cache_pb2.FreeColumns(handles=int32s(77), modes=b"\1\1"),
        ),
        INVALID,
        "free",
        id="modes of another length",
    ),
]


@pytest.fixture
def scheduler(served: Served) -> Scheduler:
    """A session with a running and a waiting request."""
    session = served.open()
    session.admit("running", PROMPT)
    session.lookup("waiting", PROMPT)
    return session


@pytest.mark.parametrize(("call", "code", "field"), CASES)
def test_refused_and_nothing_changed(
    served: Served, scheduler: Scheduler, call: Call, code: grpc.StatusCode, field: str
) -> None:
    before = served.stats()
    detail = refused(lambda: call(scheduler), code)
    assert field in detail.field
    assert detail.reason
    after = served.stats()
    assert after.blocks == before.blocks
    assert after.num_requests == before.num_requests
    served.assert_clean()
    assert scheduler.free("running").known


def test_a_message_too_large_is_refused_before_it_is_read(
    served: Served, scheduler: Scheduler
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        scheduler.lookup("huge", bytes(100 << 20))
    assert caught.value.code() is EXHAUSTED
    served.assert_clean()
    assert scheduler.free("running").known


def test_an_error_message_has_a_bound(served: Served, scheduler: Scheduler) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        scheduler.lookup("é" * 1_000_000)
    assert caught.value.code() in (INVALID, NOT_FOUND)
    assert len(caught.value.details()) < 1000


def test_what_only_the_server_can_break_leaks_nothing(
    served: Served, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(served.server.node.depot, "free", broken)
    with pytest.raises(grpc.RpcError) as caught:
        scheduler.free("running")
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value)
    assert "RuntimeError" not in str(caught.value)
    assert "a secret" in caplog.text
