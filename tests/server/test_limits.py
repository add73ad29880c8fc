"""What is bounded, and what a caller at the bound is told."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvdepot.v1 import cache_pb2, transfer_pb2
from kvserver.config import ConfigError
from kvserver.sources import parse
from serving import Scheduler, Serve, Served, int32s, refused, tokens

PROMPT = tokens(*range(1, 11))

Act = Callable[[Served, Scheduler], Any]


def follow(served: Served) -> Any:
    """An open StreamEvents, or its refusal."""
    stream = served.follow()
    if stream.done():
        next(stream)
    return stream


def attach(served: Served, scheduler: Scheduler) -> Any:
    """An open AttachWorker."""
    stream = served.attach(scheduler)
    next(stream)
    return stream


def fill_sessions(served: Served, _: Scheduler) -> None:
    served.open()


def fill_requests(_: Served, scheduler: Scheduler) -> None:
    scheduler.lookup("a", PROMPT)


def fill_tokens(_: Served, scheduler: Scheduler) -> None:
    scheduler.lookup("a", PROMPT)
    refused_by_step(scheduler)


def refused_by_step(scheduler: Scheduler) -> None:
    """In a Step it is the operation that is refused."""
    response = scheduler.stub.Step(
        cache_pb2.StepRequest(
            context=scheduler.context(),
            runs=[cache_pb2.Run(kind=cache_pb2.OPERATION_KIND_ADMIT, count=1)],
            admissions=[
                cache_pb2.SlotRequest(
                    request_id="b",
                    content=cache_pb2.RequestContent(tokens=PROMPT[:40]),
                    lookup=True,
                )
            ],
        ),
        timeout=60,
    )
    assert response.admissions[0].outcome == cache_pb2.OUTCOME_INVALID
    (error,) = response.errors
    assert (error.reason, error.code) == ("TOO_MANY_TOKENS", 8)  # RESOURCE_EXHAUSTED


def step_of(*runs: int, **columns: Any) -> Act:
    """A Step that frees so many in each run, or says so."""

    def act(_: Served, scheduler: Scheduler) -> None:
        scheduler.stub.Step(
            cache_pb2.StepRequest(
                context=scheduler.context(),
                runs=[
                    cache_pb2.Run(kind=cache_pb2.OPERATION_KIND_FREE, count=count) for count in runs
                ],
                **columns,
            ),
            timeout=60,
        )

    return act


THREE = cache_pb2.FreeColumns(handles=int32s(1, 2, 3))


def too_large_a_transfer(served: Served, _: Scheduler) -> None:
    hashes = [bytes([number]) * 32 for number in range(3)]
    groups = [transfer_pb2.GroupHashes(block_hashes=hashes)]
    served.transfer.OpenTransfer(transfer_pb2.OpenTransferRequest(groups=groups), timeout=60)


@pytest.mark.parametrize(
    ("option", "call", "reason"),
    [
        pytest.param("max_step_operations", step_of(3, free=THREE), "STEP_TOO_LARGE", id="a step"),
        pytest.param(
            "max_step_operations",
            step_of(1, 1, 1, free=THREE),
            "STEP_TOO_LARGE",
            id="a step of many runs",
        ),
        pytest.param(
            "max_transfer_blocks", too_large_a_transfer, "TOO_MANY_BLOCKS", id="a transfer"
        ),
    ],
)
def test_a_call_that_is_too_large(serve: Serve, option: str, call: Act, reason: str) -> None:
    served = serve(**{option: 2})
    scheduler = served.open()
    for _ in range(2):
        detail = refused(lambda: call(served, scheduler), grpc.StatusCode.RESOURCE_EXHAUSTED)
        # It will not fit later either.
        assert (detail.reason, detail.retryable) == (reason, False)
    served = serve(**{option: 3})
    call(served, served.open())


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step_of(*[0] * 5000), id="empty runs"),
        pytest.param(step_of(admissions=[cache_pb2.SlotRequest()] * 5000), id="admissions"),
        pytest.param(step_of(grow=cache_pb2.GrowColumns(handles=bytes(20_000))), id="growth"),
        pytest.param(step_of(cache=cache_pb2.CacheColumns(handles=bytes(20_000))), id="caching"),
        pytest.param(step_of(free=cache_pb2.FreeColumns(handles=bytes(20_000))), id="freeing"),
    ],
)
def test_rows_that_no_run_counts_are_not_even_read(serve: Serve, step: Act) -> None:
    served = serve(max_step_operations=100)
    scheduler = served.open()
    detail = refused(lambda: step(served, scheduler), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert (detail.reason, detail.field) == ("STEP_TOO_LARGE", "runs")


def test_the_last_reply_is_kept_whatever_its_size(serve: Serve) -> None:
    served = serve(num_blocks=401, reply_window_bytes=100)
    scheduler = served.open()
    prompt = tokens(*range(1000))
    admitted = scheduler.admit("a", prompt, op_seq=1)
    assert len(admitted.new_blocks[0].ids) == 250
    assert scheduler.admit("a", prompt, op_seq=1) == admitted
    for number in (2, 3):
        assert scheduler.free("a", op_seq=number).known == (number == 2)
    for lost in (1, 2):
        detail = refused(
            lambda lost=lost: scheduler.admit("a", prompt, op_seq=lost),
            grpc.StatusCode.FAILED_PRECONDITION,
        )
        assert (detail.reason, detail.expected_op_seq) == ("OP_SEQ_OUT_OF_WINDOW", 4)
    assert not scheduler.free("a", op_seq=3).known
    assert served.stats().num_requests == 0
    served.assert_clean()


def test_all_sessions_together_keep_so_much(serve: Serve) -> None:
    served = serve(num_blocks=65_001, max_message_bytes=1 << 16, reply_windows_bytes=1 << 16)
    busy, calm = served.open("busy"), served.open("calm")
    admitted = calm.admit("a", PROMPT, op_seq=1)
    for number in range(1, 40):
        own = tokens(*range(5000 * number, 5000 * number + 4000))
        assert busy.admit(f"{number}", own, op_seq=number).outcome == cache_pb2.OUTCOME_OK
        assert served.server.node._replies.nbytes <= 1 << 16
    # Who keeps little loses nothing; who keeps much, what is old.
    assert calm.admit("a", PROMPT, op_seq=1) == admitted
    assert busy.admit("39", own, op_seq=39).outcome == cache_pb2.OUTCOME_OK
    detail = refused(lambda: busy.admit("1", PROMPT, op_seq=1), grpc.StatusCode.FAILED_PRECONDITION)
    assert (detail.reason, detail.expected_op_seq) == ("OP_SEQ_OUT_OF_WINDOW", 40)
    assert served.stats().num_requests == 40
    served.assert_clean()


@pytest.mark.parametrize(
    ("options", "fill", "beyond", "reason"),
    [
        pytest.param(
            {"max_sessions": 2},
            fill_sessions,
            lambda served, _: served.open(),
            "TOO_MANY_SESSIONS",
            id="sessions",
        ),
        pytest.param(
            {"max_requests_per_session": 1},
            fill_requests,
            lambda _, scheduler: scheduler.lookup("b", tokens(1)),
            "TOO_MANY_REQUESTS",
            id="requests",
        ),
        pytest.param(
            {"max_tokens_per_session": 15},
            fill_tokens,
            lambda _, scheduler: scheduler.lookup("b", tokens(*range(6))),
            "TOO_MANY_TOKENS",
            id="tokens",
        ),
        pytest.param(
            {"max_tokens_per_session": 15},
            fill_tokens,
            lambda _, scheduler: scheduler.allocate(
                "a",
                content=cache_pb2.RequestContent(token_offset=10, tokens=tokens(*range(6))),
                num_new_tokens=1,
            ),
            "TOO_MANY_TOKENS",
            id="tokens appended",
        ),
        pytest.param(
            {"max_workers_per_session": 1}, attach, attach, "TOO_MANY_WORKERS", id="workers"
        ),
        *(
            pytest.param({"max_concurrent_streams": 1}, fill, beyond, "TOO_MANY_STREAMS", id=name)
            for name, fill, beyond in (
                ("an event stream", attach, lambda served, _: follow(served)),
                ("a step stream", attach, lambda _, scheduler: scheduler.step_stream()),
                ("a worker", lambda served, _: follow(served), attach),
            )
        ),
    ],
)
def test_at_the_limit(
    serve: Serve, options: dict[str, int], fill: Act, beyond: Act, reason: str
) -> None:
    served = serve(**options)
    scheduler = served.open()
    held = fill(served, scheduler)
    before = served.stats()
    for _ in range(2):
        detail = refused(lambda: beyond(served, scheduler), grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert (detail.reason, detail.retryable) == (reason, True)
    after = served.stats()
    assert (after.blocks, after.num_requests) == (before.blocks, before.num_requests)
    served.assert_clean()
    del held


def test_room_that_is_given_back(serve: Serve) -> None:
    served = serve(max_tokens_per_session=20, max_concurrent_streams=1)
    scheduler = served.open()
    for number in range(5):
        scheduler.admit(f"{number}", PROMPT)
        own = tokens(*range(1000 * number, 1000 * number + 10))
        scheduler.admit("cut", own)
        scheduler.free(f"{number}", cache_pb2.FREE_MODE_DETACH)
        # Cut off to 4 tokens, and again to the limit.
        for prompt in (own[:16], own + tokens(*range(100, 110))):
            scheduler.stub.CacheBlocks(
                cache_pb2.CacheBlocksRequest(
                    context=scheduler.context(),
                    request_id="cut",
                    content=cache_pb2.RequestContent(tokens=prompt),
                ),
                timeout=60,
            )
        scheduler.free("cut")
    served.assert_clean()
    for _ in range(3):
        scheduler.step_stream()


def test_a_message_beyond_the_limit(serve: Serve) -> None:
    served = serve(max_message_bytes=1 << 16)
    scheduler = served.open()
    with pytest.raises(grpc.RpcError) as caught:
        scheduler.lookup("a", bytes(1 << 17))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "65536" in caught.value.details()
    assert scheduler.lookup("a", PROMPT).handle


def test_help_tells_every_limit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"], {})
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option, default in (
        ("--max-sessions", "1024"),
        ("--max-requests-per-session", "65536"),
        ("--max-tokens-per-session", "67108864"),
        ("--max-workers-per-session", "256"),
        ("--max-concurrent-streams", "4096"),
        ("--max-step-operations", "65536"),
        ("--max-step-blocks", "1048576"),
        ("--max-message-bytes", "64MiB"),
        ("--reply-window", "64"),
        ("--reply-window-bytes", "16MiB"),
        ("--reply-windows-bytes", "256MiB"),
        ("--ended-sessions-kept", "4096"),
        ("--event-queue-bytes", "64MiB"),
        ("--event-history-bytes", "256MiB"),
        ("--lease-ttl-seconds", "30"),
        ("--lease-ttl-seconds-max", "600"),
        ("--quarantine-seconds", "60"),
        ("--reset-deadline-seconds", "300"),
    ):
        told = re.search(rf"{option} [A-Z]+ (.*?)(?: --|$)", text)
        assert told is not None, option
        assert f"(default {default})" in told[1]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--max-tokens-per-session", "0"], "--max-tokens-per-session"),
        (["--lease-ttl-seconds", "0"], "--lease-ttl-seconds"),
        (
            ["--lease-ttl-seconds", "700"],
            "--lease-ttl-seconds 700 is more than",
        ),
        (
            ["--reply-windows-bytes", "1000000"],
            "--max-message-bytes 67108864 is more than --reply-windows-bytes 1000000",
        ),
        (["--max-concurrent-streams", "many"], "--max-concurrent-streams"),
        (["--quarantine-seconds", "-1"], "--quarantine-seconds"),
    ],
)
def test_limits_that_make_no_sense(argv: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(argv, {})
