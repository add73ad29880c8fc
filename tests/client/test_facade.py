"""The facade decides as a manager in this process does, call by call."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvclient import Client
from kvclient.errors import BlocksInUse, CacheLost, NotFound
from kvclient.facade import KVCacheManager as Facade
from kvclient.facade import PrefixCacheStats
from kvclient.values import Content, SlotRequest, token_bytes
from kvcore.hashing import ExtraKeys, make_scheme
from kvcore.manager import KVCacheManager
from kvcore.request import Request, RequestStatus
from kvcore.spec import DepotConfig, KVCacheConfig
from kvserver.groups import parse_groups
from patience import TTL_S, until

BLOCK_SIZE, NUM_BLOCKS, WATERMARK, MAX_MODEL_LEN = 4, 33, 0.1, 96


@dataclass
class Both:
    """One request, as a Scheduler has it and as the local manager does."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    cache_salt: str | None
    lora_request: Any
    skip_reading_prefix_cache: bool
    local: Request
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    finished: bool = False
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def is_finished(self) -> bool:
        return self.finished

    def append(self, *tokens: int) -> None:
        self.all_token_ids.extend(tokens)
        self.local.append(token_bytes(tokens))

    def advance(self, num_tokens: int) -> None:
        self.num_computed_tokens = self.local.num_computed_tokens = num_tokens


class Scheduler:
    """Random but sensible: admits, grows, preempts, detaches, finishes; compares everything."""

    def __init__(
        self, facade: Facade, seed: int, groups: list[dict[str, Any]], num_blocks: int
    ) -> None:
        self.random = random.Random(seed)
        self.facade = facade
        config = DepotConfig(
            KVCacheConfig(num_blocks, parse_groups(groups)),
            max_model_len=MAX_MODEL_LEN,
            watermark=WATERMARK,
        )
        self.local = KVCacheManager(config)
        self.hash_block_size = config.hash_block_size
        # What was computed elsewhere brings no states.
        self.takes_external = all(group["kind"] != "mamba" for group in groups)
        self.scheme = make_scheme("kvd_sha256", "0")
        self.waiting: list[Both] = []
        self.running: list[Both] = []
        self.detached: list[tuple[Any, Any]] = []
        self.counts = dict.fromkeys(("hit", "refused", "preempted", "detached", "reset"), 0)
        self.prefixes = [[self.token() for _ in range(24)] for _ in range(3)]
        self.num_made = 0

    def token(self) -> int:
        return self.random.randrange(1000)

    def arrive(self) -> None:
        prefix = self.random.choice(self.prefixes)[: self.random.randrange(25)]
        tokens = prefix + [self.token() for _ in range(self.random.randint(1, 12))]
        salt = self.random.choice([None, None, "salt"])
        lora = self.random.choice([None, None, SimpleNamespace(lora_name="l", lora_int_id=3)])
        extra = ExtraKeys(lora_name=None if lora is None else "l", cache_salt=salt)
        skip = self.random.random() < 0.1
        self.num_made += 1
        local = Request(
            f"r{self.num_made}",
            hash_chain=self.scheme.chain(self.hash_block_size, extra),
            extra=extra,
            num_prompt_tokens=len(tokens),
            skip_reading_prefix_cache=skip,
        )
        local.append(token_bytes(tokens))
        self.waiting.append(Both(local.request_id, tokens, len(tokens), salt, lora, skip, local))

    def admit(self) -> None:
        request = self.waiting[0]
        mine, num_hit = self.local.get_computed_blocks(request.local)
        theirs, num_theirs = self.facade.get_computed_blocks(request)
        assert (theirs.get_block_ids(), num_theirs) == (mine.get_block_ids(), num_hit)
        self.counts["hit"] += num_hit > 0
        left = request.num_tokens - num_hit
        num_external = self.random.choice([0, 0, 0, left // 2]) * self.takes_external
        new = min(left - num_external, self.random.choice([8, 100]))
        options: dict[str, Any] = {
            "num_lookahead_tokens": self.random.choice([0, 2]),
            "num_external_computed_tokens": num_external,
            "delay_cache_blocks": num_external > 0 and self.random.random() < 0.5,
            "full_sequence_must_fit": self.random.random() < 0.3,
            "reserved_blocks": self.random.choice([0, 0, 3]),
            "has_scheduled_reqs": bool(self.running),
        }
        if options["delay_cache_blocks"]:
            new = 0
        allocated = self.allocate(request, new, num_hit, (mine, theirs), options)
        if not allocated:
            return
        self.waiting.pop(0)
        request.advance(num_hit + num_external + new)
        if options["delay_cache_blocks"]:
            self.cache(request, num_hit + num_external)
            request.advance(min(num_hit + num_external, request.num_tokens - 1))
            if not self.allocate(request, 1, 0, None, {}):
                self.preempt(request)
                return
            request.advance(request.num_computed_tokens + 1)
        request.local.status = RequestStatus.RUNNING
        self.running.append(request)

    def allocate(
        self, request: Both, new: int, num_hit: int, hit: Any, options: dict[str, Any]
    ) -> bool:
        mine = self.local.allocate_slots(
            request.local, new, num_hit, None if hit is None else hit[0], **options
        )
        theirs = self.facade.allocate_slots(
            request, new, num_hit, None if hit is None else hit[1], **options
        )
        assert (mine is None) == (theirs is None)
        if mine is None or theirs is None:
            self.counts["refused"] += 1
            return False
        assert theirs.get_block_ids() == mine.get_block_ids()
        return True

    def run(self, request: Both) -> None:
        """One running request's step: a chunk, or a decoded token."""
        if request.num_tokens >= MAX_MODEL_LEN - 4:
            self.finish(request)
            return
        new = min(8, request.num_tokens - request.num_computed_tokens)
        if new == 0:
            request.append(self.token())
            new = 1
        options = {"num_lookahead_tokens": self.random.choice([0, 0, 2])}
        while not self.allocate(request, new, 0, None, options):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return
        request.advance(request.num_computed_tokens + new)
        if self.random.random() < 0.3:
            if request.num_tokens == request.num_computed_tokens and self.random.random() < 0.5:
                request.append(self.token())  # sampled already, as with asynchronous scheduling
            self.cache(request, request.num_computed_tokens)

    def cache(self, request: Both, num_tokens: int) -> None:
        self.local.cache_blocks(request.local, num_tokens)
        self.facade.cache_blocks(request, num_tokens)

    def preempt(self, request: Both) -> None:
        self.local.free(request.local)
        self.facade.free(request)
        request.advance(0)
        request.num_preemptions += 1
        request.local.num_preemptions += 1
        request.local.status = RequestStatus.PREEMPTED
        if request in self.running:
            self.running.remove(request)
        if request not in self.waiting:
            self.waiting.insert(0, request)
        self.counts["preempted"] += 1

    def finish(self, request: Both) -> None:
        self.running.remove(request)
        request.finished = True
        if self.random.random() < 0.3:
            mine = self.local.pop_blocks_for_free(request.local)
            theirs = self.facade.pop_blocks_for_free(request)
            assert [block.block_id for block in theirs] == [block.block_id for block in mine]
            self.detached.append((mine, theirs))
            self.counts["detached"] += 1
        else:
            self.local.free(request.local)
            self.facade.free(request)

    def return_detached(self) -> None:
        mine, theirs = self.detached.pop(0)
        self.local.return_blocks(mine)
        self.facade.block_pool.free_blocks(reversed(theirs))

    def step(self) -> None:
        self.local.new_step_starts()
        self.facade.new_step_starts()
        if self.random.random() < 0.5:
            self.arrive()
        for request in list(self.running):
            if request in self.running:
                self.run(request)
        if self.waiting:
            self.admit()
        if self.running and self.random.random() < 0.25:
            self.finish(self.random.choice(self.running))
        if self.detached and self.random.random() < 0.5:
            self.return_detached()
        if self.random.random() < 0.1:
            cleared = self.local.reset_prefix_cache()
            assert self.facade.reset_prefix_cache() is cleared
            self.counts["reset"] += cleared
        if self.random.random() < 0.15:
            bad = {self.random.randrange(NUM_BLOCKS) for _ in range(4)}
            self.local.evict_blocks(bad)
            self.facade.evict_blocks(bad)
        self.compare()

    def compare(self) -> None:
        local, facade = self.local, self.facade
        assert facade.usage == pytest.approx(local.usage)
        assert facade.take_new_block_ids() == local.take_new_block_ids()
        for request in self.waiting + self.running:
            request_id = request.request_id
            assert facade.get_block_ids(request_id) == local.get_block_ids(request_id)
            assert facade.get_blocks(request_id).get_block_ids(allow_none=True) == local.get_blocks(
                request_id
            ).get_block_ids(allow_none=True)
            num_computed = request.num_computed_tokens
            assert facade.get_block_ids_for_computed_tokens(
                request_id, num_computed
            ) == local.get_block_ids_for_computed_tokens(request_id, num_computed)
            assert facade.get_num_common_prefix_blocks(
                request_id
            ) == local.get_num_common_prefix_blocks(request_id)
        mine, theirs = local.make_prefix_cache_stats(), facade.make_prefix_cache_stats()
        assert mine is not None
        assert theirs == PrefixCacheStats(
            **{name: getattr(mine, name) for name in PrefixCacheStats.__slots__}
        )

    def end(self) -> None:
        while self.running:
            self.finish(self.running[0])
        while self.detached:
            self.return_detached()
        for request in self.waiting:
            request.finished = True
            self.facade.free(request)
        assert self.facade.reset_prefix_cache() is True


def a_group(kind: str, *, block_size: int = BLOCK_SIZE, **fields: Any) -> dict[str, Any]:
    """A group as a file has it; its one layer is named after all that is in it."""
    heads = {"num_kv_heads": 1, "head_size": 64 // block_size}
    if kind == "mamba":
        heads = {"shapes": [[64]], "dtypes": ["float32"]}
    name = f"{kind}-{block_size}-" + "-".join(map(str, fields.values()))
    return {"kind": kind, "layer_names": [name], "block_size": block_size} | heads | fields


FULL = a_group("full_attention")
SEEDS_AND_STEPS = [(0, None), (1, 1), (2, 2)]


@pytest.mark.parametrize(
    ("groups", "num_blocks", "seed", "steps_in_flight"),
    [
        *[
            pytest.param([FULL], NUM_BLOCKS, seed, steps, id=f"full-{seed}-{steps}")
            for seed, steps in SEEDS_AND_STEPS
        ],
        pytest.param(
            [
                FULL,
                a_group("sliding_window", sliding_window=9),
                a_group("sliding_window", sliding_window=14),
            ],
            65,
            3,
            2,
            id="full-and-windows",
        ),
        pytest.param(
            [
                a_group("full_attention", block_size=8),
                a_group("sliding_window", sliding_window=7),
            ],
            41,
            4,
            1,
            id="two-block-sizes",
        ),
        pytest.param(
            [FULL, a_group("chunked_local_attention", attention_chunk_size=12)],
            45,
            5,
            None,
            id="full-and-chunks",
        ),
        pytest.param([a_group("rswa", rswa_window=6)], NUM_BLOCKS, 6, 2, id="rswa"),
        pytest.param([a_group("mla_attention")], NUM_BLOCKS, 7, None, id="mla"),
        pytest.param([FULL, a_group("mamba", mamba_cache_mode="all")], 41, 8, 1, id="mamba-all"),
        pytest.param(
            [FULL, a_group("mamba", mamba_cache_mode="align", num_speculative_blocks=1)],
            45,
            9,
            2,
            id="mamba-align",
        ),
    ],
)
def test_every_decision_is_the_local_managers(
    serve: Any,
    groups: list[dict[str, Any]],
    num_blocks: int,
    seed: int,
    steps_in_flight: int | None,
) -> None:
    server = serve(
        num_blocks=num_blocks,
        watermark=WATERMARK,
        max_model_len=MAX_MODEL_LEN,
        groups=json.dumps(groups),
        no_memory=True,
    )
    with server.client() as client, client.open_session() as session:
        facade = Facade(session, strict=True, steps_in_flight=steps_in_flight)
        scheduler = Scheduler(facade, seed, groups, num_blocks)
        for _ in range(150):
            scheduler.step()
        scheduler.end()
        facade.close()
        assert client.audit().violations == ()
        assert all(scheduler.counts[what] for what in ("hit", "refused", "preempted", "detached"))


def request_of(request_id: str, tokens: list[int]) -> Any:
    """The least that the facade takes."""
    return SimpleNamespace(
        request_id=request_id,
        all_token_ids=tokens,
        num_tokens=len(tokens),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=0,
        num_preemptions=0,
        skip_reading_prefix_cache=False,
        is_finished=lambda: True,
    )


@pytest.mark.parametrize("strict", [True, False])
def test_others_read_nothing_of_a_step_before_it_has_ended(client: Client, strict: bool) -> None:
    """A Scheduler makes many calls in one step, and its workers write when it is scheduled."""
    with client.open_session("first") as first, client.open_session("second") as second:
        facade = Facade(first, strict=strict)
        prompts = {name: [*name.encode(), *range(9)] for name in "abc"}
        seen = []
        for names in ("ab", "c"):
            facade.new_step_starts()
            for name in names:
                request = request_of(name, prompts[name])
                facade.get_computed_blocks(request)
                assert facade.allocate_slots(request, 10) is not None
                hit = second.get_computed_blocks(f"behind {name}", prompts["a"])
                seen.append(hit.num_computed_tokens)
        assert seen == [0, 0, 8]
        facade.close()


def test_a_hit_that_changed_does_not_fit(client: Client) -> None:
    """Another session takes the cached blocks between lookup and allocation.

    A lazy lookup holds them: see test_offers.
    """
    with client.open_session("first") as first, client.open_session("second") as second:
        facade = Facade(first, strict=True)
        old = request_of("old", list(range(8)))
        facade.get_computed_blocks(old)
        assert facade.allocate_slots(old, 8) is not None
        facade.free(old)
        facade.new_step_starts()
        new = request_of("new", list(range(9)))
        hit, num_hit = facade.get_computed_blocks(new)
        assert num_hit == 8
        second.allocate_slots(SlotRequest("all", Content(range(1000, 1000 + 64 * 4)), lookup=True))
        second.free("all")
        second.free("all")  # unknown now: a later call, which ends the step of the one before
        assert facade.allocate_slots(new, 1, num_hit, hit) is None
        hit, num_hit = facade.get_computed_blocks(new)
        assert num_hit == 0
        assert facade.allocate_slots(new, 9, 0, hit) is not None
        facade.free(new)
        facade.close()


def test_resets_that_wait_and_that_do_not(client: Client) -> None:
    with client.open_session("facade") as session, client.open_session("other") as other:
        facade = Facade(session)
        runs, waits = request_of("runs", list(range(8))), request_of("waits", [7, 8])
        facade.get_computed_blocks(runs)
        assert facade.allocate_slots(runs, 8) is not None
        assert facade.reset_prefix_cache("drain", timeout_s=0.05) is False
        with pytest.raises(BlocksInUse):
            other.reset_prefix_cache()

        # Another session's reset waits: what runs goes on, nothing is admitted.
        with ThreadPoolExecutor() as threads:
            drained = threads.submit(other.reset_prefix_cache, "drain", timeout_s=20)
            until(lambda: client.stats().reset_pending)
            runs.all_token_ids.append(9)
            runs.num_tokens, runs.num_computed_tokens = 9, 8
            assert facade.allocate_slots(runs, 1) is not None
            facade.get_computed_blocks(waits)
            assert facade.allocate_slots(waits, 2) is None
            facade.free(runs)
            generation = drained.result().generation
        facade.get_computed_blocks(waits)
        assert facade.allocate_slots(waits, 2) is not None
        assert facade.reset_prefix_cache("force") is True
        assert client.stats().generation == generation + 1
        facade.free(waits)
        facade.close()


def test_the_sessions_end_passes_through(client: Client) -> None:
    session = client.open_session(lease_ttl_s=TTL_S)
    facade = Facade(session)
    request = request_of("a", [1, 2, 3])
    facade.get_computed_blocks(request)
    client._keeper.remove(session)  # as when the scheduler stands still
    until(lambda: not client.stats().num_sessions)
    with pytest.raises(CacheLost):
        facade.allocate_slots(request, 3)
    facade.close()
    with session.reopen() as fresh:
        facade = Facade(fresh)
        _, num_hit = facade.get_computed_blocks(request)
        assert num_hit == 0
        assert facade.allocate_slots(request, 3) is not None
        facade.free(request)
        facade.close()


def test_what_only_a_scheduler_asks(client: Client) -> None:
    with client.open_session() as session:
        facade = Facade(session, log_stats=False)
        unknown = request_of("unknown", [1, 2])
        assert facade.usage == 0.0
        assert facade.make_prefix_cache_stats() is None
        assert facade.take_events() == []
        assert facade.get_block_ids("unknown") == ([],)
        assert facade.get_num_common_prefix_blocks("unknown") == [0]
        assert facade.pop_blocks_for_free(unknown) == []
        facade.free(unknown)
        facade.cache_blocks(unknown, 2)
        facade.remove_skipped_blocks("unknown", 2)
        both = facade.create_kv_cache_blocks([[1]]) + facade.create_kv_cache_blocks([[2]])
        assert both.get_block_ids() == ([1, 2],)
        assert both.new_empty().get_block_ids(allow_none=True) is None
        with pytest.raises(NotFound):
            session.return_blocks(5)
        facade.close()
