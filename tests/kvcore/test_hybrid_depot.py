"""Several groups behind one depot: hits, truncation, and what did not run."""

from __future__ import annotations

import pytest

from building import (
    content,
    full,
    groups_config,
    make_manager,
    make_request,
    mamba,
    truth_events,
    window,
)
from kvcore.depot import Depot
from kvcore.errors import FailedPrecondition, InvalidArgument
from kvcore.events import BlockRemoved, BlockStored
from kvcore.manager import KVCacheManager
from kvcore.operation import (
    FreeMode,
    Grow,
    NoFitReason,
    OperationKind,
    Outcome,
    SlotRequest,
    SlotResult,
    Step,
)
from kvcore.request import Request
from kvcore.session import Session
from kvcore.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    DepotConfig,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    UniformTypeKVCacheSpecs,
    why_never_hit,
)

PROMPT = range(100, 121)  # five blocks of 4, and one token


def open_depot(*specs: KVCacheSpec, num_blocks: int = 40, **options: object) -> Depot:
    return Depot(groups_config(num_blocks, *specs, **options))


def admit(
    depot: Depot, session: Session, request_id: str, tokens: range, **fields: object
) -> SlotResult:
    session.begin(None, None)
    slots = SlotRequest(request_id, content(tokens), lookup=True, **fields)  # type: ignore[arg-type]
    result = depot.allocate_slots(session, slots)
    assert depot.audit() == []
    return result


def test_a_hit_needs_the_window_only() -> None:
    depot = open_depot(full(), window(6))
    one, two = depot.open_session("one"), depot.open_session("two")
    assert admit(depot, one, "a", PROMPT).new_blocks == (
        [1, 2, 3, 4, 5, 6],
        [7, 8, 9, 10, 11, 12],
    )
    # Not before the bytes are written, in neither group.
    assert admit(depot, two, "early", PROMPT[:9]).num_new_computed_tokens == 0
    one.begin(None, None)
    result = admit(depot, two, "b", PROMPT)
    assert result.num_new_computed_tokens == 20
    # A window of 6 tokens: the 5 before the next one lie in two blocks.
    assert result.hit_blocks == ([1, 2, 3, 4, 5], [0, 0, 0, 10, 11])
    assert [len(table) for table in result.new_blocks] == [1, 1]


def test_growth_gives_back_what_the_window_has_passed() -> None:
    depot = open_depot(full(), window(6))
    session = depot.open_session("s")
    admit(depot, session, "a", PROMPT)
    free_before = depot.pool.num_free_blocks(session.view)
    session.begin(None, None)
    result = depot.allocate_slots(
        session, SlotRequest("a", content([1], 21), num_computed_tokens=21, num_new_tokens=1)
    )
    assert result.outcome is Outcome.OK and result.new_blocks == ([], [])
    assert session.manager.get_block_ids("a")[1] == [0, 0, 0, 0, 11, 12]
    assert depot.pool.num_free_blocks(session.view) == free_before + 4
    assert depot.audit() == []


def test_a_shorter_claim_is_looked_up_anew() -> None:
    """A part of a hit is no hit where the window before it is gone."""
    depot = open_depot(full(), window(5))
    session = depot.open_session("s")
    admit(depot, session, "a", PROMPT)
    session.begin(None, None)
    depot.free(session, "a", FreeMode.FINISH, did_not_run=False)
    hit = depot.get_computed_blocks(session, "b", content(PROMPT))
    assert hit.num_computed_tokens == 20
    claim = SlotRequest("b", num_new_computed_tokens=8, num_new_tokens=1)
    depot.pool.evict_blocks([8])  # the window before token 8
    changed = depot.allocate_slots(session, claim)
    assert changed.outcome is Outcome.HIT_CHANGED
    assert (changed.num_new_computed_tokens, changed.hit_blocks) == (4, ([1], [7]))
    claim = SlotRequest("b", num_new_computed_tokens=4, num_new_tokens=1)
    assert depot.allocate_slots(session, claim).hit_blocks == ([1], [7])
    depot.get_computed_blocks(session, "c", content(PROMPT))
    with pytest.raises(InvalidArgument, match="whole blocks"):
        depot.allocate_slots(session, SlotRequest("c", num_new_computed_tokens=6, num_new_tokens=1))


def test_external_tokens_move_the_window_past_the_hit() -> None:
    depot = open_depot(full(), window(5))
    session = depot.open_session("s")
    admit(depot, session, "a", PROMPT[:13])
    session.begin(None, None)
    result = admit(depot, session, "b", PROMPT, num_external_computed_tokens=8)
    assert result.num_new_computed_tokens == 12
    # The hit's window block is behind: the request does not hold it.
    assert result.hit_blocks == ([1, 2, 3], [0, 0, 0])
    assert result.new_blocks[1][0] == 0
    tables = session.manager.get_block_ids("b")
    assert tables == tuple(
        hit + new for hit, new in zip(result.hit_blocks, result.new_blocks, strict=True)
    )


def test_groups_of_other_block_sizes() -> None:
    depot = open_depot(full(8), window(5, block_size=4))
    assert (depot.config.scheduler_block_size, depot.config.hash_block_size) == (8, 4)
    session = depot.open_session("s")
    admit(depot, session, "a", PROMPT)
    session.begin(None, None)
    stored = [event for event in truth_events(depot) if isinstance(event, BlockStored)]
    # Of the windows only those that end at a multiple of 8 are told.
    assert [(event.group, event.block_size) for event in stored] == [
        (0, 8),
        (0, 8),
        (1, 4),
        (1, 4),
    ]
    assert {(event.spec_kind, event.sliding_window) for event in stored} == {
        ("full_attention", None),
        ("sliding_window", 5),
    }
    # A coarse block is named by the fine hash at its end.
    request = session.requests["a"]
    assert [event.block_hashes[0] for event in stored[:2]] == [
        request.block_hashes[1],
        request.block_hashes[3],
    ]
    assert stored[1].parent_block_hash == request.block_hashes[1]
    result = admit(depot, session, "b", PROMPT)
    assert result.hit_blocks == ([1, 2], [0, 0, 0, 7])


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(window(6), id="window"),
        *(pytest.param(mamba(mode), id=mode) for mode in ("none", "all", "align")),
    ],
)
def test_what_is_cut_off_to_nothing_hits_nothing(spec: KVCacheSpec) -> None:
    depot = open_depot(full(), spec)
    session = depot.open_session("")
    depot.get_computed_blocks(session, "a", content(PROMPT))
    hit = depot.get_computed_blocks(session, "a", content([]))
    assert session.requests["a"].num_tokens == 0
    assert (hit.num_computed_tokens, hit.num_uncached_common_prefix_tokens) == (0, 0)


def test_truncation_needs_the_window_that_it_goes_back_to() -> None:
    depot = open_depot(full(), window(6))
    session = depot.open_session("s")
    admit(depot, session, "a", PROMPT)
    session.begin(None, None)
    depot.allocate_slots(
        session, SlotRequest("a", content([1], 21), num_computed_tokens=21, num_new_tokens=1)
    )
    with pytest.raises(FailedPrecondition, match="sliding_window") as caught:
        depot.cache_blocks(session, "a", content([1, 2], 8), 8)
    assert caught.value.reason == "WINDOW_RELEASED"
    session.begin(None, None)
    # Within the window: blocks that lose their tokens lose their hash in both groups.
    depot.cache_blocks(session, "a", content([9], 21), 21)
    assert session.requests["a"].num_tokens == 22
    assert depot.audit() == []


def test_what_did_not_run_is_forgotten_in_every_group() -> None:
    depot = open_depot(full(), window(5))
    session = depot.open_session("s")
    session.begin(1, 0)
    lookup = SlotRequest("a", content(PROMPT[:13]), lookup=True)
    depot.allocate_slots(session, lookup)
    # b builds on a's blocks in the same step, with a window that has passed most of them.
    b = depot.allocate_slots(session, SlotRequest("b", content(PROMPT), lookup=True))
    assert b.num_new_computed_tokens == 12
    depot.free(session, "a", FreeMode.FINISH, did_not_run=True)
    assert [len(index.entries) for index in depot.pool.indexes] == [0, 0]
    session.begin(2, 1)
    assert truth_events(depot) == []
    assert depot.audit() == []


def test_confirmed_tokens_outlive_it_in_every_group() -> None:
    depot = open_depot(full(8), window(5, block_size=4))
    session = depot.open_session("s")
    session.begin(1, 0)
    depot.allocate_slots(session, SlotRequest("a", content(PROMPT), lookup=True))
    depot.cache_blocks(session, "a", None, 8)
    depot.free(session, "a", FreeMode.FINISH, did_not_run=True)
    stored = [event for event in truth_events(depot) if isinstance(event, BlockStored)]
    assert [(event.group, event.block_size) for event in stored] == [(0, 8), (1, 4)]
    assert [len(index.entries) for index in depot.pool.indexes] == [1, 1]


def test_a_state_is_no_hit_in_the_step_that_makes_it() -> None:
    depot = open_depot(full(), mamba("align"))
    one, two = depot.open_session("one"), depot.open_session("two")
    one.begin(1, 0)
    first = SlotRequest("a", content(PROMPT), lookup=True, num_new_tokens=8)
    assert depot.allocate_slots(one, first).outcome is Outcome.OK
    refused = depot.allocate_slots(one, SlotRequest("b", content(PROMPT), lookup=True))
    assert refused.outcome is Outcome.NO_FIT
    assert refused.no_fit is not None
    assert refused.no_fit.reason is NoFitReason.HIT_OF_THIS_STEP
    assert refused.no_fit.needed_blocks <= refused.no_fit.free_blocks
    # Another session's step is another one: it does not see the state, and is not held up.
    two.begin(1, 0)
    other = depot.allocate_slots(two, SlotRequest("c", content(PROMPT), lookup=True))
    assert (other.outcome, other.num_new_computed_tokens) == (Outcome.OK, 0)
    one.begin(2, 0)
    admitted = depot.allocate_slots(one, SlotRequest("b", lookup=True))
    assert (admitted.outcome, admitted.num_new_computed_tokens) == (Outcome.OK, 8)
    assert admitted.hit_blocks[1][0] == 0 and admitted.hit_blocks[1][1] != 0
    assert depot.audit() == []


def test_a_step_grows_every_group() -> None:
    depot = open_depot(full(), window(5, block_size=2))
    session = depot.open_session("s")
    handle = admit(depot, session, "a", PROMPT[:8]).handle
    session.begin(None, None)
    result = depot.step(
        session,
        Step(
            runs=[(OperationKind.GROW, 1)],
            grow=Grow(
                handles=handle.to_bytes(4, "little"),
                num_computed_tokens=(8).to_bytes(4, "little"),
                num_new_tokens=(1).to_bytes(4, "little"),
                token_offsets=(8).to_bytes(4, "little"),
                token_counts=(1).to_bytes(4, "little"),
                tokens=(7).to_bytes(4, "little"),
            ),
        ),
    )
    assert result.grow_outcomes == b""
    assert [len(column) for column in result.grow_counts] == [4, 4]
    assert [len(column) for column in result.grow_ids] == [4, 4]
    assert session.manager.get_block_ids("a")[1][:2] == [0, 0]


def test_encoder_tokens_have_blocks_of_their_own() -> None:
    cross = CrossAttentionSpec(4, num_kv_heads=1, head_size=16)
    depot = open_depot(full(), cross, enable_caching=False)
    session = depot.open_session("s")
    result = admit(depot, session, "a", PROMPT[:3], num_encoder_tokens=10)
    assert [len(table) for table in result.new_blocks] == [1, 3]
    session.begin(None, None)
    grown = depot.allocate_slots(
        session, SlotRequest("a", content([1, 2], 3), num_computed_tokens=3, num_new_tokens=2)
    )
    assert [len(table) for table in grown.new_blocks] == [1, 0]
    depot.free(session, "a", FreeMode.FINISH, did_not_run=False)
    assert depot.audit() == []


def test_layers_without_a_cache_hold_nothing() -> None:
    encoder = EncoderOnlyAttentionSpec(16, num_kv_heads=1, head_size=16)
    depot = open_depot(encoder, full())
    assert (depot.config.scheduler_block_size, depot.config.hash_block_size) == (4, 4)
    session = depot.open_session("s")
    assert admit(depot, session, "a", PROMPT).new_blocks == ([], [1, 2, 3, 4, 5, 6])
    session.begin(None, None)
    assert admit(depot, session, "b", PROMPT).hit_blocks == ([], [1, 2, 3, 4, 5])


def test_a_model_without_a_cache() -> None:
    depot = Depot(DepotConfig(KVCacheConfig(2, ()), enable_caching=False))
    session = depot.open_session("s")
    assert admit(depot, session, "a", PROMPT).new_blocks == ()
    session.begin(None, None)
    grown = depot.allocate_slots(
        session, SlotRequest("a", content([1], 21), num_computed_tokens=21, num_new_tokens=1)
    )
    assert grown.outcome is Outcome.OK
    depot.free(session, "a", FreeMode.FINISH, did_not_run=False)
    assert depot.audit() == []


def test_sinks_are_set_aside_for_good() -> None:
    sink = SinkFullAttentionSpec(4, num_kv_heads=1, head_size=16, sink_len=8)
    depot = open_depot(sink, num_blocks=10)
    session = depot.open_session("s")
    manager = session.manager.coordinator.managers[0]
    assert [block.block_id for block in manager.sink_blocks] == [1, 2]  # type: ignore[attr-defined]
    assert admit(depot, session, "a", PROMPT[:5]).new_blocks == ([3, 4],)
    session.begin(None, None)
    assert admit(depot, session, "b", PROMPT[:5]).hit_blocks == ([3],)
    for request_id in "ab":
        depot.free(session, request_id, FreeMode.FINISH, did_not_run=False)
    # They count as in use, but hold nothing that a reset would have to wait for.
    assert depot.pool.states().live == 2
    assert depot.reset_prefix_cache().generation == 1
    assert depot.audit() == []


def test_reference_windows_release_the_gap() -> None:
    spec = RSWASpec(4, num_kv_heads=1, head_size=16, rswa_window=4)
    depot = open_depot(spec)
    session = depot.open_session("s")
    admit(depot, session, "a", PROMPT[:6])
    for at in range(6, 18):
        session.begin(None, None)
        slots = SlotRequest("a", content([at], at), num_computed_tokens=at, num_new_tokens=1)
        assert depot.allocate_slots(session, slots).outcome is Outcome.OK
        assert depot.audit() == []
    # The prompt's two blocks, the gap, and the last 4 of 17 computed tokens.
    assert [block_id > 0 for block_id in session.manager.get_block_ids("a")[0]] == [
        True,
        True,
        False,
        True,
        True,
    ]
    with pytest.raises(FailedPrecondition, match="released"):
        depot.cache_blocks(session, "a", content([0, 0], 12), 13)


def test_eagle_drops_one_block_of_the_groups_that_are_flagged() -> None:
    draft = KVCacheGroup(("draft",), full(), is_eagle_group=True)
    target = KVCacheGroup(("target",), window(5))
    depot = Depot(DepotConfig(KVCacheConfig(40, (target, draft)), max_model_len=64))
    session = depot.open_session("s")
    admit(depot, session, "a", PROMPT)
    session.begin(None, None)
    result = admit(depot, session, "b", PROMPT)
    assert result.num_new_computed_tokens == 16
    assert [len(table) for table in result.hit_blocks] == [4, 4]
    # What a lookup answers can be claimed in a call of its own.
    hit = depot.get_computed_blocks(session, "c", content(PROMPT))
    claim = SlotRequest("c", num_new_computed_tokens=hit.num_computed_tokens, num_new_tokens=5)
    assert depot.allocate_slots(session, claim).hit_blocks == result.hit_blocks


def test_uniform_groups_are_managed_as_one_layer() -> None:
    specs = {"a": full(), "b": FullAttentionSpec(4, num_kv_heads=2, head_size=16)}
    group = KVCacheGroup(("a", "b"), UniformTypeKVCacheSpecs(4, specs))
    depot = Depot(DepotConfig(KVCacheConfig(20, (group,))))
    session = depot.open_session("s")
    admit(depot, session, "a", PROMPT)
    session.begin(None, None)
    assert admit(depot, session, "b", PROMPT).num_new_computed_tokens == 20


# --- partial blocks -------------------------------------------------------------------


def cache_partial(manager: KVCacheManager, request: Request, num_tokens: int) -> bytes | None:
    """Of the first group, with blocks of 8 over hashes of 4."""
    table = manager.coordinator.managers[0].req_to_blocks[request.request_id]
    return manager.block_pool.partial.cache_partial_block(
        request,
        table[num_tokens // 8],
        num_tokens,
        block_size=8,
        hash_block_size=4,
        group=0,
        view=manager.view,
    )


def test_a_partial_hash_is_promoted_to_the_full_one() -> None:
    manager = KVCacheManager(
        groups_config(20, full(8), full(4), max_model_len=64), enable_kv_cache_events=True
    )
    request = make_request("a", range(16))
    manager.allocate_slots(request, 6, delay_cache_blocks=True)
    manager.take_events()
    named = cache_partial(manager, request, 4)
    assert named == request.block_hashes[0]
    (stored,) = manager.take_events()
    assert isinstance(stored, BlockStored)
    assert (stored.block_size, stored.parent_block_hash) == (4, None)
    assert cache_partial(manager, request, 4) == named and manager.take_events() == []

    request.num_computed_tokens = 6
    manager.allocate_slots(request, 2)
    removed, *full_ones = manager.take_events()
    assert isinstance(removed, BlockRemoved) and removed.block_hashes == [named]
    assert [event.block_hashes for event in full_ones if isinstance(event, BlockStored)] == [
        [request.block_hashes[1]],
        request.block_hashes[:2],
    ]
    # Beside the full hash, a partial one is an alias, and goes with it.
    assert cache_partial(manager, request, 4) == named
    manager.free(request)
    manager.take_events()
    manager.evict_blocks([1])
    assert [event.block_hashes[0] for event in manager.take_events()] == [  # type: ignore[union-attr]
        request.block_hashes[1],
        named,
    ]


@pytest.mark.parametrize("num_tokens", [0, 3, 8, 20])
def test_partial_hashes_end_inside_a_block(num_tokens: int) -> None:
    manager = KVCacheManager(groups_config(20, full(8), full(4)))
    request = make_request("a", range(16))
    manager.allocate_slots(request, 16, num_lookahead_tokens=8)
    with pytest.raises(InvalidArgument, match="num_tokens"):
        cache_partial(manager, request, num_tokens)


# --- configurations -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "why"),
    [
        pytest.param(groups_config(40, full(), window(5), max_model_len=64), None, id="fine"),
        pytest.param(groups_config(40, full(16), max_model_len=16), "multiples of 16", id="short"),
        pytest.param(groups_config(40, full(16), max_model_len=17), None, id="one-token-left"),
        pytest.param(
            groups_config(99, full(6), window(5, 4), max_model_len=12), "of 12 tokens", id="lcm"
        ),
        pytest.param(
            groups_config(40, full(16), max_model_len=32, use_eagle=True), "EAGLE", id="eagle"
        ),
        pytest.param(
            groups_config(40, full(16), max_model_len=33, use_eagle=True), None, id="eagle-fits"
        ),
        pytest.param(
            groups_config(8, full(4), full(12), window(12, 6), max_model_len=64),
            "the pool has 7",
            id="pool",
        ),
        pytest.param(
            groups_config(
                40, full(), window(5), max_model_len=64, prefix_cache_retention_interval=0
            ),
            None,
            id="retention-0",
        ),
        pytest.param(
            groups_config(
                40, full(), mamba("align"), max_model_len=64, prefix_cache_retention_interval=64
            ),
            None,
            id="retention-beyond-the-model",
        ),
        pytest.param(
            groups_config(4, full(16), max_model_len=8, enable_caching=False), None, id="off"
        ),
    ],
)
def test_why_never_hit(config: DepotConfig, why: str | None) -> None:
    reason = why_never_hit(config)
    assert reason is None if why is None else why in str(reason)
    if not config.enable_caching:
        return
    # It is so: the longest prompt, repeated, in a pool that holds it (or not even that).
    manager = KVCacheManager(config)
    hits = []
    for request_id in "ab":
        length = config.max_model_len
        request = make_request(request_id, range(length), config.hash_block_size)
        request.num_prompt_tokens = length
        blocks, num_hit = manager.get_computed_blocks(request)
        hits.append(num_hit)
        # In steps that end at the boundaries, as states need it.
        while num_hit < length:
            num_new = min(config.scheduler_block_size, length - num_hit)
            claimed = hits[-1] if num_hit == hits[-1] else 0
            if (
                manager.allocate_slots(
                    request, num_new, claimed, blocks if claimed else None, has_scheduled_reqs=False
                )
                is None
            ):
                break
            num_hit = request.num_computed_tokens = num_hit + num_new
            manager.new_step_starts()
        manager.free(request)
    # A hit that leaves no room to go on from it is none.
    assert (hits[1] > 0 and num_hit > hits[1]) == (why is None)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        pytest.param(
            lambda: groups_config(9, full(), window(5), hash_block_size=3),
            "hash_block_size",
            id="hash-does-not-divide",
        ),
        pytest.param(
            lambda: groups_config(9, full(), hash_block_size=2), "hash_block_size", id="one-group"
        ),
        pytest.param(
            lambda: groups_config(9, full(), prefix_cache_retention_interval=4),
            "prefix_cache_retention_interval",
            id="nothing-to-retain",
        ),
        pytest.param(
            lambda: groups_config(9, full(), window(5), prefix_cache_retention_interval=6),
            "prefix_cache_retention_interval",
            id="no-multiple",
        ),
        pytest.param(
            lambda: groups_config(9, full(), window(5), prefix_cache_retention_interval=-4),
            "prefix_cache_retention_interval",
            id="negative",
        ),
        pytest.param(
            lambda: groups_config(9, full(), window(5), dcp_world_size=2),
            "dcp_world_size",
            id="dcp-of-several-groups",
        ),
        pytest.param(
            lambda: groups_config(9, window(5), pcp_world_size=2), "pcp_world_size", id="pcp"
        ),
        pytest.param(
            lambda: groups_config(9, full(), CrossAttentionSpec(4, 1, 16)),
            "enable_caching",
            id="cross",
        ),
        pytest.param(lambda: DepotConfig(KVCacheConfig(2, ())), "enable_caching", id="no-groups"),
        pytest.param(
            lambda: groups_config(
                9, full(8), ChunkedLocalAttentionSpec(4, 1, 16, attention_chunk_size=8)
            ),
            "block_size",
            id="chunked-of-another-size",
        ),
        pytest.param(
            lambda: groups_config(
                9,
                full(),
                ChunkedLocalAttentionSpec(4, 1, 16, attention_chunk_size=8),
                use_eagle=True,
            ),
            "use_eagle",
            id="chunked-with-eagle",
        ),
    ],
)
def test_refused(make: object, field: str) -> None:
    assert callable(make)
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert caught.value.field == field


def test_context_parallel_blocks_count_for_every_rank() -> None:
    manager = make_manager(20, 4, dcp_world_size=2, pcp_world_size=2)
    request = make_request("a", range(33), 16)
    assert manager.config.hash_block_size == 16
    blocks = manager.allocate_slots(request, 33)
    assert blocks is not None and blocks.block_ids == ([1, 2, 3],)
    assert manager.get_computed_blocks(make_request("b", range(33), 16))[1] == 32


def test_the_fingerprint_tells_what_blocks_hold() -> None:
    base = groups_config(9, full(), window(5))
    same = [
        groups_config(20, full(), window(5)),
        groups_config(9, full(), window(5), prefix_cache_retention_interval=4),
        groups_config(9, full(), window(5), max_num_batched_tokens=8),
    ]
    others = [
        groups_config(9, full(), window(6)),
        groups_config(9, window(5), full()),
        groups_config(9, full(), window(5), hash_block_size=2),
        groups_config(9, full(), full(2)),
    ]
    assert {one.fingerprint for one in same} == {base.fingerprint}
    assert len({base.fingerprint, *(one.fingerprint for one in others)}) == 5
