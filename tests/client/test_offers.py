"""Lazy lookups take slots at once: what fits is there, what does not goes back, whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvclient import Client
from kvclient.errors import ResourceExhausted
from kvclient.facade import KVCacheManager
from kvclient.session import Session
from kvclient.values import Content, OperationKind, Outcome, SlotRequest
from lazy_scheduler import BUDGET, MAX_RUNNING, Request, SmallScheduler
from test_facade import MAX_MODEL_LEN
from test_lazy import KINDS
from wire import Wire

BLOCK_SIZE, NUM_BLOCKS = 4, 64


@pytest.fixture(scope="module")
def server(serve: Any) -> Any:
    return serve(no_memory=True, num_blocks=NUM_BLOCKS, max_model_len=MAX_MODEL_LEN)


@pytest.fixture
def client(server: Any) -> Iterator[Client]:
    with server.client() as client:
        yield client
        assert client.stats().blocks.live == 0
        assert client.audit().violations == ()


def a_request(name: str, num_tokens: int = 10) -> Request:
    return Request(name, [*name.encode(), *range(num_tokens - len(name))], num_tokens, 8)


def admit(facade: KVCacheManager, request: Request) -> int:
    """As a Scheduler does; the tokens of the hit."""
    hit, num_hit = facade.get_computed_blocks(request)
    num_new, is_alone = request.num_tokens - num_hit, not facade._tables.num_requests
    blocks = facade.allocate_slots(request, num_new, num_hit, hit, has_scheduled_reqs=not is_alone)
    assert blocks is not None
    return num_hit


def fill(session: Session) -> list[Outcome]:
    """Takes all the pool, if it is free; and gives it back."""
    size = (NUM_BLOCKS - 1) // 3 * BLOCK_SIZE
    names = [f"fill{number}" for number in range(3)]
    outcomes = [
        session.allocate_slots(
            SlotRequest(name, Content(range(size * number, size * (number + 1))), lookup=True)
        ).outcome
        for number, name in enumerate(names, 1000)
    ]
    for name in [*names, *names]:  # what is unknown is a later call, which ends the step before
        session.free(name)
    return outcomes


def messages(facade: KVCacheManager) -> list[list[tuple[OperationKind, int]]]:
    """The runs of each message that it sends from now on."""
    sent: list[list[tuple[OperationKind, int]]] = []
    send = facade._stream.send

    def noted(step: Any, **options: Any) -> Any:
        sent.append(list(step.runs))
        return send(step, **options)

    facade._stream.send = noted  # type: ignore[method-assign]
    return sent


def end(facade: KVCacheManager, *requests: Request) -> None:
    for request in requests:
        request.finished = True
        facade.free(request)
    facade.settle()
    facade.close()


def test_an_admission_is_one_message(client: Client) -> None:
    with client.open_session() as session:
        facade = KVCacheManager(session)
        requests = [a_request(name) for name in "abc"]
        facade.new_step_starts()
        sent = messages(facade)
        for request in requests:
            hit, num_hit = facade.get_computed_blocks(request)
            assert facade.get_computed_blocks(request) == (hit, num_hit)
            assert admit(facade, request) == num_hit == 0
            assert len(facade.get_block_ids(request.request_id)[0]) == 3
        assert sent == [[(OperationKind.ADMIT, 1)]] * 3
        end(facade, *requests)
        session.reset_prefix_cache()


@pytest.mark.parametrize("is_over", [False, True], ids=["aborted", "finished"])
def test_what_was_offered_before_a_free_is_taken_by_nobody(client: Client, is_over: bool) -> None:
    """The same id again, in the same step, with as many tokens."""
    with client.open_session() as session:
        facade = KVCacheManager(session)
        runs, freed = a_request("z"), a_request("a")
        facade.new_step_starts()
        admit(facade, runs)
        facade.get_computed_blocks(freed)
        freed.finished = is_over
        facade.free(freed)
        again = a_request("a")
        admit(facade, again)
        facade.new_step_starts()
        facade.settle()
        held = {one.request_id: one.num_blocks for one in client.list_requests().requests}
        assert held == {"z": 3, "a": 3}
        end(facade, runs, again)
        session.reset_prefix_cache()


def test_who_is_looked_up_before_those_hinted_earlier_is_offered_once(client: Client) -> None:
    with client.open_session() as session:
        facade = KVCacheManager(session, max_num_batched_tokens=64, max_num_seqs=8)
        runs, *hinted = (a_request(name) for name in "zbad")
        facade.new_step_starts()
        admit(facade, runs)
        for request in hinted:
            facade.prefetch(request)
        facade.settle()
        sent = messages(facade)
        for request in (hinted[1], hinted[0], hinted[2]):
            admit(facade, request)
        assert (
            sum(count for runs in sent for kind, count in runs if kind == OperationKind.ADMIT) == 3
        )
        end(facade, runs, *hinted)
        session.reset_prefix_cache()


ASKED_FOR: dict[str, dict[str, Any]] = {
    "fewer-tokens": {"num_new_tokens": 1},
    "more-slots": {"num_lookahead_tokens": 7},
    "the-whole-must-fit": {"full_sequence_must_fit": True},
    "some-are-reserved": {"reserved_blocks": 3},
    "some-come-from-elsewhere": {"num_new_tokens": 0, "num_external_computed_tokens": 1},
}


@pytest.mark.parametrize("asked", ASKED_FOR.values(), ids=ASKED_FOR)
def test_what_is_asked_for_otherwise_is_given_so(client: Client, asked: dict[str, Any]) -> None:
    """With the hit of the offer; nothing else is left in the pool, nor more than it needs."""
    with client.open_session() as session, client.open_session() as other:
        facade = KVCacheManager(session)
        first, second = a_request("a", 9), Request("b", [*b"a", *range(9)], 10, 8)
        facade.new_step_starts()
        admit(facade, first)
        first.num_computed_tokens = 9
        facade.new_step_starts()
        for _ in range(2):  # the second time it is offered as it was asked for
            hit, num_hit = facade.get_computed_blocks(second)
            assert num_hit == 8
            options = {"num_new_tokens": 2} | asked
            blocks = facade.allocate_slots(
                second, options.pop("num_new_tokens"), num_hit, hit, **options
            )
            assert blocks is not None
            num_held = len(facade.get_block_ids("b")[0])
            end_slots = min(num_hit + 2 + options.get("num_lookahead_tokens", 0), MAX_MODEL_LEN)
            assert num_held == -(-end_slots // BLOCK_SIZE)
            held = {*facade.get_block_ids("a")[0], *facade.get_block_ids("b")[0]}
            facade.settle()
            assert client.stats().blocks.live == len(held)
            facade.free(second)
        assert other.get_computed_blocks("c", second.all_token_ids).num_computed_tokens == 8
        other.free("c")
        end(facade, first, second)
        session.reset_prefix_cache()


@pytest.mark.parametrize("ends", ["step", "other", "free", "growth", "close"])
def test_what_is_not_asked_for_goes_back(client: Client, ends: str) -> None:
    """With the next message. What it would have computed is no hit."""
    with client.open_session() as session:
        facade = KVCacheManager(session)
        runs, waits = a_request("r", 8), a_request("w", 24)
        facade.new_step_starts()
        admit(facade, runs)
        facade.new_step_starts()
        facade.settle()
        num_live = client.stats().blocks.live
        facade.get_computed_blocks(waits)
        assert client.stats().blocks.live == num_live + 6
        after = Request("x", [*waits.all_token_ids, 1], 25, 8)
        if ends == "step":
            facade.get_num_common_prefix_blocks("r")
        elif ends == "other":
            assert facade.get_computed_blocks(after)[1] == 0
            facade.get_num_common_prefix_blocks("r")
        elif ends == "free":
            facade.free(waits)
            facade.get_num_common_prefix_blocks("r")
        elif ends == "growth":
            # All of the pool but what the offer holds would not do.
            runs.num_computed_tokens = 8
            runs.all_token_ids += range(88)
            assert facade.allocate_slots(runs, 88) is not None
            num_live = MAX_MODEL_LEN // BLOCK_SIZE
        if ends == "close":
            facade.close()
        else:
            facade.settle()
        assert client.stats().blocks.live == num_live
        mark = facade._mark()
        hit = session.get_computed_blocks("y", after.all_token_ids, mark=mark)
        assert hit.num_computed_tokens == 0
        for name in "yrw" if ends == "close" else "y":
            session.free(name, mark=mark)
        if ends != "close":
            end(facade, runs, waits, after)
        session.reset_prefix_cache()


def test_an_offer_holds_its_hit(client: Client) -> None:
    """Nobody takes it between lookup and allocation, unless it is asked for otherwise."""
    with client.open_session("first") as first, client.open_session("second") as second:
        facade = KVCacheManager(first)
        old, new = a_request("o", 8), Request("n", [*b"o", *range(8)], 9, 8)
        admit(facade, old)
        old.finished = True
        facade.free(old)
        facade.new_step_starts()
        for number in range(2):
            hit, num_hit = facade.get_computed_blocks(new)
            assert num_hit == 8
            assert fill(second)[-1] is Outcome.NO_FIT
            if number:
                facade.settle()
                facade.new_step_starts()
                first.free("nobody", mark=facade._mark())  # the step before has ended
                assert fill(second)[-1] is Outcome.OK
            # What it had was given back, and another has it.
            blocks = facade.allocate_slots(new, 1, num_hit, hit, has_scheduled_reqs=False)
            assert (blocks is None) == bool(number)
            facade.free(new)
            facade.settle()
            facade.new_step_starts()
        end(facade, new)


def test_a_step_of_hinted_requests_is_one_message(client: Client) -> None:
    """They are introduced with one that nobody waits for."""
    with client.open_session() as session:
        facade = KVCacheManager(session, max_num_batched_tokens=45, max_num_seqs=6)
        runs = a_request("r", 8)
        facade.new_step_starts()
        admit(facade, runs)
        requests = [a_request(f"w{number}") for number in range(8)]
        for request in [*requests, requests[0], runs]:
            facade.prefetch(request)
        facade.get_num_common_prefix_blocks("r")
        facade.settle()
        assert client.stats().num_requests == 9
        runs.num_computed_tokens = 8
        runs.all_token_ids.append(1)
        facade.new_step_starts()
        sent = messages(facade)
        assert facade.allocate_slots(runs, 1) is not None
        budget = 44
        for request in requests[:5]:
            hit, num_hit = facade.get_computed_blocks(request)
            num_new = min(10, budget)
            budget -= num_new
            assert facade.allocate_slots(request, num_new, num_hit, hit) is not None
        assert sent == [[(OperationKind.ADMIT, 5)]]
        assert budget == 0 and client.stats().blocks.live == 3 + 4 * 3 + 1
        end(facade, runs, *requests)
        assert client.stats().num_requests == 0
        session.reset_prefix_cache()


def test_behind_one_that_is_not_admitted_nobody_reads_it(client: Client) -> None:
    """What a follower hits may be what the one before it would have computed."""
    with client.open_session() as session:
        facade = KVCacheManager(session, max_num_batched_tokens=99)
        runs = a_request("r", 8)
        facade.new_step_starts()
        admit(facade, runs)
        facade.new_step_starts()
        tokens = list(range(50, 60))
        first, second = (
            Request(name, [*tokens, number], 11, 8) for number, name in enumerate("xy")
        )
        facade.prefetch(first)
        facade.prefetch(second)
        facade.get_computed_blocks(first)
        assert [offer.result.num_new_computed_tokens for offer in facade._outbox.offers] == [0, 8]
        assert facade.get_computed_blocks(second)[1] == 0
        assert facade.allocate_slots(second, 11) is not None
        assert facade.get_computed_blocks(first)[1] == 8
        end(facade, runs, first, second)
        session.reset_prefix_cache()


def test_the_next_part_of_a_prompt_is_there_when_it_is_needed(client: Client) -> None:
    """It is asked for while the part before it runs. It is no hit before it was computed."""
    with client.open_session() as session:
        facade = KVCacheManager(session, max_num_batched_tokens=12)
        request = a_request("r", 30)
        facade.new_step_starts()
        hit, num_hit = facade.get_computed_blocks(request)
        blocks = facade.allocate_slots(request, 12, num_hit, hit, has_scheduled_reqs=False)
        for number, num_blocks in enumerate((3, 3, 2)):
            assert blocks is not None and len(blocks.get_block_ids()[0]) == num_blocks
            facade.get_num_common_prefix_blocks("r")
            facade.settle()
            # At most the next part's are held, and of the last one a block.
            assert client.stats().blocks.live == (6, 8, 8)[number]
            found = session.get_computed_blocks("x", request.all_token_ids, mark=facade._mark())
            assert found.num_computed_tokens == (12, 24, 28)[number]
            session.free("x", mark=facade._mark())
            request.num_computed_tokens += (12, 12, 6)[number]
            facade.new_step_starts()
            sent = messages(facade)
            if number < 2:
                blocks = facade.allocate_slots(request, (12, 6)[number])
                assert sent == []
        end(facade, request)
        session.reset_prefix_cache()


@pytest.mark.parametrize("sends", [False, True])
def test_a_hinted_request_may_end_before_it_is_looked_up(client: Client, sends: bool) -> None:
    with client.open_session() as session:
        facade = KVCacheManager(session)
        runs, waits = a_request("r"), a_request("w")
        facade.prefetch(waits)
        admit(facade, runs)
        if sends:
            facade.get_num_common_prefix_blocks("r")
        waits.finished = True
        facade.free(waits)
        facade.settle()
        assert client.stats().num_requests == 1
        waits.finished = False
        assert facade.get_computed_blocks(waits)[1] == 0
        assert facade.allocate_slots(waits, 10) is not None
        end(facade, runs, waits)
        session.reset_prefix_cache()


def test_who_is_refused_hears_it_himself(serve: Any) -> None:
    """Not whoever reads the answer to an introduction, or to offers."""
    server = serve(no_memory=True, num_blocks=NUM_BLOCKS, max_tokens_per_session=30)
    with server.client() as client, client.open_session() as session:
        facade = KVCacheManager(session, max_num_batched_tokens=99)
        first, second, third = a_request("a"), a_request("b"), a_request("c", 20)
        admit(facade, first)
        for request in (second, third):
            facade.prefetch(request)
        admit(facade, second)
        facade.prefetch(third)
        facade.get_num_common_prefix_blocks("a")
        facade.settle()
        with pytest.raises(ResourceExhausted):
            facade.get_computed_blocks(third)
        end(facade, first)
        facade = KVCacheManager(session)
        assert facade.get_computed_blocks(third)[1] == 0
        facade.close()


def test_offers_that_are_not_heard_go_back(server: Any) -> None:
    wire = Wire(server.target)
    with Client(wire.target, timeout_s=0.4) as far, server.client() as near:
        facade = KVCacheManager(far.open_session(), max_num_batched_tokens=99)
        runs, *waiting = (a_request(name) for name in "rabc")
        admit(facade, runs)
        facade.new_step_starts()
        for request in waiting:
            facade.prefetch(request)
        wire.losing = True
        with pytest.raises(Exception, match=r"no answer|not begun|Deadline"):
            facade.get_computed_blocks(waiting[0])
        wire.cut()
        for request in waiting:
            hit, num_hit = facade.get_computed_blocks(request)
            assert num_hit == 0
            assert facade.allocate_slots(request, 10, num_hit, hit) is not None
        assert near.stats().blocks.live == 12
        end(facade, runs, *waiting)
        assert near.stats().blocks.live == 0 and near.audit().violations == ()
    wire.close()


@pytest.mark.parametrize(
    ("kind", "num_blocks", "depth"),
    [
        ("full", 400, 1),
        ("full", 30, 1),
        ("full", 30, 2),
        ("windows", 400, 1),
        ("windows", 60, 2),
        ("two-sizes", 45, 1),
    ],
)
def test_a_scheduler_that_hints_schedules_alike(
    serve: Any, kind: str, num_blocks: int, depth: int
) -> None:
    """Where there is room, step by step as without; in a short pool all finishes."""
    server = serve(
        no_memory=True,
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        groups=json.dumps(KINDS[kind]),
        watermark=0,
    )
    runs = []
    for hints in (True, False):
        with server.client() as client, client.open_session() as session:
            limits = {"max_num_batched_tokens": BUDGET, "max_num_seqs": MAX_RUNNING}
            facade = KVCacheManager(session, steps_in_flight=depth, **(limits if hints else {}))
            scheduler = SmallScheduler(
                facade,
                5,
                sizes=tuple(group["block_size"] for group in KINDS[kind]),
                max_model_len=MAX_MODEL_LEN,
                depth=depth,
                ends_early=False,
            )
            if hints:
                for _, request in sorted(scheduler.arrivals, key=lambda arrival: arrival[0]):
                    facade.prefetch(request)
            scheduler.run()
            facade.settle()
            assert client.audit().violations == ()
            assert client.stats().blocks.live == 0 and client.stats().num_requests == 0
            assert facade.reset_prefix_cache() is True
            facade.close()
        runs.append(scheduler)
    assert [len(scheduler.finished) for scheduler in runs] == [40, 40]
    assert runs[0].finished == runs[1].finished
    if num_blocks == 400:
        assert runs[0].trace == runs[1].trace
