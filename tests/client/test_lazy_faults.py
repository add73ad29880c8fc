"""The lazy facade when something breaks under it, or somebody else takes the blocks."""

from __future__ import annotations

import contextlib
import time
from random import Random
from typing import Any

import pytest

from kvclient import Client
from kvclient.errors import (
    CacheLost,
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from kvclient.facade import KVCacheManager
from kvclient.values import Content, Outcome, SlotRequest
from lazy_scheduler import Request, SmallScheduler
from patience import TTL_S, impatient, is_up, until
from test_facade import MAX_MODEL_LEN
from wire import Wire

BLOCK_SIZE, NUM_BLOCKS = 4, 400


def scheduler_over(facade: KVCacheManager, **options: Any) -> SmallScheduler:
    return SmallScheduler(
        facade, 7, sizes=(BLOCK_SIZE,), max_model_len=MAX_MODEL_LEN, ends_early=False, **options
    )


def steps(scheduler: SmallScheduler, start: int, stop: int) -> None:
    for number in range(start, stop):
        scheduler.step(number)


def begin_anew(scheduler: SmallScheduler, facade: KVCacheManager) -> None:
    """What a Scheduler does when its cache is lost: everything waits again."""
    scheduler.facade = facade
    scheduler.in_flight.clear()
    for request in reversed(scheduler.running):
        request.num_computed_tokens = request.num_placeholders = request.reach = 0
        request.life += 1
        request.table = ()
        scheduler.waiting.appendleft(request)
    scheduler.running.clear()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("depth", [1, 2])
def test_the_server_is_killed_in_mid_step(serve: Any, depth: int) -> None:
    """With asks in flight. Everything is admitted again, and finishes."""
    options = {"no_memory": True, "num_blocks": NUM_BLOCKS, "max_model_len": MAX_MODEL_LEN}
    server = serve(**options)
    with server.client(timeout_s=30) as client:
        # Not over before the server is back, however long its start takes.
        session = client.open_session(lease_ttl_s=300)
        scheduler = scheduler_over(KVCacheManager(session, steps_in_flight=depth), depth=depth)
        for number in range(20):
            scheduler.step(number)
        assert scheduler.running
        server.stop()
        serve(listen=server.target, **options)
        until(lambda: is_up(client))
        with pytest.raises(CacheLost) as lost:
            steps(scheduler, 20, 60)
        assert lost.value.reason == "STALE_EPOCH"
        scheduler.facade.close()
        with session.reopen() as fresh:
            facade = KVCacheManager(fresh, steps_in_flight=depth)
            begin_anew(scheduler, facade)
            scheduler.run(60)
            facade.settle()
            assert len(scheduler.finished) == 40
            assert client.stats().blocks.live == 0
            assert client.audit().violations == ()
            facade.close()


def test_a_wire_that_breaks_changes_nothing(serve: Any) -> None:
    server = serve(no_memory=True, num_blocks=NUM_BLOCKS, max_model_len=MAX_MODEL_LEN)
    traces = []
    for breaks in (False, True):
        wire, random = Wire(server.target), Random(3)
        with Client(wire.target, timeout_s=20) as client:
            session = client.open_session()
            facade = KVCacheManager(session, steps_in_flight=1)
            scheduler = scheduler_over(facade)
            number = num_cuts = 0
            while scheduler.arrivals or scheduler.waiting or scheduler.running:
                if breaks and random.random() < 0.15:
                    # The answers to what the last step asked ahead are lost, or not.
                    wire.losing = random.random() < 0.5
                    facade.flush()
                    time.sleep(0.01)
                    wire.cut()
                    num_cuts += 1
                scheduler.step(number)
                number += 1
            facade.settle()
            assert client.audit().violations == ()
            assert client.stats().blocks.live == 0
            assert (num_cuts > 5) is breaks
            session.reset_prefix_cache()
            facade.close()
            session.close()
        wire.close()
        traces.append((scheduler.trace, scheduler.finished))
    assert traces[0] == traces[1]


def test_the_lease_runs_out_with_asks_in_flight(client: Client) -> None:
    session = client.open_session(lease_ttl_s=TTL_S)
    facade = KVCacheManager(session, steps_in_flight=1)
    scheduler = scheduler_over(facade)
    for number in range(12):
        scheduler.step(number)
    facade.flush()
    client._keeper.remove(session)  # as when the scheduler stands still
    until(lambda: not client.stats().num_sessions)
    with pytest.raises(CacheLost) as lost:
        steps(scheduler, 12, 40)
    assert lost.value.reason == "SESSION_EXPIRED"
    facade.close()


def test_a_server_that_cannot_be_reached_is_asked_again(serve: Any) -> None:
    """What was not sent stays queued, what was not answered is asked again."""
    server = serve(no_memory=True, num_blocks=NUM_BLOCKS)
    wire = Wire(server.target)
    with Client(wire.target, timeout_s=20) as far, server.client() as near:
        facade = KVCacheManager(far.open_session(), steps_in_flight=1)
        request = Request("a", list(range(8)), 8, 8)
        facade.new_step_starts()
        assert facade.allocate_slots(request, 7) is not None
        request.num_computed_tokens = 7
        facade.new_step_starts()
        wire.losing = True
        assert facade.allocate_slots(request, 1) is not None
        facade.get_num_common_prefix_blocks("a")
        request.num_computed_tokens = 8
        request.all_token_ids.append(9)
        facade.new_step_starts()
        with impatient(far, facade._stream):
            for _ in range(2):
                with pytest.raises(Exception, match=r"no answer|not begun|Deadline"):
                    facade.allocate_slots(request, 1)
        wire.cut()
        new_blocks = facade.allocate_slots(request, 1)
        assert new_blocks is not None and new_blocks.get_block_ids() == ([3],)
        assert near.stats().blocks.live == 3
        request.finished = True
        facade.free(request)
        facade.settle()
        assert near.stats().blocks.live == 0
        facade.close()
    wire.close()


def test_another_session_takes_what_was_left(serve: Any) -> None:
    """An ask ahead that is refused is no refusal; the growth that needs it is one."""
    server = serve(no_memory=True, num_blocks=6)
    with (
        server.client() as client,
        client.open_session("lazy") as mine,
        client.open_session("other") as other,
    ):
        facade = KVCacheManager(mine, steps_in_flight=1)
        request = Request("a", list(range(8)), 8, 8)
        facade.new_step_starts()
        assert facade.allocate_slots(request, 7) is not None
        rest = SlotRequest("rest", Content(range(100, 112)), lookup=True)
        assert other.allocate_slots(rest).outcome is Outcome.OK
        request.num_computed_tokens = 7
        facade.new_step_starts()
        assert facade.allocate_slots(request, 1) is facade.empty_kv_cache_blocks
        facade.settle()
        # The full blocks are hits all the same.
        assert mine.get_computed_blocks("b", list(range(9))).num_computed_tokens == 8
        request.num_computed_tokens = 8
        request.all_token_ids.append(9)
        for _ in range(2):
            facade.new_step_starts()
            assert facade.allocate_slots(request, 1) is None
        assert facade.get_block_ids("a") == ([1, 2],)
        other.free("rest")
        other.free("rest")  # a later call, which ends the step of the one before
        new_blocks = facade.allocate_slots(request, 1)
        assert new_blocks is not None and len(new_blocks.get_block_ids()[0]) == 1
        request.finished = True
        facade.free(request)
        mine.free("b")
        facade.settle()
        assert client.audit().violations == ()
        facade.close()


def test_a_decode_step_is_one_message_that_nobody_waits_for(client: Client) -> None:
    with client.open_session() as session:
        facade = KVCacheManager(session, steps_in_flight=1)
        requests = [Request(f"r{i}", [i] * (5 + i % 4), 5 + i % 4, 99) for i in range(6)]
        facade.new_step_starts()
        for request in requests:
            assert facade.allocate_slots(request, request.num_tokens) is not None
        sent: list[int] = []
        send, exchange = facade._stream.send, facade._outbox.exchange

        def counted(step: Any, **options: Any) -> Any:
            sent.append(sum(count for _, count in step.runs))
            return send(step, **options)

        def never(*_: Any, **__: Any) -> Any:
            raise AssertionError("a growth was waited for")

        facade._stream.send = counted  # type: ignore[method-assign]
        facade._outbox.exchange = never  # type: ignore[method-assign]
        num_blocks = 0
        for _ in range(24):
            facade.get_num_common_prefix_blocks("r0")
            for request in requests:
                request.num_computed_tokens = request.num_tokens
                request.all_token_ids.append(7)
            facade.take_events()
            facade.new_step_starts()
            for request in requests:
                new_blocks = facade.allocate_slots(request, 1)
                assert new_blocks is not None
                num_blocks += len(new_blocks.get_block_ids()[0])
        assert num_blocks == 36  # 24 tokens of 6 requests
        # Every step a request or two of the six reach the end of a block of four tokens.
        assert len(sent) <= 24 and sum(sent) <= 2 * 36
        facade._outbox.exchange = exchange  # type: ignore[method-assign]
        for request in requests:
            request.finished = True
            facade.free(request)
        facade.settle()
        facade.close()


def test_unavailable_passes_through(serve: Any) -> None:
    server = serve(no_memory=True, num_blocks=NUM_BLOCKS)
    with server.client() as client:
        facade = KVCacheManager(client.open_session())
        request = Request("a", list(range(8)), 8, 8)
        assert facade.allocate_slots(request, 8) is not None
        server.stop()

        def decode() -> None:
            for number in range(20):
                facade.new_step_starts()
                request.num_computed_tokens = 8 + number
                request.all_token_ids.append(number)
                facade.allocate_slots(request, 1)

        with pytest.raises((Unavailable, CacheLost)):
            decode()
        facade.close()


@pytest.mark.parametrize("strict", [True, False])
def test_an_answer_that_was_not_heard_is_made_up_for(serve: Any, strict: bool) -> None:
    """Whoever asks again after an error has in its tables what the server has in its own."""
    server = serve(no_memory=True, num_blocks=NUM_BLOCKS)
    wire = Wire(server.target)
    with Client(wire.target, timeout_s=20) as far, server.client() as near:
        facade = KVCacheManager(far.open_session(), strict=strict)
        seen, fresh, gone = (Request(name, [*name.encode(), *range(7)], 8, 8) for name in "sfg")

        def lost(request: Request, num_new_tokens: int) -> None:
            wire.losing = True
            with (
                impatient(far, facade._stream),
                pytest.raises(Exception, match=r"no answer|not begun|Deadline"),
            ):
                facade.allocate_slots(request, num_new_tokens)
            wire.cut()

        facade.new_step_starts()
        facade.get_computed_blocks(seen)
        lost(gone, 8)
        for request in (seen, fresh):
            lost(request, 8)
            facade.get_computed_blocks(request)
            blocks = facade.allocate_slots(request, 8)
            assert blocks is not None and len(blocks.get_block_ids()[0]) == 2
            assert facade.get_blocks(request.request_id) == blocks
        fresh.num_computed_tokens = 8
        fresh.all_token_ids += range(50, 62)
        lost(fresh, 12)
        blocks = facade.allocate_slots(fresh, 12)
        assert blocks is not None and len(blocks.get_block_ids()[0]) >= 1
        assert len(facade.get_block_ids("f")[0]) == 5
        for request in (seen, fresh, gone):
            request.finished = True
            if request is seen:
                wire.losing = True
                with impatient(far, facade._stream), contextlib.suppress(DeadlineExceeded):
                    facade.free(request)
            else:
                facade.free(request)
            wire.cut()
            facade.free(request)  # unknown by now, whether it raised or not
        facade.settle()
        assert near.stats().blocks.live == 0 and near.list_requests().requests == ()
        facade.close()
    wire.close()


def test_a_ticket_that_was_not_heard_is_kept(serve: Any) -> None:
    """Popped blocks are the caller's, and given back once, whichever answer was lost."""
    server = serve(num_blocks=NUM_BLOCKS)
    wire = Wire(server.target)
    with Client(wire.target, timeout_s=20) as far, server.client() as near:
        facade = KVCacheManager(far.open_session())
        request = Request("a", list(range(8)), 8, 8)
        for _ in range(2):  # the same id again
            facade.new_step_starts()
            blocks = facade.allocate_slots(request, 8)
            assert blocks is not None
            wire.losing = True
            with impatient(far, facade._stream), pytest.raises(DeadlineExceeded):
                facade.pop_blocks_for_free(request)
            wire.cut()
            popped = facade.pop_blocks_for_free(request)
            assert [block.block_id for block in popped] == blocks.blocks[0]
            assert facade.pop_blocks_for_free(request) == []
            assert near.stats().blocks.live == 2
            wire.losing = True
            with impatient(far, facade._stream), pytest.raises(DeadlineExceeded):
                facade.block_pool.free_blocks(popped)
            wire.cut()
            facade.block_pool.free_blocks(popped)
            facade.block_pool.free_blocks(popped)
            assert near.stats().blocks.live == 0
        assert near.audit().violations == ()
        facade.close()
    wire.close()


def test_an_operations_error_keeps_its_class(serve: Any) -> None:
    server = serve(num_blocks=NUM_BLOCKS, max_tokens_per_session=10)
    with server.client() as client, client.open_session() as session:
        facade = KVCacheManager(session)
        assert facade.allocate_slots(Request("a", list(range(8)), 8, 8), 8) is not None
        with pytest.raises(ResourceExhausted) as caught:
            facade.allocate_slots(Request("b", list(range(8)), 8, 8), 8)
        assert (caught.value.reason, caught.value.answered) == ("TOO_MANY_TOKENS", True)
        facade.close()


def test_an_admission_behind_what_is_refused_is_made_up_for(client: Client) -> None:
    with client.open_session() as session:
        facade = KVCacheManager(session)
        first, second = Request("a", list(range(8)), 8, 8), Request("b", list(range(50, 58)), 8, 8)
        assert facade.allocate_slots(first, 8) is not None
        facade._outbox.cache(facade._known["a"], 1000)  # more than it has
        with pytest.raises(InvalidArgument):
            facade.allocate_slots(second, 8)
        blocks = facade.allocate_slots(second, 8)
        assert blocks is not None and len(blocks.get_block_ids()[0]) == 2
        for request in (first, second):
            request.finished = True
            facade.free(request)
        facade.settle()
        assert client.stats().blocks.live == 0
        facade.close()


def test_what_a_message_may_not_take_is_asked_for_again(serve: Any) -> None:
    server = serve(no_memory=True, num_blocks=NUM_BLOCKS, max_step_blocks=1)
    with server.client() as client, client.open_session() as session:
        facade = KVCacheManager(session)
        requests = [Request(name, [*name.encode(), *range(7)], 8, 8) for name in "abcd"]
        facade.new_step_starts()
        for request in requests:
            while facade.allocate_slots(request, 8) is None:
                facade.new_step_starts()
        for number in range(9):
            facade.new_step_starts()
            for request in requests:
                request.num_computed_tokens = request.num_tokens
                request.all_token_ids.append(number)
                assert facade.allocate_slots(request, 1) is not None
        tables = [facade.get_block_ids(request.request_id)[0] for request in requests]
        assert [len(set(table)) for table in tables] == [5] * 4
        assert len(set().union(*tables)) == 20
        for request in requests:
            request.finished = True
            facade.free(request)
        facade.settle()
        assert client.stats().blocks.live == 0
        facade.close()


@pytest.mark.parametrize("strict", [False, True])
def test_messages_are_cut_to_what_the_server_takes(serve: Any, strict: bool) -> None:
    """Same requests, same outputs, with one operation a message and with all in one."""
    finished = []
    for step_operations in (1, 65_536):
        server = serve(no_memory=True, num_blocks=NUM_BLOCKS, max_step_operations=step_operations)
        with server.client() as client, client.open_session() as session:
            assert session.step_operations_max == step_operations
            facade = KVCacheManager(session, strict=strict)
            scheduler = scheduler_over(facade)
            scheduler.run()
            facade.settle()
            assert client.audit().violations == ()
            assert client.stats().blocks.live == 0
            finished.append(scheduler.finished)
            facade.close()
    assert finished[0] == finished[1] and len(finished[0]) == 40


def test_a_message_that_is_refused_is_told_once(serve: Any) -> None:
    """Then the facade says that it is lost, and a new one goes on."""
    server = serve(no_memory=True, num_blocks=NUM_BLOCKS, max_step_operations=2)
    with server.client() as client:
        session = client.open_session()
        facade = KVCacheManager(session, steps_in_flight=1)
        facade._outbox.operations_max = 100  # as over a server that does not say
        scheduler = scheduler_over(facade)
        with pytest.raises(ResourceExhausted) as refused:
            scheduler.run()
        assert refused.value.reason == "STEP_TOO_LARGE"
        for call in (facade.new_step_starts, facade.settle, facade.flush):
            with pytest.raises(CacheLost) as lost:
                call()
            assert lost.value.reason == "MESSAGE_REFUSED" and "STEP_TOO_LARGE" in str(lost.value)
        facade.close()
        with session.reopen() as fresh:
            assert client.stats().blocks.live == 0
            facade = KVCacheManager(fresh, steps_in_flight=1)
            begin_anew(scheduler, facade)
            scheduler.run(1000)
            facade.settle()
            assert len(scheduler.finished) == 40
            assert client.stats().blocks.live == 0
            facade.close()
