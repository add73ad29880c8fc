"""The manager of layers that carry a state: a block holds a state, not tokens."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.block import KVCacheBlock
from kvcore.block_pool import BlockPool
from kvcore.prefix_index import visible_blocks
from kvcore.request import Request
from kvcore.single_type.base import SingleTypeKVCacheManager, num_evictable
from kvcore.spec import DepotConfig, KVCacheSpec, MambaSpec, cdiv
from kvcore.view import PoolView


class MambaManager(SingleTypeKVCacheManager):
    """A hit needs one state, that at its end, and only the last state is kept.

    In mode "align" a request holds its running state and ``num_speculative_blocks``
    more, at the end of a table that is null blocks otherwise. The states move along as
    the table grows: a step copies the last one into the next block.
    """

    drops_eagle_block = False

    def __init__(
        self, spec: KVCacheSpec, *, pool: BlockPool, view: PoolView, group: int, config: DepotConfig
    ) -> None:
        super().__init__(spec, pool=pool, view=view, group=group, config=config)
        assert isinstance(spec, MambaSpec)
        self.num_speculative_blocks = spec.num_speculative_blocks
        self.is_aligned = spec.mamba_cache_mode == "align"
        # States that this session's present step writes.
        self._hashes_of_step: set[bytes] = set()
        # Of requests in mode "align" that hold states: where the one before the last is.
        self._holders: set[str] = set()
        self._last_state: dict[str, int] = {}

    # --- tables -----------------------------------------------------------------------

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool,
    ) -> int:
        if not self.is_aligned:
            return super().get_num_blocks_to_allocate(
                request_id,
                num_tokens + self.num_speculative_blocks * self.block_size,
                new_computed_blocks,
                total_computed_tokens,
                num_tokens_main_model,
                apply_admission_cap,
            )
        num_new = (
            self._num_aligned_blocks(num_tokens_main_model)
            - len(new_computed_blocks)
            - len(self.req_to_blocks.get(request_id, ()))
        )
        if num_new > 0:
            num_new = 1 if request_id in self._holders else 1 + self.num_speculative_blocks
        return max(num_new, 0) + num_evictable(new_computed_blocks, self.view)

    def is_settled(
        self, request_id: str, num_computed_tokens: int, num_slots: int, num_tokens_to_cache: int
    ) -> bool:
        num_computed = max(0, num_computed_tokens - self.num_speculative_blocks)
        if self.is_aligned:
            last_state = self._last_state.get(request_id)
            if last_state is not None and last_state < cdiv(num_computed, self.block_size) - 1:
                return False
        num_slots += self.num_speculative_blocks * self.block_size
        return super().is_settled(request_id, num_computed, num_slots, num_tokens_to_cache)

    def num_uncounted_blocks(
        self,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_tokens_main_model: int,
    ) -> int:
        """In mode "align", the block of the external state, which vLLM forgets to count:
        it admits the request, and raises when the pool runs out under it.
        """
        if not self.is_aligned:
            return 0
        num_states = 1 + self.num_speculative_blocks
        num_required = self._num_aligned_blocks(num_tokens_main_model)
        num_counted = num_states if num_required > len(new_computed_blocks) else 0
        num_skipped = (total_computed_tokens - 1) // self.block_size
        num_local = max(num_skipped, len(new_computed_blocks))
        num_external = max(0, cdiv(total_computed_tokens, self.block_size) - num_local)
        num_new = max(0, min(num_required - num_local - num_external, num_states))
        return max(0, num_external + num_new - num_counted)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        num_speculative = self.num_speculative_blocks
        if not self.is_aligned:
            return super().allocate_new_blocks(
                request_id, num_tokens + num_speculative * self.block_size, num_tokens_main_model
            )
        table = self.req_to_blocks.get(request_id)
        if table is None:
            table = self.req_to_blocks[request_id] = []
        num_before = len(table)
        num_required = self._num_aligned_blocks(num_tokens_main_model)
        if num_required <= num_before:
            return []
        holds_states = request_id in self._holders
        if holds_states:
            self._last_state[request_id] = num_before - 1 - num_speculative
        elif num_before > 0:
            self._last_state[request_id] = num_before - 1  # the hit's state
        # The running state stands at num_skipped, the speculative ones behind it.
        null_block = self.pool.null_block
        num_skipped = num_required - num_speculative - 1
        table.extend([null_block] * (num_skipped - num_before))
        if holds_states:
            for position in range(num_before - num_speculative, min(num_before, num_skipped)):
                table.append(table[position])
                table[position] = null_block
        self._extend(table, num_required - len(table))
        self._holders.add(request_id)
        return table[num_before:]

    def _num_aligned_blocks(self, num_tokens: int) -> int:
        """Blocks of a table in mode "align": lookahead tokens have none of their own."""
        return cdiv(num_tokens, self.block_size) + self.num_speculative_blocks

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._holders.discard(request_id)
        self._last_state.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    # --- what is not looked at --------------------------------------------------------

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens - 1

    def has_absorbed(self, request_id: str, num_tokens: int) -> bool:
        """A state is of all tokens so far; only the one at a block's end is of no more."""
        position, within = divmod(num_tokens, self.block_size)
        table = self.req_to_blocks.get(request_id, ())
        return within > 0 and position < len(table) and not table[position].is_null

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int, num_prompt_tokens: int | None
    ) -> None:
        # Draft tokens among the computed ones may yet be rejected: count without them.
        num_computed = max(0, total_computed_tokens - self.num_speculative_blocks)
        super().remove_skipped_blocks(request_id, num_computed, num_prompt_tokens)
        last_state = self._last_state.get(request_id)
        if last_state is None or last_state >= cdiv(num_computed, self.block_size) - 1:
            return
        # The state of two steps ago: the last step has copied it on.
        table = self.req_to_blocks[request_id]
        block = table[last_state]
        if not block.is_null:
            table[last_state] = self.pool.null_block
            self.pool.free((block,), self.view)

    # --- hits -------------------------------------------------------------------------

    def find_longest_cache_hit(
        self,
        block_hashes: Sequence[bytes],
        max_length: int,
        groups: Sequence[int],
        *,
        drop_eagle_block: bool,
        alignment_tokens: int,
    ) -> tuple[list[KVCacheBlock], ...]:
        """As the base says; a draft model has no states, so none is ever dropped."""
        block_size = self.block_size
        indexes = [self.pool.indexes[group] for group in groups]
        for position in range(max_length // block_size - 1, -1, -1):
            if (position + 1) * block_size % alignment_tokens:
                continue
            found = visible_blocks(block_hashes[position], indexes, self.view)
            if found is not None:
                null_block = self.pool.null_block
                return tuple([[*[null_block] * position, block] for block in found])
        return tuple([[] for _ in groups])

    def reachable_block_mask(
        self, start_block: int, end_block: int, num_prompt_tokens: int | None
    ) -> list[bool] | None:
        """With a retention interval, only states at its multiples and, for a repeat of
        the same prompt, at the last boundary within it.
        """
        interval = self.retention_interval
        if interval is None:
            return None
        per_segment = interval // self.block_size
        if interval and per_segment <= 1:
            return None
        mask = [
            per_segment > 0 and (position + 1) % per_segment == 0
            for position in range(start_block, end_block)
        ]
        if num_prompt_tokens is not None:
            alignment = self.scheduler_block_size
            last_boundary = (num_prompt_tokens - 1) // alignment * alignment
            position = last_boundary // self.block_size - 1
            if start_block <= position < end_block:
                mask[position - start_block] = True
        return mask

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        request_id = request.request_id
        before = self.num_cached_blocks.get(request_id, 0)
        super().cache_blocks(request, num_tokens)
        after = self.num_cached_blocks.get(request_id, 0)
        if after > before:
            self._hashes_of_step.update(
                block.block_hash
                for block in self.req_to_blocks[request_id][before:after]
                if block.block_hash is not None
            )

    def made_in_this_step(self, hit: Sequence[KVCacheBlock]) -> bool:
        return bool(hit) and hit[-1].block_hash in self._hashes_of_step

    def new_step_starts(self) -> None:
        self._hashes_of_step.clear()
