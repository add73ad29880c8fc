"""Runs a list of operations on a cache manager and records what came of each.

The same file runs on both sides: in the test process over kvcore, and in the oracle's own
Python over the real vLLM 0.25.1. So an operation means the same on both, and a difference
between two records is a difference between the managers.

An operation is a JSON object: ``op`` names a method of ``Interpreter`` below, the rest are its
arguments. ``who`` is a request id, or a number that picks one of the requests the operation
could apply to. An operation that applies to nothing is skipped, so every sub-sequence of a
sequence is a sequence too.

A scheduler calls the manager in certain orders only. The methods keep to them: each is one
thing that vLLM's Scheduler (or AsyncScheduler, or a KV connector's) does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from backend import Backend

LIVE_MAX = 12
"""Requests at a time; an ``add`` beyond it is skipped."""

LOOKAHEAD_MAX = 5

CHECK_EVERY = 4
"""Operations between two checks of all invariants, which cost more than an operation."""

OWED_MAX = 2
"""Steps in flight for one request: an asynchronous scheduler runs one step ahead."""

FIRST_OUTPUT_TOKEN = 500_000
VARIANT_TOKENS = 10_000
"""Output token at position p of variant v is ``FIRST_OUTPUT_TOKEN + v * VARIANT_TOKENS + p``."""

GONE_MAX = 4
"""Finished requests remembered, to be freed once more."""


@dataclass
class Live:
    """A request that the scheduler knows. Phases: waiting, loading, running."""

    request: Any
    phase: str = "waiting"
    drafts: int = 0
    """Draft tokens scheduled last, whose fate is open."""
    owed: int = 0
    """Steps whose sampled tokens have not come back."""
    num_encoder_tokens: int = 0

    @property
    def fresh(self) -> bool:
        """Waiting with nothing computed: an admission begins with a lookup."""
        return self.phase == "waiting" and self.request.num_computed_tokens == 0

    @property
    def can_grow(self) -> bool:
        return self.phase == "running" and (
            self.owed == 0 or (self.drafts == 0 and self.owed < OWED_MAX)
        )


class Hit(NamedTuple):
    """What a lookup answered: KVCacheBlocks, or None without a lookup."""

    blocks: Any
    num_tokens: int
    num_uncached: int


NOTHING = Hit(None, 0, 0)


class Interpreter:
    """One manager under one sequence. ``config`` is what the generator chose for it."""

    def __init__(self, backend: Backend, config: dict[str, Any]) -> None:
        self.backend = backend
        self.manager = backend.manager
        self.max_model_len: int = config["max_model_len"]
        self.num_blocks: int = config["num_blocks"]
        self.drain_every: int = config["drain_every"]
        self.use_eagle: bool = config["use_eagle"]
        self.specs: list[dict[str, Any]] = [group["spec"] for group in config["groups"]]
        mambas = [spec for spec in self.specs if spec["kind"] == "MambaSpec"]
        self.aligned_to = max(
            (spec["block_size"] for spec in mambas if spec["mamba_cache_mode"] == "align"),
            default=None,
        )
        self.group_hits = bool(mambas) and len(self.specs) > 1 and config["enable_caching"]
        sizes = backend.describe()
        self.block_size: int = sizes["scheduler_block_size"]
        self.hash_block_size: int = sizes["hash_block_size"]
        self.live: dict[str, Live] = {}
        self.tickets: dict[str, list[Any]] = {}
        self.gone: dict[str, Live] = {}
        self.count = 0

    def run(self, operation: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The operation with ``who`` resolved to an id, and the record; None if skipped.

        What the manager raises goes into the record: neither may raise where the other
        does not.
        """
        arguments = dict(operation)
        name = arguments.pop("op")
        try:
            result = getattr(self, name)(**arguments)
            if result is None:
                return operation, None
            self.count += 1
            who, value = result
            resolved = operation if who is None else {**operation, "who": who}
            return resolved, {"result": value, **self._state()}
        except Exception as error:  # any of vLLM's, any of ours
            return operation, {"raised": f"{type(error).__name__}: {error}"}

    def _state(self) -> dict[str, Any]:
        """All that is compared after every operation."""
        backend, manager = self.backend, self.manager
        refs, hashes = backend.blocks()
        running = next((who for who, one in self.live.items() if one.phase == "running"), None)
        state = {
            "queue": backend.free_queue(),
            "refs": refs,
            "hashes": hashes,
            "tables": {who: _lists(manager.get_block_ids(who)) for who in self.live},
            "computed": {who: one.request.num_computed_tokens for who, one in self.live.items()},
            "usage": round(manager.usage, 9),
            "common": None
            if running is None
            else list(manager.get_num_common_prefix_blocks(running)),
            "events": backend.events(),
        }
        if self.count % CHECK_EVERY == 0:
            state["violations"] = backend.violations()
        if self.count % self.drain_every == 0:
            state["new_block_ids"] = list(manager.take_new_block_ids())
            state["stats"] = backend.stats()
        return state

    def _pick(self, who: str | int, candidates: list[str]) -> str | None:
        if isinstance(who, str):
            return who if who in candidates else None
        return candidates[who % len(candidates)] if candidates else None

    def _where(self, test: Any) -> list[str]:
        return [who for who, one in self.live.items() if test(one)]

    # --- requests come and go ---------------------------------------------------------

    def add(
        self,
        who: str,
        tokens: list[list[int]],
        lora: list[Any] | None = None,
        salt: str | None = None,
        skip_reading: bool = False,
        encoder: int = 0,
    ) -> Any:
        """A request arrives. ``tokens`` are runs [first token, how many]."""
        if len(self.live) >= LIVE_MAX or who in self.live:
            return None
        prompt = [first + i for first, length in tokens for i in range(length)]
        request = self.backend.make_request(
            who,
            prompt[: self.max_model_len - 1],
            lora=None if lora is None else (lora[0], lora[1]),
            salt=salt,
            skip_reading=skip_reading,
        )
        self.live[who] = Live(request, num_encoder_tokens=encoder)
        return who, request.num_tokens

    def finish(self, who: str | int) -> Any:
        """A request ends, or is aborted, whatever it is doing: even before allocation."""
        name = self._pick(who, list(self.live))
        if name is None:
            return None
        one = self.live.pop(name)
        self.manager.free(one.request)
        self._remember(name, one)
        return name, None

    def free_again(self, who: str | int) -> Any:
        """Freeing what is gone does nothing."""
        name = self._pick(who, [name for name in self.gone if name not in self.live])
        if name is None:
            return None
        self.manager.free(self.gone[name].request)
        return name, None

    def preempt(self, who: str | int) -> Any:
        name = self._pick(who, self._where(lambda one: one.phase == "running"))
        if name is None:
            return None
        self.manager.free(self.live[name].request)
        self._back_to_waiting(self.live[name])
        return name, None

    def detach(self, who: str | int, keep: bool) -> Any:
        """Blocks are popped now and given back by ``give_back``; the request ends or waits."""
        name = self._pick(who, self._where(lambda one: one.phase == "running"))
        if name is None:
            return None
        one = self.live[name]
        blocks = self.manager.pop_blocks_for_free(one.request)
        self.tickets[f"{name}.{one.request.num_preemptions}"] = blocks
        if keep:
            self._back_to_waiting(one)
        else:
            self._remember(name, self.live.pop(name))
        return name, [block.block_id for block in blocks]

    def give_back(self, who: str | int) -> Any:
        name = self._pick(who, list(self.tickets))
        if name is None:
            return None
        self.backend.return_blocks(self.tickets.pop(name))
        return name, None

    def _back_to_waiting(self, one: Live) -> None:
        one.request.num_computed_tokens = 0
        one.request.num_preemptions += 1
        self.backend.set_status(one.request, "PREEMPTED")
        one.phase, one.drafts, one.owed = "waiting", 0, 0

    def _remember(self, name: str, one: Live) -> None:
        self.gone[name] = one
        if len(self.gone) > GONE_MAX:
            del self.gone[next(iter(self.gone))]

    # --- admission ----------------------------------------------------------------------

    def lookup(self, who: str | int, per_group: bool = False) -> Any:
        """A lookup from which nothing follows."""
        name = self._pick(who, self._where(lambda one: one.fresh))
        if name is None:
            return None
        hit = self._lookup(self.live[name].request, per_group)
        return name, [hit.num_tokens, _ids(hit.blocks), hit.num_uncached]

    def _lookup(self, request: Any, per_group: bool) -> Hit:
        """A scheduler with a connector asks a Mamba hybrid for every group's own hit."""
        if per_group and self.group_hits and not request.skip_reading_prefix_cache:
            blocks, lengths = self.backend.hits_per_group(request)
            num_tokens = max(lengths)
        else:
            blocks, num_tokens = self.manager.get_computed_blocks(request)
        return Hit(blocks, num_tokens, self.backend.num_uncached_common_prefix_tokens())

    def admit(
        self,
        who: str | int,
        chunk: int,
        use_hit: bool = True,
        per_group: bool = False,
        lookahead: int = 0,
        external: int = 0,
        load: bool = False,
        delay: bool = False,
        whole: bool = False,
        reserved: int = 0,
        scheduled: bool = True,
        scarce: bool = False,
    ) -> Any:
        """A waiting request gets its first slots: lookup, external tokens, allocation.

        With ``load`` the external tokens come later (``loaded``) and nothing is computed yet.
        """
        name = self._pick(who, self._where(lambda one: one.phase == "waiting"))
        if name is None:
            return None
        one = self.live[name]
        request = one.request
        hit = NOTHING
        if not one.fresh:
            hit, external = Hit(self.manager.empty_kv_cache_blocks, 0, 0), 0
        elif use_hit:
            hit = self._lookup(request, per_group)
        num_left = request.num_tokens - request.num_computed_tokens - hit.num_tokens
        external = min(external, num_left if load else num_left - 1)
        if external > 0 and self.aligned_to and not scarce:
            external *= self._plenty(request.num_tokens)
        load = load and external > 0
        num_new_tokens = 0
        if not load:
            num_new_tokens = self._aligned(
                request, min(chunk, num_left - external), hit.num_tokens + external, hit
            )
        answer = [hit.num_tokens, _ids(hit.blocks), hit.num_uncached, external, num_new_tokens]
        if not load and num_new_tokens == 0:
            return name, [*answer, "no whole block"]
        allocated = self.manager.allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens=hit.num_tokens,
            new_computed_blocks=hit.blocks,
            num_lookahead_tokens=0 if load else lookahead,
            num_external_computed_tokens=external,
            delay_cache_blocks=load or delay,
            num_encoder_tokens=0 if load else one.num_encoder_tokens,
            full_sequence_must_fit=whole,
            reserved_blocks=reserved,
            has_scheduled_reqs=scheduled,
        )
        if allocated is not None:
            request.num_computed_tokens += hit.num_tokens + external + num_new_tokens
            one.phase = "loading" if load else "running"
            if not load:
                self._scheduled(one)
        return name, [*answer, _ids(allocated)]

    def _plenty(self, num_tokens: int) -> bool:
        """Whether every group could hold ``num_tokens`` and more, without any hit.

        If not, vLLM may admit a request with an external state and then raise.
        """
        needed = sum(
            -(-(num_tokens + LOOKAHEAD_MAX) // spec["block_size"])
            + 1
            + spec.get("num_speculative_blocks", 0)
            for spec in self.specs
        )
        return len(self.backend.free_queue()) >= needed

    def _aligned(self, request: Any, num_new_tokens: int, num_hit_tokens: int, hit: Hit) -> int:
        """How many tokens a scheduler computes when a Mamba state is to be cached: whole blocks
        in a prefill, up to the last boundary, and no more than others had in common.
        """
        block_size = self.aligned_to
        start = request.num_computed_tokens + num_hit_tokens
        if block_size is None or start >= max(request.num_prompt_tokens, request.num_tokens - 1):
            return num_new_tokens
        last = request.num_tokens - request.num_tokens % block_size
        if self.use_eagle:
            last = max(last - block_size, 0)
        stop = start + num_new_tokens
        if stop < last:
            num_new_tokens -= num_new_tokens % block_size
        elif start < last < stop:
            num_new_tokens = last - start
        if block_size <= hit.num_uncached < num_new_tokens:
            num_new_tokens = hit.num_uncached - hit.num_uncached % block_size
        return num_new_tokens

    def loaded(self, who: str | int, percent: int) -> Any:
        """External tokens arrived: all of them (100), fewer, or none (0)."""
        name = self._pick(who, self._where(lambda one: one.phase == "loading"))
        if name is None:
            return None
        one = self.live[name]
        request = one.request
        one.phase = "waiting"
        if len(self.specs) > 1:
            percent = percent // 100 * 100  # no scheduler keeps a part of several groups
        num_computed = request.num_computed_tokens * percent // 100
        request.num_computed_tokens = num_computed
        if num_computed == 0:
            self.manager.free(request)
        else:
            self.manager.cache_blocks(request, num_computed)
            if num_computed == request.num_tokens:
                request.num_computed_tokens -= 1
        return name, num_computed

    # --- running --------------------------------------------------------------------------

    def grow(self, who: str | int, chunk: int, drafts: int = 0, lookahead: int = 0) -> Any:
        """A running request is scheduled: a prefill chunk, a decode token, or one and drafts."""
        name = self._pick(who, self._where(lambda one: one.can_grow))
        if name is None:
            return None
        one = self.live[name]
        request = one.request
        if one.owed:
            num_wanted, chunk = 1, 1
        else:
            num_wanted = request.num_tokens + drafts - request.num_computed_tokens
        num_room = self.max_model_len - request.num_computed_tokens
        num_new_tokens = min(num_wanted, chunk, num_room)
        if num_new_tokens > 0:
            num_new_tokens = self._aligned(request, num_new_tokens, 0, NOTHING)
        if num_new_tokens <= 0:
            return None
        allocated = self.manager.allocate_slots(
            request, num_new_tokens, num_lookahead_tokens=lookahead
        )
        if allocated is not None:
            request.num_computed_tokens += num_new_tokens
            self._scheduled(one)
        return name, [num_new_tokens, _ids(allocated)]

    def _scheduled(self, one: Live) -> None:
        request = one.request
        self.backend.set_status(request, "RUNNING")
        num_ahead = request.num_computed_tokens - request.num_tokens
        if num_ahead >= 0:
            one.drafts = num_ahead if one.owed == 0 else 0
            one.owed += 1

    def output(self, who: str | int, accepted: int, variant: int) -> Any:
        """A step's tokens come back: one, and the drafts that were accepted."""
        name = self._pick(who, self._where(lambda one: one.phase == "running" and one.owed))
        if name is None:
            return None
        one = self.live[name]
        request = one.request
        accepted = min(accepted, one.drafts)
        request.num_computed_tokens -= one.drafts - accepted
        one.drafts, one.owed = 0, one.owed - 1
        start = request.num_tokens
        stop = min(start + accepted + 1, self.max_model_len)
        first = FIRST_OUTPUT_TOKEN + variant * VARIANT_TOKENS
        self.backend.append(request, [first + position for position in range(start, stop)])
        return name, stop - start

    def cache(self, who: str | int, back: int) -> Any:
        """Blocks are cached up to ``back`` tokens before the last that is computed and known."""
        name = self._pick(who, self._where(lambda one: one.phase == "running"))
        if name is None:
            return None
        request = self.live[name].request
        num_tokens = min(request.num_computed_tokens, request.num_tokens) - back
        if num_tokens <= 0:
            return None
        self.manager.cache_blocks(request, num_tokens)
        return name, num_tokens

    def invalidate(self, who: str | int, percent: int) -> Any:
        """A synchronous load failed: blocks from some boundary on are evicted and recomputed.

        Schedulers do so with one group only.
        """
        name = self._pick(who, self._where(lambda one: one.phase == "running" and one.owed == 0))
        if name is None or len(self.specs) != 1 or self.aligned_to is not None:
            return None
        request = self.live[name].request
        num_valid_blocks = request.num_computed_tokens * percent // 100 // self.block_size
        request.num_computed_tokens = num_valid_blocks * self.block_size
        self.manager.evict_blocks(set(self.manager.get_block_ids(name)[0][num_valid_blocks:]))
        return name, num_valid_blocks

    def skip(self, who: str | int, prompt: bool) -> Any:
        """Blocks that no attention looks at are freed, as before a table goes to a connector."""
        name = self._pick(who, self._where(lambda one: one.phase == "running"))
        if name is None:
            return None
        request = self.live[name].request
        self.manager.remove_skipped_blocks(
            name,
            request.num_computed_tokens,
            num_prompt_tokens=request.num_prompt_tokens if prompt else None,
        )
        return name, None

    def partial(self, who: str | int, group: int, back: int) -> Any:
        """A block that is not full becomes reachable from a boundary inside it."""
        name = self._pick(who, self._where(lambda one: one.phase == "running"))
        coarse = [
            number
            for number, spec in enumerate(self.specs)
            if spec["block_size"] > self.hash_block_size
        ]
        if name is None or not coarse or self.block_size == self.hash_block_size:
            return None
        request = self.live[name].request
        group = coarse[group % len(coarse)]
        block_size = self.specs[group]["block_size"]
        num_known = min(request.num_computed_tokens, request.num_tokens)
        num_tokens = (num_known // self.hash_block_size - back) * self.hash_block_size
        if num_tokens % block_size == 0:
            num_tokens -= self.hash_block_size
        table = self.manager.get_blocks(name).blocks[group]
        if num_tokens <= 0 or num_tokens // block_size >= len(table):
            return None
        block = table[num_tokens // block_size]
        return name, [
            block.block_id,
            num_tokens,
            self.backend.cache_partial_block(request, block, num_tokens, group),
        ]

    # --- the pool, and questions ------------------------------------------------------------

    def describe(self) -> Any:
        return None, self.backend.describe()

    def evict(self, blocks: list[int]) -> Any:
        self.manager.evict_blocks({block % self.num_blocks for block in blocks})
        return None, None

    def reset(self, idle: bool) -> Any:
        """Resets the cache; with ``idle`` after everything was freed, so that it may succeed."""
        if idle:
            for name, one in list(self.live.items()):
                self.manager.free(one.request)
                self._remember(name, self.live.pop(name))
            while self.tickets:
                self.backend.return_blocks(self.tickets.pop(next(iter(self.tickets))))
        return None, bool(self.manager.reset_prefix_cache())

    def new_step(self) -> Any:
        self.manager.new_step_starts()
        return None, None

    def allocate_nothing(self, who: str | int) -> Any:
        """Zero new tokens and no external ones: both managers refuse, and change nothing."""
        name = self._pick(who, self._where(lambda one: one.phase != "loading"))
        if name is None:
            return None
        try:
            self.manager.allocate_slots(self.live[name].request, 0)
        except Exception:  # each has its own error
            return name, "refused"
        return name, "accepted"

    def query(self, who: str | int, num_tokens: int) -> Any:
        """Questions about a request's blocks, allocated or not. None changes anything."""
        name = self._pick(who, list(self.live))
        if name is None:
            return None
        manager = self.manager
        blocks = manager.get_blocks(name)
        running = self.live[name].phase == "running"
        return name, [
            _lists(manager.get_block_ids_for_computed_tokens(name, num_tokens)),
            list(blocks.get_unhashed_block_ids()) if len(self.specs) == 1 else None,
            _lists(blocks.get_unhashed_block_ids_all_groups()),
            _ids(blocks, allow_none=True),
            _ids(blocks + blocks),
            _ids(blocks.new_empty()),
            _ids(blocks.new_empty(), allow_none=True),
            list(manager.get_num_common_prefix_blocks(name)) if running else None,
            # In align mode vLLM's count can fall below zero.
            None if self.aligned_to else self.backend.remaining_blocks(self.live[name].request),
        ]


def _ids(blocks: Any, allow_none: bool = False) -> list[list[int]] | None:
    ids = None if blocks is None else blocks.get_block_ids(allow_none=allow_none)
    return None if ids is None else _lists(ids)


def _lists(ids: Any) -> list[list[int]]:
    return [list(group) for group in ids]
