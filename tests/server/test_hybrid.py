"""Models of several KV cache groups over the wire: tables, encoder tokens, events."""

from __future__ import annotations

from typing import Any

import pytest

from kvdepot.v1 import cache_pb2, types_pb2
from kvserver.groups import parse_groups
from serving import Serve, Served, from_int32s, int32s, tokens

BLOCK, WINDOW = 16, 128  # gemma-like
PROMPT = tokens(*range(400))


def gemma(serve: Serve, **options: Any) -> Served:
    return serve(**({"model": "gemma-like", "block_size": BLOCK, "num_blocks": 151} | options))


def ids(tables: Any) -> list[list[int]]:
    return [list(table.ids) for table in tables]


def grow(scheduler: Any, handle: int, num_computed: int, num_new: int = 1, **context: Any) -> Any:
    """A Step that appends and computes tokens of one request."""
    return scheduler.stub.Step(
        cache_pb2.StepRequest(
            context=scheduler.context(**context),
            runs=[cache_pb2.Run(kind=cache_pb2.OPERATION_KIND_GROW, count=1)],
            grow=cache_pb2.GrowColumns(
                handles=int32s(handle),
                num_computed_tokens=int32s(num_computed),
                num_new_tokens=int32s(num_new),
                token_offsets=int32s(num_computed),
                token_counts=int32s(num_new),
                tokens=tokens(*range(num_new)),
            ),
        ),
        timeout=60,
    )


def test_a_window_passes_and_others_get_its_blocks(serve: Serve) -> None:
    served = gemma(serve)
    scheduler = served.open()
    groups = scheduler.opened.pool.groups
    assert [group.spec.kind for group in groups] == [
        types_pb2.SPEC_KIND_FULL_ATTENTION,
        types_pb2.SPEC_KIND_SLIDING_WINDOW,
        types_pb2.SPEC_KIND_SLIDING_WINDOW,
    ]
    assert [group.spec.HasField("sliding_window") for group in groups] == [False, True, True]
    assert groups[1].spec.sliding_window == WINDOW

    # 400 tokens take 25 blocks in every group.
    first = scheduler.admit("a", PROMPT)
    full, near, far = ids(first.new_blocks)
    assert [len(table) for table in (full, near, far)] == [25, 25, 25]
    assert not set(full) & set(near) and not set(near) & set(far)
    live = served.stats().blocks.live
    assert live == 75

    # The next token looks at the last 128: of 400 computed, 273 are out of sight.
    grown = grow(scheduler, first.handle, 400)
    (new,) = {tuple(map(len, map(from_int32s, (c.ids for c in grown.grow.new_blocks))))}
    assert new == (1, 1, 1)
    assert served.stats().blocks.live == 75 - 2 * (273 // BLOCK) + 3

    # Another request with the prompt: its table has the null block where nobody looks.
    twin = scheduler.lookup("b", PROMPT)
    assert twin.num_computed_tokens == 384
    whole, *windows = ids(twin.blocks)
    assert whole == full[:24]
    for table, own in zip(windows, (near, far), strict=True):
        assert table == [0] * 16 + own[16:24]
    admitted = scheduler.allocate("b", num_new_computed_tokens=384)
    assert ids(admitted.hit_blocks) == [whole, *windows]

    # What the window left goes to others, the oldest last: here all that is free.
    other = scheduler.admit("c", tokens(*range(1000, 1000 + 27 * BLOCK)))
    assert other.outcome == cache_pb2.OUTCOME_OK
    taken = {block for table in ids(other.new_blocks) for block in table}
    released = set(near[:17]) | set(far[:17])
    assert taken & released
    assert not taken & {0, *near[17:], *far[17:], *full}
    for request in "abc":
        scheduler.free(request)
    served.assert_clean()


def test_a_state_of_the_present_step_is_refused_with_its_reason(serve: Serve) -> None:
    served = serve(model="mamba-hybrid", block_size=BLOCK, num_blocks=200)
    scheduler = served.open()
    step = {"step": 1, "completed_step": 0}
    scheduler.admit("a", PROMPT, **step)
    refused = scheduler.admit("b", PROMPT, **step)
    assert refused.outcome == cache_pb2.OUTCOME_NO_FIT
    assert refused.no_fit.reason == cache_pb2.NO_FIT_REASON_HIT_OF_THIS_STEP
    admitted = scheduler.admit("b", PROMPT, step=2, completed_step=0)
    assert (admitted.outcome, admitted.num_new_computed_tokens) == (cache_pb2.OUTCOME_OK, 384)
    full, *states = ids(admitted.hit_blocks)
    assert all(full)
    for table in states:
        assert table[:-1] == [0] * 23
        assert table[-1] != 0
    # Too few blocks is another reason.
    large = scheduler.admit("c", tokens(*range(5000, 8000)), step=2, completed_step=0)
    assert large.no_fit.reason == cache_pb2.NO_FIT_REASON_BLOCKS


def test_events_tell_group_kind_and_window(serve: Serve) -> None:
    served = gemma(serve)
    scheduler = served.open()
    scheduler.admit("a", PROMPT)
    scheduler.cache("a", 400)
    stream = served.follow(snapshot=True)
    stored: dict[int, list[Any]] = {}
    for batch in stream:
        for event in batch.events:
            stored.setdefault(event.block_stored.group, []).append(event.block_stored)
        if batch.snapshot_end:
            break
    stream.cancel()
    hashes = {
        group: [h for event in found for h in event.block_hashes] for group, found in stored.items()
    }
    assert {group: len(found) for group, found in hashes.items()} == {0: 25, 1: 25, 2: 25}
    # One chain of hashes: what tells the groups apart is their number.
    assert set(hashes[0]) == set(hashes[1]) == set(hashes[2])
    for group, found in stored.items():
        for event in found:
            windowed = group > 0
            assert event.HasField("sliding_window") is windowed
            assert event.sliding_window == (WINDOW if windowed else 0)
            assert event.spec_kind == (
                types_pb2.SPEC_KIND_SLIDING_WINDOW
                if windowed
                else types_pb2.SPEC_KIND_FULL_ATTENTION
            )
            assert event.block_size == BLOCK


def test_a_lookup_tells_what_only_some_groups_have(serve: Serve) -> None:
    # Windows are kept at the prompt's last boundary, 384, only.
    served = gemma(serve, prefix_cache_retention_interval=0)
    scheduler = served.open()
    scheduler.admit("a", PROMPT)
    assert scheduler.lookup("again", PROMPT).num_computed_tokens == 384
    half = scheduler.lookup("half", tokens(*range(200), 7, 7, 7))
    assert half.num_computed_tokens == 0
    assert half.num_uncached_common_prefix_tokens == 192


@pytest.mark.parametrize(
    ("options", "num_hit", "num_table"),
    [
        pytest.param({}, 20, 6, id="plain"),
        pytest.param({"use_eagle": True}, 16, 6, id="EAGLE drops a block"),
        pytest.param({"dcp_world_size": 2}, 16, 3, id="two ranks share a block"),
        pytest.param({"dcp_world_size": 2, "pcp_world_size": 2}, 16, 2, id="four ranks"),
    ],
)
def test_draft_models_and_context_parallelism(
    serve: Serve, options: dict[str, Any], num_hit: int, num_table: int
) -> None:
    served = serve(**options)
    scheduler = served.open()
    pool = scheduler.opened.pool
    ranks = pool.decode_context_parallel_size * pool.prefill_context_parallel_size
    assert pool.scheduler_block_size == pool.hash_block_size == 4 * ranks
    assert pool.groups[0].spec.block_size == 4
    prompt = tokens(*range(23))
    admitted = scheduler.admit("a", prompt)
    assert [len(table) for table in ids(admitted.new_blocks)] == [num_table]
    assert scheduler.lookup("b", prompt).num_computed_tokens == num_hit
    scheduler.free("a")
    served.assert_clean()


ENCODER = parse_groups(
    [
        {
            "kind": kind,
            "layer_names": [kind],
            "block_size": 4,
            "num_kv_heads": 1,
            "head_size": 16,
        }
        for kind in ("full_attention", "cross_attention")
    ]
)


@pytest.mark.parametrize(("num_encoder_tokens", "num_blocks"), [(0, 0), (1, 1), (13, 4)])
def test_encoder_tokens_have_blocks_of_their_own(
    serve: Serve, num_encoder_tokens: int, num_blocks: int
) -> None:
    served = serve(model="mine", groups=ENCODER, no_prefix_caching=True)
    scheduler = served.open()
    admitted = scheduler.allocate(
        "a",
        content=cache_pb2.RequestContent(tokens=tokens(*range(8))),
        num_new_tokens=8,
        num_encoder_tokens=num_encoder_tokens,
    )
    assert [len(table) for table in ids(admitted.new_blocks)] == [2, num_blocks]
    # Decoding needs no more of them.
    grown = grow(scheduler, admitted.handle, 8)
    assert [len(from_int32s(c.ids)) for c in grown.grow.new_blocks] == [1, 0]
    scheduler.free("a")
    served.assert_clean()


def test_a_pool_without_a_cache_serves_sessions(serve: Serve) -> None:
    groups = parse_groups(
        [
            {
                "kind": "encoder_only_attention",
                "layer_names": ["a"],
                "block_size": 4,
                "num_kv_heads": 1,
                "head_size": 16,
            }
        ]
    )
    served = serve(model="mine", groups=groups, no_prefix_caching=True)
    scheduler = served.open()
    assert not scheduler.opened.pool.mappings
    admitted = scheduler.allocate(
        "a", content=cache_pb2.RequestContent(tokens=tokens(*range(8))), num_new_tokens=8
    )
    assert (admitted.outcome, ids(admitted.new_blocks)) == (cache_pb2.OUTCOME_OK, [[]])
    scheduler.free("a")
    served.assert_clean()
