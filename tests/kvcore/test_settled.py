"""Growth that changes nothing is answered from a few comparisons: always as in full."""

from __future__ import annotations

import struct
from random import Random

import pytest

from building import (
    content,
    full,
    groups_config,
    make_request,
    mamba,
    token_bytes,
    truth_events,
    window,
)
from kvcore.check import check
from kvcore.depot import Depot
from kvcore.growth import is_settled
from kvcore.manager import KVCacheManager
from kvcore.operation import (
    Cache,
    Free,
    FreeMode,
    Grow,
    OperationKind,
    Outcome,
    SlotRequest,
    Step,
)
from kvcore.request import RequestStatus
from kvcore.reset import ResetMode
from kvcore.session import Session
from kvcore.single_type import FullAttentionManager, registry
from kvcore.single_type.base import SingleTypeKVCacheManager
from kvcore.spec import (
    ChunkedLocalAttentionSpec,
    DepotConfig,
    EncoderOnlyAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    RSWASpec,
)


def never_settled(manager: KVCacheManager) -> None:
    """Have ``manager`` do every growth in full."""
    manager.coordinator.grows_by_table = False
    for group in manager.coordinator.managers:
        group.is_settled = lambda *_: False  # type: ignore[method-assign]


def int32(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def random_step(random: Random, session: Session, names: list[str]) -> Step:
    """Growth of all that runs, some of it wrong, then a few of the other operations."""
    runs, admissions = [], []
    handles, computed, new, offsets, counts, tokens = [], [], [], [], [], []
    requests = list(session.requests.values())
    # A Step may grow a request twice.
    for request in requests + random.sample(requests, min(len(requests), random.choice([0, 0, 1]))):
        if request.status is not RequestStatus.RUNNING and random.random() < 0.9:
            continue
        appended = random.choice([0, 1, 1, 1, 2, 5])
        # A rejected draft makes the count fall; a wrong caller exceeds it.
        past = random.choice([0, 0, 0, 0, 0, 0, -1, -3, 2, 30])
        handles.append(request.handle)
        computed.append(min(request.num_tokens, session.num_slots(request)) + past)
        new.append(random.choice([1, 1, 1, 1, 2, 6, 0]))
        # A rejected draft is written over.
        cut = random.choice([0, 0, 0, 0, 0, 0, 0, 1, 3])
        offsets.append(max(0, request.num_tokens - cut))
        counts.append(appended)
        tokens += random.choices(range(50), k=appended)
    runs.append((OperationKind.GROW, len(handles)))
    grow = Grow(
        int32(handles), int32(computed), int32(new), int32(offsets), int32(counts),
        token_bytes(tokens), random.choice([0, 0, 0, 1, 3]),
    )  # fmt: skip
    if random.random() < 0.4:
        name = random.choice(names)
        if name not in session.requests:
            start = random.choice([0, 0, 100])
            prompt = content(range(start, start + random.randrange(1, 20)))
            admissions.append(SlotRequest(name, prompt, lookup=True))
        elif not session.holds_blocks(session.requests[name]):
            admissions.append(SlotRequest(name, lookup=True))
    runs.append((OperationKind.ADMIT, len(admissions)))
    cached = [request for request in requests if random.random() < 0.2]
    runs.append((OperationKind.CACHE, len(cached)))
    cache = Cache(
        int32([request.handle for request in cached]),
        int32([request.num_computed_tokens for request in cached]),
    )
    freed = [request.handle for request in requests if random.random() < 0.03]
    runs.append((OperationKind.FREE, len(freed)))
    modes = bytes(random.choice([FreeMode.FINISH, FreeMode.PREEMPT]) for _ in freed)
    free = Free(int32(freed), modes, bytes(random.randrange(2) for _ in freed))
    return Step(
        runs,
        on_no_fit_stop=random.random() < 0.3,
        token_budget=random.choice([None, None, 4]),
        admissions=admissions,
        grow=grow,
        cache=cache,
        free=free,
    )


def all_of(depot: Depot, session: Session) -> list[object]:
    """What a later call could depend on."""
    return [
        depot.pool.free_queue.block_ids(),
        truth_events(depot),
        depot.stats(),
        [
            (
                request.request_id, request.status, request.num_tokens,
                request.num_computed_tokens, request.num_confirmed_tokens,
                request.registered_step, request.block_hashes,
                session.manager.get_block_ids(request.request_id),
            )
            for request in session.requests.values()
        ],
    ]  # fmt: skip


CHUNKED = ChunkedLocalAttentionSpec(4, num_kv_heads=1, head_size=16, attention_chunk_size=8)


@pytest.mark.parametrize(
    ("specs", "enable_caching"),
    [
        pytest.param((full(),), True, id="full"),
        pytest.param((full(), window(5)), True, id="full-window"),
        pytest.param((full(), CHUNKED), True, id="full-chunks"),
        pytest.param((window(9),), True, id="window"),
        pytest.param((full(), mamba("align")), True, id="full-states"),
        pytest.param((full(), window(5)), False, id="full-window-uncached"),
    ],
)
@pytest.mark.parametrize("seed", range(20))
def test_steps_are_answered_as_in_full(
    seed: int, specs: tuple[KVCacheSpec, ...], enable_caching: bool
) -> None:
    random, outcomes = Random(seed), set()
    num_blocks, lag = random.choice([12, 20, 60]), random.randrange(3)
    config = groups_config(
        num_blocks * len(specs),
        *specs,
        max_model_len=random.choice([40, 131_072]),
        enable_caching=enable_caching,
    )
    depots = [Depot(config) for _ in range(2)]
    sessions = [depot.open_session("") for depot in depots]
    sessions[1].session_id = sessions[0].session_id  # a refusal names it
    never_settled(sessions[1].manager)
    sessions[1]._finishes_late = False
    for number in range(1, 150):
        step = random_step(random, sessions[0], ["a", "b", "c", "d"])
        results = []
        is_reset = random.random() < 0.02
        for depot, session in zip(depots, sessions, strict=True):
            session.begin(number, max(number - lag, 0))
            if is_reset:  # what outlives it registers nothing any more
                depot.reset_prefix_cache(ResetMode.FORCE)
            results.append(depot.step(session, step))
        failed = [[(e.index, repr(e.error)) for e in result.errors] for result in results]
        assert failed[0] == failed[1]
        assert results[0]._replace(errors=[]) == results[1]._replace(errors=[])
        outcomes |= set(results[0].grow_outcomes)
        first, second = (
            all_of(depot, session) for depot, session in zip(depots, sessions, strict=True)
        )
        assert first == second
        assert check(depots[0]) == []
    assert Outcome.INVALID in outcomes


@pytest.mark.parametrize("seed", range(20))
def test_groups_of_several_kinds_grow_as_in_full(seed: int) -> None:
    specs = {
        "full": full(),
        "window": window(5, block_size=2),
        "coarse": window(5, block_size=8),
        "state": mamba("none", num_speculative_blocks=seed % 2),
        "aligned": mamba("align", num_speculative_blocks=seed % 3),
        "encoder": EncoderOnlyAttentionSpec(4, num_kv_heads=1, head_size=16),
    }
    if seed % 4 == 0:
        specs["reference"] = RSWASpec(4, num_kv_heads=1, head_size=16, rswa_window=4)
    groups = tuple(KVCacheGroup((name,), spec) for name, spec in specs.items())
    config = DepotConfig(KVCacheConfig(70, groups), enable_caching=False, max_model_len=30)
    fast, slow = KVCacheManager(config), KVCacheManager(config)
    never_settled(slow)
    random, num_settled = Random(seed), 0
    requests = [
        (make_request(name, range(5)), make_request(name, range(5))) for name in ("a", "b", "c")
    ]
    for pair in requests:
        for manager, request in zip((fast, slow), pair, strict=True):
            assert manager.allocate_slots(request, 5) is not None
            request.num_computed_tokens = 5
            request.status = RequestStatus.RUNNING
            request.num_prompt_tokens = 5
    for _ in range(200):
        pair = random.choice(requests)
        num_new, num_lookahead = random.choice([1, 1, 1, 3]), random.choice([0, 0, 1, 2])
        num_computed = pair[0].num_computed_tokens
        num_settled += is_settled(fast, pair[0], num_computed, num_new, num_lookahead)
        answers = [
            manager.allocate_slots(request, num_new, num_lookahead_tokens=num_lookahead)
            for manager, request in zip((fast, slow), pair, strict=True)
        ]
        assert (answers[0] and answers[0].block_ids) == (answers[1] and answers[1].block_ids)
        assert fast.get_block_ids(pair[0].request_id) == slow.get_block_ids(pair[1].request_id)
        assert fast.block_pool.free_queue.block_ids() == slow.block_pool.free_queue.block_ids()
        assert fast.take_new_block_ids() == slow.take_new_block_ids()
        # Drafts may be rejected.
        moved = 0 if answers[0] is None else random.choice([num_new, num_new, 1, 0, -1])
        for manager, request in zip((fast, slow), pair, strict=True):
            request.num_computed_tokens += moved
            if request.num_computed_tokens + 3 > config.max_model_len:
                manager.free(request)
                request.num_computed_tokens = 0
                assert manager.allocate_slots(request, 5) is not None
                request.num_computed_tokens = 5
    assert (num_settled == 0) if "reference" in specs else (20 < num_settled < 180)


def test_who_changes_an_allocation_says_when_it_changes_nothing() -> None:
    base = SingleTypeKVCacheManager
    called = (
        "get_num_blocks_to_allocate",
        "allocate_new_blocks",
        "cache_blocks",
        "remove_skipped_blocks",
    )
    for manager in registry._MANAGERS.values():
        if any(getattr(manager, name) is not getattr(base, name) for name in called):
            assert manager.is_settled is not base.is_settled, manager

    class Forgetful(FullAttentionManager):
        def remove_skipped_blocks(
            self, request_id: str, total_computed_tokens: int, num_prompt_tokens: int | None
        ) -> None:
            pass

    assert not Forgetful.is_settled(None, "a", 1, 2, 2)  # type: ignore[arg-type]
