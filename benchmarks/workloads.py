"""What both managers are made to do: this same code, in a process a side.

The managers have the same methods; what differs is in a Side.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from time import thread_time
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


class Side(Protocol):
    """One implementation."""

    def make_manager(self, num_blocks: int, *, hybrid: bool) -> Any:
        """Of full attention; ``hybrid``: and of a sliding window, in a group of its own."""

    def make_request(self, request_id: str, tokens: list[int]) -> Any:
        """A request whose blocks are hashed."""

    def set_running(self, request: Any) -> None: ...

    def make_hashing(self, tokens: list[int]) -> Callable[[], int]:
        """A function that hashes all blocks of ``tokens`` and answers their number."""


class Workload:
    """Made once; each burst is prepared, then its operations are timed one by one."""

    def __init__(self, side: Side, num_samples: int) -> None:
        self.side = side
        self.num_samples = num_samples
        self.random = Random(0)

    def tokens(self, num_tokens: int) -> list[int]:
        """Random token ids, the same on both sides."""
        return self.random.choices(range(VOCABULARY), k=num_tokens)

    def burst(self) -> list[float]:
        """CPU seconds of each operation: on a shared machine, the wall clock measures others."""
        self.prepare()
        operate, samples = self.operate, []
        for index in range(self.num_samples):
            began = thread_time()
            operate(index)
            samples.append(thread_time() - began)
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
    ) -> None:
        super().__init__(side, num_samples)
        num_prompts = 4 if evicting else num_samples + 2
        num_blocks = num_prompts * PROMPT_BLOCKS * (2 if hybrid else 1) + 1
        self.manager = side.make_manager(num_blocks, hybrid=hybrid)
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

    def finish(self) -> None:
        self.manager.take_new_block_ids()


class Decode(Workload):
    """One token each for running requests of about 1000 tokens."""

    def __init__(self, side: Side, num_samples: int, *, hybrid: bool = False) -> None:
        super().__init__(side, num_samples)
        num_tokens = DECODE_TOKENS + BLOCK_SIZE + num_samples
        num_blocks = DECODE_REQUESTS * (num_tokens // BLOCK_SIZE + 1)
        self.manager = side.make_manager(num_blocks * (2 if hybrid else 1) + 1, hybrid=hybrid)
        self.requests = [
            side.make_request(f"r{i}", self.tokens(num_tokens)) for i in range(DECODE_REQUESTS)
        ]

    def prepare(self) -> None:
        assert self.manager.reset_prefix_cache()
        for index, request in enumerate(self.requests):
            # In each step, one in 16 begins a block.
            num_tokens = DECODE_TOKENS + index % BLOCK_SIZE
            request.num_computed_tokens = 0
            assert self.manager.allocate_slots(request, num_tokens) is not None
            request.num_computed_tokens = num_tokens
            self.side.set_running(request)

    def operate(self, index: int) -> None:
        allocate_slots = self.manager.allocate_slots
        for request in self.requests:
            assert allocate_slots(request, 1) is not None

    def between(self) -> None:
        for request in self.requests:
            request.num_computed_tokens += 1

    def finish(self) -> None:
        for request in self.requests:
            self.manager.free(request)
        self.manager.take_new_block_ids()


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
    "admit 100%": lambda side, n: Admit(side, n, num_hit_tokens=PROMPT_TOKENS),
    "evict": lambda side, n: Admit(side, n, evicting=True),
    "decode": Decode,
    "hybrid admit 0%": lambda side, n: Admit(side, n, hybrid=True),
    "hybrid admit 50%": lambda side, n: Admit(
        side, n, num_hit_tokens=PROMPT_TOKENS // 2, hybrid=True
    ),
    "hybrid decode": lambda side, n: Decode(side, n, hybrid=True),
    "hash": Hash,
}
