"""``op_seq`` over the wire: one sequence for unary calls and StepStream alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from kvdepot.v1 import cache_pb2
from serving import Scheduler, Serve, Served, refused, tokens

PROMPT = tokens(*range(10))


def admission(scheduler: Scheduler, request_id: str, op_seq: int) -> cache_pb2.StepRequest:
    """A Step that admits one request."""
    return cache_pb2.StepRequest(
        context=scheduler.context(op_seq=op_seq),
        runs=[cache_pb2.Run(kind=cache_pb2.OPERATION_KIND_ADMIT, count=1)],
        on_no_fit=cache_pb2.ON_NO_FIT_STOP,
        admissions=[
            cache_pb2.SlotRequest(
                request_id=request_id,
                content=cache_pb2.RequestContent(tokens=PROMPT),
                lookup=True,
            )
        ],
    )


class Stream:
    """An open StepStream, one request at a time."""

    def __init__(self, served: Served) -> None:
        self._requests: SimpleQueue[cache_pb2.StepRequest | None] = SimpleQueue()
        requests: Iterator[Any] = iter(self._requests.get, None)
        self._call = served.cache.StepStream(requests, timeout=60)

    def call(self, request: cache_pb2.StepRequest) -> cache_pb2.StepResponse:
        """The answer to one Step."""
        self._requests.put(request)
        response: cache_pb2.StepResponse = next(self._call)
        return response

    def abandon(self) -> None:
        """Send nothing more, on a stream that has ended."""
        self._requests.put(None)

    def close(self) -> None:
        """End it from this side."""
        self._requests.put(None)
        assert list(self._call) == []


@pytest.mark.parametrize(
    ("make", "code"),
    [
        pytest.param(lambda s, n: s.lookup("job", PROMPT, op_seq=n), None, id="GetComputedBlocks"),
        pytest.param(lambda s, n: s.admit("job", PROMPT, op_seq=n), None, id="AllocateSlots"),
        pytest.param(lambda s, n: s.cache("job", 0, op_seq=n), None, id="CacheBlocks"),
        pytest.param(lambda s, n: s.free("other", op_seq=n), None, id="Free"),
        pytest.param(lambda s, n: s.reset(op_seq=n), None, id="ResetPrefixCache"),
        pytest.param(lambda s, n: s.close(op_seq=n), None, id="CloseSession"),
        pytest.param(lambda s, n: s.stub.Step(admission(s, "job", n), timeout=60), None, id="Step"),
        pytest.param(
            lambda s, n: s.free("job", 0, op_seq=n),
            grpc.StatusCode.INVALID_ARGUMENT,
            id="refused for its arguments",
        ),
        pytest.param(
            lambda s, n: s.stub.ReturnBlocks(
                cache_pb2.ReturnBlocksRequest(context=s.context(op_seq=n), ticket=9), timeout=60
            ),
            grpc.StatusCode.NOT_FOUND,
            id="refused by the state",
        ),
    ],
)
def test_a_repeat_is_answered_alike_and_changes_nothing(
    served: Served, make: Callable[[Scheduler, int], Any], code: grpc.StatusCode | None
) -> None:
    scheduler = served.open()

    def outcome() -> Any:
        return make(scheduler, 1) if code is None else refused(lambda: make(scheduler, 1), code)

    first = outcome()
    before = served.stats()
    assert outcome() == first
    after = served.stats()
    after.uptime_seconds = before.uptime_seconds
    assert after == before
    served.assert_clean()


def test_the_number_decides(serve: Serve) -> None:
    served = serve(reply_window=2)
    scheduler = served.open()
    for number in (1, 2, 3):
        scheduler.free("nobody", op_seq=number)
    for number in (0, 1, 5):
        detail = refused(
            lambda number=number: scheduler.free("nobody", op_seq=number),
            grpc.StatusCode.FAILED_PRECONDITION,
        )
        assert detail.expected_op_seq == 4
    scheduler.free("nobody", op_seq=2)
    scheduler.free("nobody")  # without a number: no replay, none taken
    scheduler.free("nobody", op_seq=4)


def test_a_refused_call_takes_its_number(served: Served) -> None:
    scheduler = served.open()
    refused(lambda: scheduler.free("job", 0, op_seq=1), grpc.StatusCode.INVALID_ARGUMENT)
    assert scheduler.admit("job", PROMPT, op_seq=2).outcome == cache_pb2.OUTCOME_OK


def test_unary_and_stream_share_the_sequence(served: Served) -> None:
    scheduler = served.open()
    stream = Stream(served)
    scheduler.admit("a", PROMPT, op_seq=1)
    by_stream = stream.call(admission(scheduler, "b", 2))
    assert by_stream.op_seq == 2
    assert served.cache.Step(admission(scheduler, "b", 2)) == by_stream
    scheduler.free("a", op_seq=3)
    by_unary = served.cache.Step(admission(scheduler, "c", 4))
    assert stream.call(admission(scheduler, "c", 4)) == by_unary
    assert served.stats().num_requests == 2
    stream.close()


def test_a_reopened_stream_resends_what_was_not_acknowledged(served: Served) -> None:
    scheduler = served.open()
    first = Stream(served)
    answered = first.call(admission(scheduler, "a", 1))
    first.close()
    second = Stream(served)
    assert second.call(admission(scheduler, "a", 1)) == answered
    assert second.call(admission(scheduler, "b", 2)).op_seq == 2
    second.close()


def test_an_error_ends_the_stream_and_not_the_session(served: Served) -> None:
    scheduler = served.open()
    stream = Stream(served)
    detail = refused(
        lambda: stream.call(admission(scheduler, "a", 7)), grpc.StatusCode.FAILED_PRECONDITION
    )
    assert detail.expected_op_seq == 1
    again = Stream(served)
    assert again.call(admission(scheduler, "a", 1)).op_seq == 1
    again.close()


def test_a_number_belongs_to_its_method(served: Served) -> None:
    scheduler = served.open()
    scheduler.free("nobody", op_seq=1)
    refused(lambda: scheduler.reset(op_seq=1), grpc.StatusCode.FAILED_PRECONDITION)


def test_a_stop_ends_open_streams_after_what_was_asked(serve: Serve) -> None:
    served = serve()
    scheduler = served.open()
    stream = Stream(served)
    assert stream.call(admission(scheduler, "a", 1)).op_seq == 1
    served.loop.run(served.server.stop())
    detail = refused(lambda: stream.call(admission(scheduler, "b", 2)), grpc.StatusCode.UNAVAILABLE)
    assert (detail.reason, detail.retryable) == ("DRAINING", True)
    stream.abandon()
