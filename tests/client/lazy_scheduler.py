"""A Scheduler in small, over a facade: chunked prefill, decode, drafts, preemption.

Two runs of one seed take the same requests and outputs, whatever the facade answers.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from zlib import crc32

from kvclient.facade import KVCacheManager

BUDGET, MAX_RUNNING = 24, 6


@dataclass
class Request:
    """What a Scheduler knows of a request."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    cache_salt: str | None = None
    lora_request: Any = None
    skip_reading_prefix_cache: bool = False
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_placeholders: int = 0
    finished: bool = False
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    # As a worker has it: what it was told, added up; and up to where that must reach.
    table: tuple[list[int], ...] = ()
    reach: int = 0
    # Of the step in flight.
    num_drafted: int = 0
    # Counts preemptions: outputs of steps before one are not wanted.
    life: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def is_finished(self) -> bool:
        return self.finished

    def num_draft(self, num_max: int) -> int:
        """How many drafts there are, or are accepted; of the tokens so far alone."""
        draw = crc32(f"{self.request_id} {self.num_tokens} {num_max}".encode())
        return draw % (num_max + 1)

    def output(self, position: int) -> int:
        """The token that the model samples there."""
        return crc32(f"{self.request_id} {position}".encode()) % 1000


class SmallScheduler:
    """``depth``: steps in flight; ``num_drafts``: speculative tokens of a decode step."""

    def __init__(
        self,
        facade: KVCacheManager,
        seed: int,
        *,
        sizes: tuple[int, ...],
        max_model_len: int,
        depth: int = 1,
        num_drafts: int = 0,
        num_requests: int = 40,
        ends_early: bool = True,
    ) -> None:
        self.facade = facade
        self.random = random.Random(seed)
        self.sizes = sizes
        self.max_model_len = max_model_len
        # Full attention alone: no block leaves a table.
        groups = facade.session.pool.groups
        self.is_plain = len(groups) == 1 and groups[0].spec.rswa_window is None
        self.depth = depth
        self.num_drafts = num_drafts
        self.ends_early = ends_early
        prefixes = [[self.random.randrange(1000) for _ in range(30)] for _ in range(3)]
        self.arrivals = deque(self._arrival(f"r{i}", prefixes) for i in range(num_requests))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.in_flight: deque[list[tuple[Request, int]]] = deque()
        self.trace: list[Any] = []
        self.finished: dict[str, list[int]] = {}
        self.num_preempted = 0
        self.num_refused = 0

    def _arrival(self, request_id: str, prefixes: list[list[int]]) -> tuple[int, Request]:
        prefix = self.random.choice(prefixes)[: self.random.randrange(31)]
        tokens = prefix + [self.random.randrange(1000) for _ in range(self.random.randint(1, 12))]
        request = Request(
            request_id,
            tokens,
            len(tokens),
            self.random.randint(1, 30),
            cache_salt=self.random.choice([None, None, "salt"]),
            lora_request=self.random.choice(
                [None, None, SimpleNamespace(lora_name="l", lora_int_id=3)]
            ),
            skip_reading_prefix_cache=self.random.random() < 0.1,
        )
        return self.random.randrange(60), request

    # --- one step -----------------------------------------------------------------------

    def step(self, number: int) -> None:
        """Schedule, and process the output of the step ``depth`` - 1 before."""
        for arrival in [arrival for arrival in self.arrivals if arrival[0] <= number]:
            self.arrivals.remove(arrival)
            self.waiting.append(arrival[1])
        self.facade.new_step_starts()
        scheduled: list[tuple[Request, int]] = []
        budget = BUDGET
        preempted = self._grow(scheduled, budget)
        budget -= sum(num for _, num in scheduled)
        if not preempted:
            self._admit(scheduled, budget)
        if self.running:
            common = self.facade.get_num_common_prefix_blocks(self.running[0].request_id)
            if self.is_plain:
                assert common == self._common_prefix()
        for request, num in scheduled:
            request.num_computed_tokens += num
            if request.num_computed_tokens >= request.num_tokens:
                request.num_placeholders += 1
        self.in_flight.append([(request, request.life) for request, _ in scheduled])
        self.trace.append([(request.request_id, num) for request, num in scheduled])
        self.check()
        if len(self.in_flight) >= self.depth:
            self._process(self.in_flight.popleft())

    def _grow(self, scheduled: list[tuple[Request, int]], budget: int) -> bool:
        preempted = False
        index = 0
        while index < len(self.running):
            request = self.running[index]
            index += 1
            left = request.num_tokens + request.num_placeholders - request.num_computed_tokens
            num_drafted = 0
            if left == 1 and request.num_tokens > request.num_prompt_tokens:
                num_drafted = request.num_draft(self.num_drafts)
            num = min(left + num_drafted, budget, self.max_model_len - request.num_computed_tokens)
            if num <= 0:
                continue
            request.num_drafted = max(0, num - left)
            while True:
                new = self.facade.allocate_slots(request, num, num_lookahead_tokens=self.num_drafts)
                if new is not None:
                    break
                self.num_refused += 1
                preempted = True
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    break
            if new is None:
                break
            self._told(request, new, num)
            scheduled.append((request, num))
            budget -= num
        return preempted

    def _admit(self, scheduled: list[tuple[Request, int]], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < MAX_RUNNING:
            request = self.waiting[0]
            hit, num_hit = self.facade.get_computed_blocks(request)
            num = min(request.num_tokens - num_hit, budget)
            new = self.facade.allocate_slots(
                request,
                num,
                num_hit,
                hit,
                num_lookahead_tokens=self.num_drafts,
                has_scheduled_reqs=bool(self.running),
            )
            if new is None:
                self.num_refused += 1
                return
            self.trace.append(("hit", request.request_id, num_hit))
            self.waiting.popleft()
            request.table = self.facade.get_blocks(request.request_id).get_block_ids() or ()
            request.num_computed_tokens = num_hit
            request.reach = min(num_hit + num + self.num_drafts, self.max_model_len)
            assert all(
                table[len(table) - len(blocks) :] == blocks
                for table, blocks in zip(request.table, new.get_block_ids() or (), strict=True)
            )
            self.running.append(request)
            scheduled.append((request, num))
            budget -= num

    def _told(self, request: Request, new: Any, num: int) -> None:
        for table, blocks in zip(request.table, new.get_block_ids(), strict=True):
            table.extend(blocks)
        end = request.num_computed_tokens + num + self.num_drafts
        request.reach = max(request.reach, min(end, self.max_model_len))

    def _preempt(self, request: Request) -> None:
        self.facade.free(request)
        request.num_computed_tokens = request.num_placeholders = request.reach = 0
        request.num_preemptions += 1
        request.num_drafted = 0
        request.life += 1
        request.table = ()
        self.num_preempted += 1
        self.waiting.appendleft(request)

    def _process(self, scheduled: list[tuple[Request, int]]) -> None:
        for request, life in scheduled:
            if request.finished or request.life != life:
                continue
            if not request.num_placeholders:
                continue  # a chunk of the prompt
            request.num_placeholders -= 1
            num_accepted = request.num_draft(request.num_drafted)
            request.num_computed_tokens -= request.num_drafted - num_accepted
            request.num_drafted = 0
            for _ in range(1 + num_accepted):
                request.all_token_ids.append(request.output(request.num_tokens))
            if self.depth > 1:
                self.facade.cache_blocks(
                    request, request.num_computed_tokens - request.num_placeholders
                )
            num_generated = request.num_tokens - request.num_prompt_tokens
            if num_generated >= request.max_tokens or request.num_tokens >= self.max_model_len - 8:
                self._finish(request)
        if self.ends_early and self.running and self.random.random() < 0.05:
            self._finish(self.random.choice(self.running))
        self.facade.take_events()

    def _finish(self, request: Request) -> None:
        request.finished = True
        self.running.remove(request)
        if self.random.random() < 0.2:
            popped = self.facade.pop_blocks_for_free(request)
            self.facade.block_pool.free_blocks(reversed(popped))
        else:
            self.facade.free(request)
        self.finished[request.request_id] = list(request.all_token_ids)
        request.table = ()

    # --- what must hold -----------------------------------------------------------------

    def _common_prefix(self) -> list[int]:
        tables = [request.table[0] for request in self.running]
        num = 0
        while all(len(table) > num and table[num] == tables[0][num] for table in tables):
            num += 1
        return [num]

    def check(self) -> None:
        """Tables reach as far as they must and no further; nobody writes where others are."""
        holders: dict[int, set[str]] = {}
        for request in self.running:
            told = request.table
            known = self.facade.get_block_ids(request.request_id)
            for table, mine, size in zip(known, told, self.sizes, strict=True):
                assert len(table) == len(mine) == -(-request.reach // size)
                assert all(block in (0, own) for block, own in zip(table, mine, strict=True))
                for block in table:
                    if block:
                        holders.setdefault(block, set()).add(request.request_id)
        for request in self.running:
            first = request.num_computed_tokens - 1
            for table, size in zip(
                self.facade.get_block_ids(request.request_id), self.sizes, strict=True
            ):
                for block in table[first // size :]:
                    assert block and holders[block] == {request.request_id}

    def run(self, number: int = 0) -> None:
        """Until every request is finished, from step ``number`` on."""
        while self.arrivals or self.waiting or self.running:
            self.step(number)
            number += 1
            assert number < 5000, "it goes nowhere"
