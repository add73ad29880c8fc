"""What a session promises when the wire, or the server, does not hold."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest

from kvclient import Client, Session
from kvclient.calls import Call
from kvclient.cli.pull import cached_hashes
from kvclient.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    KVDepotError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from kvclient.sequence import Sequence
from kvclient.values import Content, Free, OperationKind, SlotRequest, Step
from kvdepot.v1 import cache_pb2
from own_process import told_by
from patience import impatient, is_up, until
from wire import Wire


def admit(request_id: str, *tokens: int) -> Step:
    """A Step that looks one request up and gives it slots."""
    slots = SlotRequest(request_id, Content(tokens), lookup=True)
    return Step(runs=[(OperationKind.ADMIT, 1)], admissions=[slots])


def test_a_refusal_names_what_no_session_holds(serve: Any) -> None:
    with serve(num_blocks=9).client() as client, client.open_session("engine") as session:
        prompt = Content(range(9))
        session.allocate_slots(SlotRequest("a", prompt, lookup=True))
        session.cache_blocks("a", 9)
        session.free("a")
        transfer = client.open_transfer(cached_hashes(client), name="decode-7")
        session.allocate_slots(SlotRequest("b", Content(range(50, 58)), lookup=True))
        refused = session.allocate_slots(SlotRequest("c", Content(range(80, 110)), lookup=True))
        assert refused.no_fit is not None
        assert [(hold.name, hold.num_blocks) for hold in refused.no_fit.holders] == [("engine", 2)]
        assert (refused.no_fit.pinned_blocks, refused.no_fit.in_transfer_blocks) == (2, 0)
        assert refused.no_fit.free_blocks == 4
        client.close_transfer(transfer.transfer_id)


def through_a_lost_reply(
    wire: Any, client: Client, call: Callable[[], Any], *, live_before: int, live_after: int
) -> Any:
    """``call``, whose first answer is lost with its connection, after it was done."""
    assert client.stats().blocks.live == live_before
    wire.losing = True
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    until(lambda: client.stats().blocks.live != live_before)
    assert client.stats().blocks.live == live_after
    wire.cut()
    thread.join(60)
    assert client.stats().blocks.live == live_after
    return answers[0]


def test_a_step_whose_answer_is_lost_is_done_once(client: Client, wire: Any) -> None:
    with (
        Client(wire.target, timeout_s=20) as far,
        far.open_session() as session,
        session.step_stream() as stream,
    ):
        stream.call(admit("a", *range(8)))
        reply = through_a_lost_reply(
            wire,
            client,
            lambda: stream.call(admit("b", *range(50, 62))),
            live_before=2,
            live_after=5,
        )
        assert len(reply.admissions[0].new_blocks[0]) == 3
        assert len(stream.call(admit("c", 7)).admissions[0].new_blocks[0]) == 1


def test_a_call_whose_lost_answer_is_kept_no_more(serve: Any) -> None:
    served = serve(
        num_blocks=40_000, block_size=1, max_message_bytes=1 << 16, reply_windows_bytes=1 << 16
    )
    wire = Wire(served.target)
    with (
        Client(served.target, timeout_s=20) as near,
        Client(wire.target, timeout_s=20) as far,
        far.open_session() as session,
        near.open_session() as other,
    ):
        for half in (0, 10_000):
            session.get_computed_blocks("a", Content(range(half, half + 10_000), half))
        wire.losing = True
        errors: list[FailedPrecondition] = []

        def admit_a() -> None:
            with pytest.raises(FailedPrecondition) as caught:
                session.allocate_slots(SlotRequest("a", lookup=True))
            errors.append(caught.value)

        thread = threading.Thread(target=admit_a)
        thread.start()
        until(lambda: near.stats().blocks.live == 20_000)
        # Together more than is kept: the larger one goes.
        assert other.step(admit("b", *range(20_000, 30_000))).errors == []
        wire.cut()
        thread.join(60)
        assert [error.reason for error in errors] == ["OP_SEQ_OUT_OF_WINDOW"]
        # It was done, once, and the session goes on.
        assert near.stats().blocks.live == 30_000
        assert session.free("a").known
        assert not session.free("a").known
        assert near.audit().violations == ()
    wire.close()


def test_the_asyncio_client_on_a_wire_that_breaks(serve: Any) -> None:
    told_by("broken_wire.py", serve().target)


def test_a_unary_call_whose_answer_is_lost_is_done_once(client: Client, wire: Any) -> None:
    with Client(wire.target, timeout_s=20) as far, far.open_session() as session:
        slots = SlotRequest("a", Content(range(12)), lookup=True)
        result = through_a_lost_reply(
            wire, client, lambda: session.allocate_slots(slots), live_before=0, live_after=3
        )
        assert len(result.new_blocks[0]) == 3
        assert session.free("a").known


def test_a_call_that_is_late_is_settled_by_the_next(client: Client, wire: Any) -> None:
    with Client(wire.target, timeout_s=20) as far, far.open_session() as session:
        stream = session.step_stream()
        for late in (
            lambda: session.allocate_slots(SlotRequest("a", Content(range(4)), lookup=True)),
            lambda: session.step(admit("b", *range(8))),
            lambda: stream.call(admit("c", 1)),
        ):
            session.free("z")
            wire.losing = True
            with impatient(far, stream):
                with pytest.raises(DeadlineExceeded) as caught:
                    late()
                assert caught.value.reason == "DEADLINE_EXCEEDED"
                with pytest.raises(Unavailable) as not_begun:
                    session.allocate_slots(SlotRequest("n", Content([1]), lookup=True))
                assert not_begun.value.reason == "UNSETTLED"
            wire.cut()
        settled = session.settle()
        assert len(settled.admissions[0].new_blocks[0]) == 1
        assert session.settle() is None
        assert client.stats().blocks.live == 3
        assert session.close() == 3


def test_a_restarted_server_says_that_the_state_is_gone(serve: Any) -> None:
    first = serve()
    with first.client() as client:
        session = client.open_session()
        stream = session.step_stream()
        stream.call(admit("a", *range(8)))
        first.stop()
        with pytest.raises(Unavailable) as gone:
            stream.call(admit("b", 1))
        assert gone.value.retryable
        second = serve(listen=first.target)
        until(lambda: is_up(client))
        for call in (lambda: stream.call(admit("c", 1)), lambda: session.free("a")):
            with pytest.raises(FailedPrecondition) as stale:
                call()
            assert stale.value.reason == "STALE_EPOCH"
            assert stale.value.current_epoch == second.epoch
        assert client.open_session().epoch == second.epoch


def test_nobody_there() -> None:
    with Client("127.0.0.1:9", timeout_s=5) as client:
        with pytest.raises(Unavailable) as caught:
            client.stats()
        assert caught.value.retryable
        assert not caught.value.answered


def test_over_a_unix_socket(serve: Any, unix_path: str) -> None:
    server = serve(uds=unix_path)
    with Client(f"unix:{unix_path}", timeout_s=20) as client:
        assert client.stats().epoch == server.epoch


def test_threads_take_turns(client: Client) -> None:
    with client.open_session() as session, session.step_stream() as stream:
        errors: list[BaseException] = []

        def work(name: str) -> None:
            try:
                for count in range(20):
                    stream.call(admit(f"{name}{count}", count))
                    session.free(f"{name}{count}")
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []


def test_too_large_a_message_breaks_nothing(client: Client, server: Any) -> None:
    with server.client(max_message_bytes=10_000) as narrow, narrow.open_session() as session:
        with pytest.raises(ResourceExhausted):
            session.get_computed_blocks("a", range(5_000))
        assert session.get_computed_blocks("a", range(10)).handle
        with session.step_stream() as stream:
            with pytest.raises(ResourceExhausted):
                stream.call(admit("b", *range(5_000)))
            assert stream.call(admit("b", 1)).errors == []


def test_a_closed_end_is_closed(client: Client, server: Any) -> None:
    other = server.client()
    session = other.open_session()
    stream = session.step_stream()
    stream.call(Step(runs=[]))
    stream.close()
    with pytest.raises(FailedPrecondition, match="stream is closed"):
        stream.call(Step(runs=[]))
    session.close()
    with pytest.raises(FailedPrecondition, match="session is closed"):
        session.free("a")
    events = other.stream_events()
    events.close()
    with pytest.raises((Cancelled, StopIteration)):
        next(events)
    other.close()
    with pytest.raises(FailedPrecondition, match="client is closed"):
        other.stats()


def test_a_failing_with_block_closes_its_session(client: Client) -> None:
    with suppress(ZeroDivisionError), client.open_session() as session:
        session.step(admit("a", 1))
        raise ZeroDivisionError
    assert client.stats().num_sessions == 0


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("num_computed_tokens", lambda session: session.cache_blocks("a", -1)),
        ("ticket", lambda session: session.return_blocks(1 << 64)),
        (
            "num_new_tokens",
            lambda session: session.allocate_slots(SlotRequest("a", num_new_tokens=1 << 32)),
        ),
        ("token_offset", lambda session: session.get_computed_blocks("a", Content(b"", -1))),
        (
            "free.handles",
            lambda session: session.step(
                Step(runs=[(OperationKind.FREE, 1)], free=Free(handles=[1 << 31]))
            ),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_wire_cannot_carry_is_refused_here(
    client: Client, field: str, call: Callable[[Session], Any]
) -> None:
    with client.open_session() as session:
        with pytest.raises(InvalidArgument) as caught:
            call(session)
        assert caught.value.field == field
        assert session.free("a").known is False


def _answered(error: KVDepotError, *, took_op_seq: bool = False) -> KVDepotError:
    error.answered, error.took_op_seq = True, took_op_seq
    return error


@pytest.mark.parametrize(
    ("error", "pending", "next_op_seq"),
    [
        pytest.param(
            _answered(NotFound("", reason="X"), took_op_seq=True), False, 2, id="the-server-said-no"
        ),
        pytest.param(
            _answered(ResourceExhausted("", reason="X", retryable=True), took_op_seq=True),
            False,
            2,
            id="not-now-and-numbered",
        ),
        pytest.param(_answered(InvalidArgument("")), False, 1, id="refused-unseen-for-good"),
        pytest.param(Unavailable("", reason="X"), True, 1, id="the-wire-broke"),
        pytest.param(_answered(Unavailable("", reason="X")), True, 1, id="the-server-stops"),
        pytest.param(DeadlineExceeded("", reason="X"), True, 1, id="late"),
        pytest.param(ResourceExhausted("", reason="X"), False, 2, id="too-large-perhaps-done"),
        pytest.param(
            _answered(ResourceExhausted("", reason="X", retryable=True)),
            True,
            1,
            id="refused-unseen-for-now",
        ),
        pytest.param(
            FailedPrecondition("", reason="X", expected_op_seq=2), False, 2, id="done-and-forgotten"
        ),
        pytest.param(FailedPrecondition("", reason="X", expected_op_seq=9), False, 1, id="astray"),
    ],
)
def test_what_a_failed_call_leaves(error: KVDepotError, pending: bool, next_op_seq: int) -> None:
    sequence = Sequence("session", "epoch")
    call: Call[Any] = Call("KVCacheService", "Free", cache_pb2.FreeRequest(), lambda reply: reply)
    flight = sequence.begin(call)
    assert sequence.failed(error) is False
    assert (sequence.pending is flight) is pending
    assert flight.is_settled is not pending
    if pending:
        assert call.request.context.op_seq == next_op_seq
    else:
        sequence.begin(call)
        assert call.request.context.op_seq == next_op_seq


def test_no_grpc_error_escapes() -> None:
    assert not issubclass(KVDepotError, grpc.RpcError)
