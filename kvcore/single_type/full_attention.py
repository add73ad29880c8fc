"""Managers of layers whose requests keep their prefix: full attention and its kin."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.block import KVCacheBlock
from kvcore.block_pool import BlockPool
from kvcore.single_type.base import SingleTypeKVCacheManager, align_hit
from kvcore.spec import DepotConfig, KVCacheSpec, RSWASpec, cdiv
from kvcore.view import PoolView


class FullAttentionManager(SingleTypeKVCacheManager):
    """Every block is needed until the request ends; a hit is a run from the start."""

    def find_longest_cache_hit(
        self,
        block_hashes: Sequence[bytes],
        max_length: int,
        groups: Sequence[int],
        *,
        drop_eagle_block: bool,
        alignment_tokens: int,
    ) -> tuple[list[KVCacheBlock], ...]:
        num_blocks = max_length // self.block_size
        hit = []
        for group in groups:
            run = self._find_run(block_hashes[:num_blocks], group)
            num_blocks = len(run)
            hit.append(run)
        if drop_eagle_block and num_blocks:
            num_blocks -= 1
        for run in hit:
            del run[num_blocks:]
        answer = tuple(hit)
        if alignment_tokens != self.block_size:
            align_hit(answer, self.block_size, alignment_tokens)
        return answer

    def _find_run(self, block_hashes: Sequence[bytes], group: int) -> list[KVCacheBlock]:
        entries = self.pool.indexes[group].entries
        view = self.view
        run: list[KVCacheBlock] = []
        for block_hash in block_hashes:
            entry = entries.get(block_hash)
            if entry is None:
                break
            copies = (entry,) if isinstance(entry, KVCacheBlock) else entry.values()
            for block in copies:
                pending = block.pending
                if pending is None or pending.view is view:
                    run.append(block)
                    break
            else:
                break
        return run

    def get_num_common_prefix_blocks(self, request_id: str) -> int:
        tables = self.req_to_blocks
        num_requests = len(tables)
        alone = len(self.pool.views) == 1
        num_common = 0
        for position, block in enumerate(tables.get(request_id, ())):
            if block.ref_cnt < num_requests:
                break
            if not alone:
                # Others' references say nothing of this session's requests.
                holders = sum(
                    position < len(table) and table[position] is block for table in tables.values()
                )
                if holders != num_requests:
                    break
            elif block.ref_cnt != num_requests:
                break
            num_common += 1
        return num_common


class RSWAManager(FullAttentionManager):
    """The prompt's blocks are kept, and of the generated tokens those in the window."""

    def __init__(
        self, spec: KVCacheSpec, *, pool: BlockPool, view: PoolView, group: int, config: DepotConfig
    ) -> None:
        super().__init__(spec, pool=pool, view=view, group=group, config=config)
        assert isinstance(spec, RSWASpec)
        self.rswa_window = spec.rswa_window

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int, num_prompt_tokens: int | None
    ) -> None:
        """Free the gap between the prompt's last block and the window's first."""
        if num_prompt_tokens is not None:
            self._remove_range(request_id, *self._gap(total_computed_tokens, num_prompt_tokens))

    def has_released(
        self, request_id: str, num_computed_tokens: int, num_prompt_tokens: int | None
    ) -> bool:
        if num_prompt_tokens is None:
            return False
        first, stop = self._gap(num_computed_tokens, num_prompt_tokens)
        table = self.req_to_blocks.get(request_id, ())
        return any(
            block.is_null and not first <= position < stop for position, block in enumerate(table)
        )

    def _gap(self, num_computed_tokens: int, num_prompt_tokens: int) -> tuple[int, int]:
        """The first block that is not looked at, and the first behind them."""
        window_start = max(num_prompt_tokens, num_computed_tokens - self.rswa_window)
        return cdiv(num_prompt_tokens, self.block_size), window_start // self.block_size


class SinkFullAttentionManager(FullAttentionManager):
    """Full attention whose sinks lie in blocks of the pool's own.

    vLLM 0.25.1 declares this manager but cannot construct it.
    """

    @property
    def sink_blocks(self) -> Sequence[KVCacheBlock]:
        """The blocks that stand before every request's table, in order."""
        return self.pool.sink_blocks[self.group]
