"""A request's block tables on this side, with the null block where the server put it.

Replies carry what is new. What went away follows from the kinds of attention, as in
vLLM 0.25.1's v1/core/single_type_kv_cache_manager.py: what the next token's attention no
longer looks at is freed, a whole block at a time, and the null block takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvclient.description import KVCacheSpec, PoolDescription
from kvclient.slots import NULL_BLOCK
from kvclient.values import BlockTables

Change = Callable[[int, int], None]
"""Told of a block that left a table: its group and its id."""


def num_skipped_tokens(spec: KVCacheSpec, num_computed_tokens: int) -> int:
    """Leading tokens that the attention of the token after these does not look at.

    Of Mamba all but the last, whose state stands for them. Of a kind that is none of
    vLLM's, none: what leaves its tables is known to the server only.
    """
    if spec.kind == "mamba":
        return max(0, num_computed_tokens - 1)
    if spec.sliding_window is not None and spec.kind.startswith("sliding_window"):
        return max(0, num_computed_tokens - spec.sliding_window + 1)
    if spec.kind == "chunked_local_attention":
        assert spec.attention_chunk_size
        return num_computed_tokens // spec.attention_chunk_size * spec.attention_chunk_size
    return 0


def recycles(spec: KVCacheSpec) -> bool:
    """Whether blocks leave a request's table while it runs."""
    return (
        spec.kind in ("mamba", "sliding_window", "sliding_window_mla", "chunked_local_attention")
        or spec.rswa_window is not None
    )


def num_blocks_held(pool: PoolDescription, num_tokens: int, *, max_step_tokens: int) -> int:
    """About the most blocks that a request of ``num_tokens`` holds, over all groups."""
    total = 0
    for group, size in zip(pool.groups, pool.table_block_sizes, strict=True):
        held = num_tokens
        if recycles(group.spec) and group.spec.rswa_window is None:
            kept = group.spec.sliding_window or group.spec.attention_chunk_size or size
            held = min(num_tokens, kept + max_step_tokens + size)
        total += -(-held // size)
    return total


class RequestTables:
    """The block tables of one request, one a KV cache group, from its admission on.

    ``on_removed`` is told of every block that leaves a table before the request ends.
    """

    __slots__ = ("_allocated", "_last_state", "_on_removed", "_pool", "_prompt", "_sizes", "blocks")

    def __init__(
        self, pool: PoolDescription, num_prompt_tokens: int, on_removed: Change | None = None
    ) -> None:
        self.blocks: BlockTables = tuple([] for _ in pool.groups)
        self._pool = pool
        self._sizes = pool.table_block_sizes
        self._prompt = num_prompt_tokens
        self._on_removed = on_removed
        # Of Mamba groups that keep one state a step: whether they have had blocks for
        # running, and where the state before the last step lies.
        self._allocated: set[int] = set()
        self._last_state: dict[int, int] = {}

    def admit(
        self,
        hit: Sequence[list[int]],
        new_blocks: Sequence[list[int]],
        num_computed_tokens: int,
        num_external_tokens: int = 0,
    ) -> None:
        """Begin with a hit and new blocks; ``num_computed_tokens`` are computed by then."""
        for group, table in enumerate(self.blocks):
            assert not table
            if group < len(hit):
                table.extend(hit[group])
            size = self._sizes[group]
            num_held = -(-num_computed_tokens // size) if num_external_tokens else len(table)
            skipped = num_skipped_tokens(self._pool.groups[group].spec, num_computed_tokens)
            if num_computed_tokens:
                table[: skipped // size] = [NULL_BLOCK] * min(skipped // size, len(table))
            if group < len(new_blocks):
                self._extend(group, new_blocks[group], num_held)

    def grow(self, new_blocks: Sequence[list[int]]) -> None:
        """New blocks of a running request."""
        for group, blocks in enumerate(new_blocks):
            if blocks:
                self._extend(group, blocks, len(self.blocks[group]))

    def skip(self, num_computed_tokens: int) -> None:
        """Drop what no attention looks at once ``num_computed_tokens`` are computed.

        The server does so in every allocation, even in one that does not fit.
        """
        for group, table in enumerate(self.blocks):
            if not table:
                continue
            spec = self._pool.groups[group].spec
            size = self._sizes[group]
            if spec.rswa_window is not None:
                start = max(self._prompt, num_computed_tokens - spec.rswa_window)
                self._drop(group, -(-self._prompt // size), start // size)
                continue
            computed = num_computed_tokens
            if spec.kind == "mamba":
                # Drafted tokens may be rejected: the state before them is still needed.
                computed = max(0, computed - spec.num_speculative_blocks)
            self._drop(group, 0, num_skipped_tokens(spec, computed) // size)
            last = self._last_state.get(group)
            if last is not None and last < -(-computed // size) - 1:
                self._drop(group, last, last + 1)

    def next_skip(self, num_computed_tokens: int) -> int:
        """The count, above the given one, at which ``skip`` may drop something more.

        Not of Mamba groups, where every count may.
        """
        soonest = 1 << 62
        for group, size in zip(self._pool.groups, self._sizes, strict=True):
            spec = group.spec
            if spec.rswa_window is not None:
                kept = spec.rswa_window
            elif spec.kind == "chunked_local_attention":
                assert spec.attention_chunk_size
                chunk = spec.attention_chunk_size
                soonest = min(soonest, (num_computed_tokens // chunk + 1) * chunk)
                continue
            elif spec.sliding_window is not None and spec.kind.startswith("sliding_window"):
                kept = spec.sliding_window - 1
            else:
                continue
            num_dropped = max(0, num_computed_tokens - kept) // size
            soonest = min(soonest, (num_dropped + 1) * size + kept)
        return soonest

    def _drop(self, group: int, start: int, stop: int) -> None:
        """From the right, up to what was dropped before."""
        table = self.blocks[group]
        for position in range(min(stop, len(table)) - 1, start - 1, -1):
            if table[position] == NULL_BLOCK:
                break
            if self._on_removed is not None:
                self._on_removed(group, table[position])
            table[position] = NULL_BLOCK

    def _extend(self, group: int, blocks: list[int], num_held: int) -> None:
        table, spec = self.blocks[group], self._pool.groups[group].spec
        if blocks and spec.mamba_cache_mode == "align":
            spare = spec.num_speculative_blocks
            if group in self._allocated:
                self._last_state[group] = num_held - 1 - spare
                # Spare blocks that were not used move on: they come again, further right.
                for position in range(num_held - spare, num_held):
                    if table[position] in blocks:
                        table[position] = NULL_BLOCK
            elif num_held:
                self._last_state[group] = num_held - 1
            self._allocated.add(group)
        table.extend(blocks)
