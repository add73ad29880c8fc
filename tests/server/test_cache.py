"""KVCacheService told as stories: a request's life, in plain unary calls."""

from __future__ import annotations

import grpc

from kvdepot.v1 import cache_pb2, types_pb2
from serving import BLOCK_SIZE, Serve, Served, refused, tokens

PROMPT = tokens(*range(1, 11))  # two full blocks and a half


def test_opening_describes_the_pool(served: Served) -> None:
    opened = served.open().opened
    assert len(opened.session_id) == 36
    assert opened.reply_window == 64
    pool = opened.pool
    assert (pool.num_blocks, pool.hash_block_size) == (33, BLOCK_SIZE)
    assert [group.spec.block_size for group in pool.groups] == [BLOCK_SIZE]
    assert pool.groups[0].spec.kind == types_pb2.SPEC_KIND_FULL_ATTENTION
    assert [layer.name for layer in pool.layers] == list(pool.groups[0].layer_names)
    assert pool.mappings[0].num_bytes == 33 * BLOCK_SIZE * 128
    assert served.stats().num_sessions == 1


def test_opening_checks_the_fingerprint(served: Served) -> None:
    pool = served.open().opened.pool
    request = cache_pb2.OpenSessionRequest(fingerprint=pool.fingerprint)
    served.cache.OpenSession(request)
    request.fingerprint = "other"
    refused(lambda: served.cache.OpenSession(request), grpc.StatusCode.FAILED_PRECONDITION)
    assert served.stats().num_sessions == 2


def test_a_request_is_looked_up_allocated_cached_freed_and_hit_again(served: Served) -> None:
    scheduler = served.open()
    miss = scheduler.lookup("first", PROMPT)
    assert miss.num_computed_tokens == 0
    assert [list(table.ids) for table in miss.blocks] == [[]]
    assert miss.epoch == scheduler.opened.epoch

    slots = scheduler.allocate("first", num_new_tokens=10)
    assert slots.outcome == cache_pb2.OUTCOME_OK
    assert [list(table.ids) for table in slots.new_blocks] == [[1, 2, 3]]
    assert slots.handle == miss.handle
    assert served.stats().blocks.live == 3

    assert scheduler.cache("first", 10).known
    assert not scheduler.cache("unknown", 10).known
    assert scheduler.free("first").known
    assert not scheduler.free("first").known
    served.assert_clean()

    again = scheduler.lookup("second", PROMPT)
    assert again.num_computed_tokens == 8
    assert [list(table.ids) for table in again.blocks] == [[1, 2]]
    assert again.handle != miss.handle
    slots = scheduler.allocate("second", num_new_tokens=2, num_new_computed_tokens=8)
    assert [list(table.ids) for table in slots.hit_blocks] == [[1, 2]]
    assert [len(table.ids) for table in slots.new_blocks] == [1]
    stats = served.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (20, 8)
    served.assert_clean()


def test_one_call_looks_up_and_allocates(served: Served) -> None:
    scheduler = served.open()
    scheduler.admit("first", PROMPT)
    scheduler.free("first")
    slots = scheduler.admit("second", PROMPT)
    assert slots.outcome == cache_pb2.OUTCOME_OK
    assert (slots.num_new_computed_tokens, slots.num_new_tokens) == (8, 2)
    assert [list(table.ids) for table in slots.hit_blocks] == [[1, 2]]


def test_decoding_appends_tokens(served: Served) -> None:
    scheduler = served.open()
    scheduler.admit("chat", PROMPT)
    slots = scheduler.allocate(
        "chat",
        content=cache_pb2.RequestContent(token_offset=10, tokens=tokens(11, 12, 13)),
        num_computed_tokens=10,
        num_new_tokens=3,
    )
    assert [len(table.ids) for table in slots.new_blocks] == [1]
    scheduler.free("chat")
    assert scheduler.lookup("next", PROMPT + tokens(11, 12, 13)).num_computed_tokens == 12
    served.assert_clean()


def test_what_does_not_fit_is_an_answer(serve: Serve) -> None:
    served = serve(num_blocks=4)
    scheduler = served.open()
    slots = scheduler.admit("large", tokens(*range(20)))
    assert slots.outcome == cache_pb2.OUTCOME_NO_FIT
    assert (slots.no_fit.needed_blocks, slots.no_fit.free_blocks) == (5, 3)
    assert not slots.new_blocks
    assert served.stats().blocks.live == 0
    served.assert_clean()


def test_extra_keys_separate_content(served: Served) -> None:
    scheduler = served.open()
    scheduler.admit("plain", PROMPT)
    for number, extra in enumerate(
        (
            types_pb2.ExtraKeys(lora_name="adapter", lora_id=7),
            types_pb2.ExtraKeys(cache_salt="tenant"),
            types_pb2.ExtraKeys(
                multimodal=[types_pb2.MultimodalItem(identifier="cat", offset=1, length=2)]
            ),
            types_pb2.ExtraKeys(prompt_embeds_digests=[b"d" * 32]),
        )
    ):
        content = cache_pb2.RequestContent(tokens=PROMPT, extra_keys=extra)
        slots = scheduler.allocate(f"other-{number}", content=content, lookup=True)
        assert slots.num_new_computed_tokens == 0
    assert scheduler.lookup("plain-again", PROMPT).num_computed_tokens == 8


def test_a_preempted_request_comes_back_under_its_id(served: Served) -> None:
    scheduler = served.open()
    scheduler.admit("job", PROMPT)
    assert scheduler.free("job", cache_pb2.FREE_MODE_PREEMPT).ticket == 0
    assert served.stats().blocks.live == 0
    back = scheduler.lookup("job")
    assert back.num_computed_tokens == 8
    assert served.stats().preempted_hits == 8
    served.assert_clean()


def test_detached_blocks_come_back_by_ticket(served: Served) -> None:
    scheduler = served.open()
    scheduler.admit("job", PROMPT)
    freed = scheduler.free("job", cache_pb2.FREE_MODE_DETACH)
    assert freed.ticket > 0
    assert served.stats().blocks.live == 3

    def give_back() -> cache_pb2.ReturnBlocksResponse:
        response: cache_pb2.ReturnBlocksResponse = served.cache.ReturnBlocks(
            cache_pb2.ReturnBlocksRequest(context=scheduler.context(), ticket=freed.ticket)
        )
        return response

    assert give_back().num_blocks == 3
    assert served.stats().blocks.live == 0
    refused(give_back, grpc.StatusCode.NOT_FOUND)
    served.assert_clean()


def test_a_reset_waits_for_all_blocks(served: Served) -> None:
    scheduler = served.open("busy one")
    scheduler.admit("job", PROMPT)
    with_holder = refused(scheduler.reset, grpc.StatusCode.FAILED_PRECONDITION)
    assert with_holder.retryable
    scheduler.free("job")
    assert scheduler.reset().generation == 1
    assert scheduler.lookup("after", PROMPT).num_computed_tokens == 0
    assert served.stats().generation == 1
    served.assert_clean()


def test_closing_frees_what_the_session_holds(served: Served) -> None:
    first, second = served.open(), served.open()
    first.admit("a", PROMPT)
    first.admit("b", PROMPT)
    second.admit("c", tokens(7, 7, 7))
    assert first.close().num_requests_freed == 2
    assert served.stats().num_sessions == 1
    assert served.stats().blocks.live == 1
    refused(lambda: first.free("a"), grpc.StatusCode.NOT_FOUND)
    served.assert_clean()


def test_a_session_of_an_earlier_life_learns_the_epoch(served: Served) -> None:
    scheduler = served.open()
    context = scheduler.context()
    context.epoch = "an-earlier-one"
    detail = refused(
        lambda: served.cache.CloseSession(cache_pb2.CloseSessionRequest(context=context)),
        grpc.StatusCode.FAILED_PRECONDITION,
    )
    assert detail.current_epoch == scheduler.opened.epoch
