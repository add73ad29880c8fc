"""What both managers are made to do: this same code, in a process a side.

The managers have the same methods; what differs is in a Side.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from random import Random
from time import perf_counter, thread_time
from typing import Any, Protocol

BLOCK_SIZE = 16
PROMPT_TOKENS = 1024
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
VOCABULARY = 151_936
HASHED_TOKENS = 8192
DECODE_REQUESTS = 256
DECODE_TOKENS = 1000
# Of the second group, where there is one.
WINDOW_TOKENS = 512


LONG_TOKENS = 131_072
POOL_SIZES = (1024, 10_240, 130_048, 1_048_576)


class Side(Protocol):
    """One implementation."""

    def make_manager(self, num_blocks: int, *, hybrid: bool = False, events: bool = False) -> Any:
        """Of full attention; ``hybrid``: and of a sliding window, in a group of its own.

        ``events``: its feed is recorded.
        """

    def make_request(self, request_id: str, tokens: list[int]) -> Any:
        """A request whose blocks are hashed."""

    def set_running(self, request: Any) -> None: ...

    def append_token(self, request: Any, token: int) -> None:
        """The request has generated ``token``."""

    def make_hashing(self, tokens: list[int]) -> Callable[[], int]:
        """A function that hashes all blocks of ``tokens`` and answers their number."""


class Workload:
    """Made once; each burst is prepared, then its operations are timed one by one."""

    # CPU seconds: on a shared machine, the wall clock measures others.
    clock = staticmethod(thread_time)

    def __init__(self, side: Side, num_samples: int) -> None:
        self.side = side
        self.num_samples = num_samples
        self.random = Random(0)

    def tokens(self, num_tokens: int) -> list[int]:
        """Random token ids, the same on both sides."""
        return self.random.choices(range(VOCABULARY), k=num_tokens)

    def burst(self) -> list[float]:
        """Seconds of each operation."""
        self.prepare()
        operate, clock, samples = self.operate, self.clock, []
        for index in range(self.num_samples):
            began = clock()
            operate(index)
            samples.append(clock() - began)
            self.between()
        self.finish()
        return samples

    def prepare(self) -> None:
        """Before a burst."""

    def operate(self, index: int) -> None:
        """What is timed."""
        raise NotImplementedError

    def between(self) -> None:
        """After each operation."""

    def finish(self) -> None:
        """After a burst."""


class Admit(Workload):
    """Look up, allocate and free one prompt; ``num_hit_tokens`` of it are cached.

    With ``evicting``, the pool is so small, and full, that each block taken evicts one.
    """

    def __init__(
        self,
        side: Side,
        num_samples: int,
        *,
        num_hit_tokens: int = 0,
        evicting: bool = False,
        hybrid: bool = False,
        events: bool = False,
    ) -> None:
        super().__init__(side, num_samples)
        num_prompts = 4 if evicting else num_samples + 2
        num_blocks = num_prompts * PROMPT_BLOCKS * (2 if hybrid else 1) + 1
        self.manager = side.make_manager(num_blocks, hybrid=hybrid, events=events)
        self.events = events
        shared = self.tokens(num_hit_tokens)
        self.requests = [
            side.make_request(f"r{i}", shared + self.tokens(PROMPT_TOKENS - num_hit_tokens))
            for i in range(num_samples + 4)
        ]
        # The last token of a prompt is always computed, and with it its block.
        self.num_hit_tokens = min(num_hit_tokens, PROMPT_TOKENS - BLOCK_SIZE)
        self.warm = 4 if evicting else 1

    def prepare(self) -> None:
        assert self.manager.reset_prefix_cache()
        for index in range(-self.warm, 0):
            self.operate(index)
        _, num_hit_tokens = self.manager.get_computed_blocks(self.requests[0])
        assert num_hit_tokens == self.num_hit_tokens, num_hit_tokens

    def operate(self, index: int) -> None:
        manager, request = self.manager, self.requests[index]
        hit, num_hit_tokens = manager.get_computed_blocks(request)
        new = manager.allocate_slots(request, PROMPT_TOKENS - num_hit_tokens, num_hit_tokens, hit)
        assert new is not None
        manager.free(request)
        if self.events:
            assert manager.take_events()

    def finish(self) -> None:
        self.manager.take_new_block_ids()


class Grown(Workload):
    """As Admit with ``evicting``, in a full pool of ``num_blocks``."""

    FILLED_TOKENS = 65_536

    def __init__(self, side: Side, num_samples: int, num_blocks: int) -> None:
        super().__init__(side, num_samples)
        self.manager = side.make_manager(num_blocks + 1)
        num_left = num_blocks * BLOCK_SIZE
        while num_left:
            num_tokens = min(num_left, self.FILLED_TOKENS)
            self.admit(side.make_request("filling", self.tokens(num_tokens)))
            num_left -= num_tokens

    def prepare(self) -> None:
        self.requests = [
            self.side.make_request(f"r{i}", self.tokens(PROMPT_TOKENS))
            for i in range(self.num_samples)
        ]

    def admit(self, request: Any) -> None:
        """Look up, allocate and free."""
        hit, num_hit = self.manager.get_computed_blocks(request)
        num_new = request.num_tokens - num_hit
        assert self.manager.allocate_slots(request, num_new, num_hit, hit) is not None
        self.manager.free(request)

    def operate(self, index: int) -> None:
        self.admit(self.requests[index])

    def finish(self) -> None:
        self.manager.take_new_block_ids()


class AdmitHashed(Workload):
    """A prompt as it comes: hash it, look it up, allocate, free. By the wall clock."""

    clock = staticmethod(perf_counter)

    def __init__(
        self, side: Side, num_samples: int, *, num_tokens: int = PROMPT_TOKENS, hit: bool = False
    ) -> None:
        super().__init__(side, num_samples)
        num_blocks = num_tokens // BLOCK_SIZE
        self.manager = side.make_manager((num_samples + 2) * num_blocks + 1)
        self.prompts = [self.tokens(num_tokens) for _ in range(1 if hit else num_samples)]
        self.hit = hit

    def prepare(self) -> None:
        assert self.manager.reset_prefix_cache()
        if self.hit:
            self.operate(0)

    def operate(self, index: int) -> None:
        manager = self.manager
        prompt = self.prompts[0 if self.hit else index]
        request = self.side.make_request("r", prompt)
        hit, num_hit = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, len(prompt) - num_hit, num_hit, hit) is not None
        manager.free(request)

    def finish(self) -> None:
        self.manager.take_new_block_ids()


class Metadata(Workload):
    """Bytes of bookkeeping a block, in a pool full of hits; no time is measured."""

    NUM_BLOCKS = 1 << 16
    PROMPT_TOKENS = 8192

    def burst(self) -> list[float]:
        gc.collect()
        tracemalloc.start()
        manager = self.side.make_manager(self.NUM_BLOCKS + 1)
        for number in range(self.NUM_BLOCKS * BLOCK_SIZE // self.PROMPT_TOKENS):
            request = self.side.make_request(f"r{number}", self.tokens(self.PROMPT_TOKENS))
            assert manager.allocate_slots(request, self.PROMPT_TOKENS) is not None
            manager.free(request)
        manager.take_new_block_ids()
        del request
        gc.collect()
        num_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return [num_bytes / self.NUM_BLOCKS] * self.num_samples


class Decode(Workload):
    """One token each for running requests of about 1000 tokens.

    ``appending``: it is appended, too, which hashes the blocks that it fills; by the wall
    clock.
    """

    def __init__(
        self, side: Side, num_samples: int, *, hybrid: bool = False, appending: bool = False
    ) -> None:
        super().__init__(side, num_samples)
        self.appending = appending
        if appending:
            self.clock = perf_counter
        num_tokens = DECODE_TOKENS + BLOCK_SIZE + num_samples
        num_blocks = DECODE_REQUESTS * (num_tokens // BLOCK_SIZE + 1)
        self.manager = side.make_manager(num_blocks * (2 if hybrid else 1) + 1, hybrid=hybrid)
        if not appending:
            self.requests = self.make_requests([num_tokens] * DECODE_REQUESTS)

    def make_requests(self, lengths: list[int]) -> list[Any]:
        """Requests of so many tokens."""
        return [
            self.side.make_request(f"r{i}", self.tokens(num_tokens))
            for i, num_tokens in enumerate(lengths)
        ]

    def prepare(self) -> None:
        assert self.manager.reset_prefix_cache()
        # In each step, one in 16 begins a block.
        lengths = [DECODE_TOKENS + i % BLOCK_SIZE for i in range(DECODE_REQUESTS)]
        if self.appending:
            self.requests = self.make_requests(lengths)
        for num_tokens, request in zip(lengths, self.requests, strict=True):
            request.num_computed_tokens = 0
            assert self.manager.allocate_slots(request, num_tokens) is not None
            request.num_computed_tokens = num_tokens
            self.side.set_running(request)

    def operate(self, index: int) -> None:
        allocate_slots = self.manager.allocate_slots
        if self.appending:
            for token, request in enumerate(self.requests):
                self.side.append_token(request, token)
        for request in self.requests:
            assert allocate_slots(request, 1) is not None

    def between(self) -> None:
        for request in self.requests:
            request.num_computed_tokens += 1

    def finish(self) -> None:
        for request in self.requests:
            self.manager.free(request)
        self.manager.take_new_block_ids()


class DecodeWall(Decode):
    """The same by the wall clock, for what is compared with calls that wait."""

    clock = staticmethod(perf_counter)


class Hash(Workload):
    """All blocks of one long prompt."""

    def __init__(self, side: Side, num_samples: int) -> None:
        super().__init__(side, num_samples)
        self.hashing = side.make_hashing(self.tokens(HASHED_TOKENS))

    def operate(self, index: int) -> None:
        assert self.hashing() == HASHED_TOKENS // BLOCK_SIZE


WORKLOADS: dict[str, Callable[[Side, int], Workload]] = {
    "admit 0%": Admit,
    "admit 50%": lambda side, n: Admit(side, n, num_hit_tokens=PROMPT_TOKENS // 2),
    "admit with events": lambda side, n: Admit(side, n, events=True),
    "admit 100%": lambda side, n: Admit(side, n, num_hit_tokens=PROMPT_TOKENS),
    "evict": lambda side, n: Admit(side, n, evicting=True),
    "decode": Decode,
    "decode wall": DecodeWall,
    "hybrid admit 0%": lambda side, n: Admit(side, n, hybrid=True),
    "hybrid admit 50%": lambda side, n: Admit(
        side, n, num_hit_tokens=PROMPT_TOKENS // 2, hybrid=True
    ),
    "hybrid decode": lambda side, n: Decode(side, n, hybrid=True),
    "hash": Hash,
    "metadata": Metadata,
    "hash and admit 0%": AdmitHashed,
    "hash and admit 100%": lambda side, n: AdmitHashed(side, n, hit=True),
    "hash and admit long": lambda side, n: AdmitHashed(side, n, num_tokens=LONG_TOKENS),
    "append and decode": lambda side, n: Decode(side, n, appending=True),
    **{
        f"evict of {num_blocks}": lambda side, n, num_blocks=num_blocks: Grown(side, n, num_blocks)
        for num_blocks in POOL_SIZES
    },
}
