"""What operators see and do."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from kvdepot.v1 import admin_pb2, cache_pb2
from serving import TIMEOUT_SECONDS, Serve, Served, eventually, refused, tokens

PROMPT = tokens(*range(1, 11))


def sessions(served: Served) -> list[Any]:
    """ListSessions."""
    request = admin_pb2.ListSessionsRequest()
    return list(served.admin.ListSessions(request, timeout=TIMEOUT_SECONDS).sessions)


def requests(served: Served, **options: Any) -> Any:
    """ListRequests."""
    request = admin_pb2.ListRequestsRequest(**options)
    return served.admin.ListRequests(request, timeout=TIMEOUT_SECONDS)


def evict(served: Served, *block_ids: int) -> int:
    """EvictBlocks."""
    request = admin_pb2.EvictBlocksRequest(block_ids=block_ids)
    return int(served.admin.EvictBlocks(request, timeout=TIMEOUT_SECONDS).num_evicted)


def test_sessions_from_opening_to_the_last_workers_end(serve: Serve) -> None:
    served = serve(lease_ttl_seconds=25.0)
    assert sessions(served) == []
    first, second = served.open("first"), served.open("second")
    first.admit("a", PROMPT, step=7, completed_step=5)
    first.admit("b", tokens(50), step=7, completed_step=5)
    first.free("b", cache_pb2.FREE_MODE_DETACH, step=7, completed_step=6)
    worker = served.attach(first, name="w")
    next(worker)

    one, two = sessions(served)
    assert (one.session_id, one.name) == (first.opened.session_id, "first")
    assert one.state == two.state == admin_pb2.SESSION_STATE_OPEN
    assert (one.num_requests, one.num_tokens, one.num_blocks, one.num_tickets) == (1, 10, 4, 1)
    assert (one.num_workers, one.step, one.completed_step) == (1, 7, 6)
    assert one.lease_ttl_seconds == 25
    assert 20 < one.lease_remaining_seconds <= 25
    assert 0 <= one.age_seconds < 20
    assert (two.name, two.num_requests, two.num_blocks, two.num_workers) == ("second", 0, 0, 0)

    first.close()
    two, departed = sessions(served)
    assert two.name == "second"
    assert departed.session_id == first.opened.session_id
    assert departed.state == admin_pb2.SESSION_STATE_DEPARTED
    assert (departed.num_requests, departed.num_blocks, departed.num_workers) == (0, 0, 1)
    assert departed.num_quarantined_blocks == 4
    assert departed.lease_ttl_seconds == departed.lease_remaining_seconds == 0
    stats = served.stats()
    assert (stats.num_sessions, stats.num_departed_sessions, stats.num_workers) == (1, 1, 1)
    assert stats.blocks.quarantined == 4

    worker.cancel()
    eventually(lambda: len(sessions(served)) == 1)
    assert [session.name for session in sessions(served)] == ["second"]
    assert served.stats().num_departed_sessions == 0
    second.close()
    served.assert_clean()


def test_a_request_in_each_of_its_states(served: Served) -> None:
    scheduler = served.open()
    scheduler.lookup("waits", PROMPT)
    scheduler.allocate(
        "runs",
        content=cache_pb2.RequestContent(
            tokens=PROMPT, num_prompt_tokens=6, extra_keys={"lora_name": "adapter"}
        ),
        lookup=True,
        max_new_tokens=8,
    )
    scheduler.admit("preempted", tokens(7, 8))
    scheduler.free("preempted", cache_pb2.FREE_MODE_PREEMPT)

    page = requests(served)
    waits, runs, preempted = page.requests
    assert page.next_page_token == ""
    assert page.epoch == scheduler.opened.epoch
    assert {request.session_id for request in page.requests} == {scheduler.opened.session_id}
    assert (waits.request_id, waits.state) == ("waits", admin_pb2.REQUEST_STATE_WAITING)
    assert (waits.num_tokens, waits.num_blocks) == (10, 0)
    assert (runs.request_id, runs.state) == ("runs", admin_pb2.REQUEST_STATE_RUNNING)
    assert (runs.num_tokens, runs.num_prompt_tokens, runs.num_blocks) == (10, 6, 2)
    assert runs.lora_name == "adapter"
    assert not waits.HasField("lora_name")
    assert preempted.state == admin_pb2.REQUEST_STATE_PREEMPTED
    assert (preempted.num_preemptions, preempted.num_computed_tokens) == (1, 0)


def test_requests_page_by_page_while_they_come_and_go(serve: Serve) -> None:
    served = serve(num_blocks=65)
    schedulers = [served.open(f"s{number}") for number in range(3)]
    for number in range(30):
        schedulers[number % 3].lookup(f"r{number}", tokens(1, 2, number))
    seen, token = [], ""
    while True:
        page = requests(served, page_size=7, page_token=token)
        assert len(page.requests) <= 7
        seen += [request.request_id for request in page.requests]
        token = page.next_page_token
        if not token:
            break
        # What was seen may go, and new ones may come.
        schedulers[0].free(seen[0])
        schedulers[0].lookup(f"new{len(seen)}", tokens(9))
    assert seen[:30] == [f"r{number}" for number in range(30)]
    assert len(set(seen)) == len(seen)
    only = requests(served, session_id=schedulers[1].opened.session_id, page_size=4)
    assert [request.request_id for request in only.requests] == ["r1", "r4", "r7", "r10"]


def test_a_page_has_a_bound(serve: Serve) -> None:
    served = serve()
    scheduler = served.open()
    for number in range(1050):
        scheduler.lookup(f"r{number}", tokens(1))
    assert len(requests(served).requests) == 100
    largest = requests(served, page_size=(1 << 32) - 1)
    assert len(largest.requests) == 1000
    assert len(requests(served, page_token=largest.next_page_token).requests) == 50
    past_the_end = requests(served, page_token=str(10**19))
    assert (len(past_the_end.requests), past_the_end.next_page_token) == (0, "")


def test_evicted_blocks_are_hits_no_more(served: Served) -> None:
    scheduler, other = served.open("scheduler"), served.open("other")
    first = scheduler.admit("a", PROMPT)
    table = list(first.new_blocks[0].ids)
    scheduler.cache("a", 10)
    assert other.lookup("b", PROMPT).num_computed_tokens == 8

    # The second block of the chain: held, so it stays with its holder.
    assert evict(served, table[1], table[1], table[2]) == 1
    assert other.lookup("b").num_computed_tokens == 4
    assert evict(served, table[1]) == 0
    assert evict(served) == 0
    scheduler.free("a")
    assert evict(served, *range(1, 33)) == 1
    assert other.lookup("c", PROMPT).num_computed_tokens == 0
    scheduler.free("a")  # completes the step of the Free
    assert served.stats().blocks.free == 32
    served.assert_clean()


@pytest.mark.parametrize(
    ("call", "code", "field"),
    [
        pytest.param(
            lambda served: evict(served, 1, 0),
            grpc.StatusCode.INVALID_ARGUMENT,
            "block_ids[1]",
            id="the-null-block",
        ),
        pytest.param(
            lambda served: evict(served, 33),
            grpc.StatusCode.INVALID_ARGUMENT,
            "block_ids[0]",
            id="no-such-block",
        ),
        pytest.param(
            lambda served: evict(served, *[1] * 34),
            grpc.StatusCode.INVALID_ARGUMENT,
            "block_ids",
            id="more-than-all-blocks",
        ),
        pytest.param(
            lambda served: requests(served, session_id="nobody"),
            grpc.StatusCode.NOT_FOUND,
            "session_id",
            id="no-such-session",
        ),
        *[
            pytest.param(
                lambda served, token=token: requests(served, page_token=token),
                grpc.StatusCode.INVALID_ARGUMENT,
                "page_token",
                id=f"token-{name}",
            )
            for name, token in (("word", "x"), ("sign", "-1"), ("digit", "²"), ("long", "1" * 21))
        ],
    ],
)
def test_refusals_name_the_field(
    served: Served, call: Any, code: grpc.StatusCode, field: str
) -> None:
    served.open().admit("a", PROMPT)
    assert refused(lambda: call(served), code).field == field
    served.assert_clean()


def test_audit_names_the_holders(served: Served) -> None:
    scheduler = served.open("scheduler")
    scheduler.admit("small", tokens(1))
    scheduler.admit("large", PROMPT)
    scheduler.admit("detached", tokens(4, 5, 6, 7, 8))
    ticket = scheduler.free("detached", cache_pb2.FREE_MODE_DETACH).ticket
    audit = served.admin.Audit(admin_pb2.AuditRequest(), timeout=TIMEOUT_SECONDS)
    assert not audit.violations
    assert [(h.request_id, h.ticket, h.num_blocks) for h in audit.holders] == [
        ("large", 0, 3),
        ("", ticket, 2),
        ("small", 0, 1),
    ]
    assert {holder.session_name for holder in audit.holders} == {"scheduler"}


def test_a_pending_reset_is_seen(served: Served) -> None:
    scheduler = served.open()
    scheduler.admit("a", PROMPT)
    assert not served.stats().reset_pending
    scheduler.stub.ResetPrefixCache(
        cache_pb2.ResetPrefixCacheRequest(
            context=scheduler.context(), mode=cache_pb2.RESET_MODE_DRAIN
        ),
        timeout=TIMEOUT_SECONDS,
    )
    assert served.stats().reset_pending
    scheduler.free("a")
    assert not served.stats().reset_pending


def test_drain_begins_to_stop_the_server(served: Served) -> None:
    scheduler = served.open()
    reply = served.admin.Drain(admin_pb2.DrainRequest(), timeout=TIMEOUT_SECONDS)
    assert reply.num_sessions == 1
    assert refused(lambda: served.open(), grpc.StatusCode.UNAVAILABLE).reason == "DRAINING"
    assert scheduler.lookup("still served", PROMPT).handle == 1
    assert served.server.node.drain_requested.is_set()
