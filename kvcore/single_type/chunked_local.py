"""The manager of layers that look back to the start of the present chunk."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.block import KVCacheBlock
from kvcore.block_pool import BlockPool
from kvcore.prefix_index import visible_blocks
from kvcore.single_type.base import SingleTypeKVCacheManager
from kvcore.spec import ChunkedLocalAttentionSpec, DepotConfig, KVCacheSpec
from kvcore.view import PoolView


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """Blocks of earlier chunks are released, and count as hit without being looked up."""

    def __init__(
        self, spec: KVCacheSpec, *, pool: BlockPool, view: PoolView, group: int, config: DepotConfig
    ) -> None:
        super().__init__(spec, pool=pool, view=view, group=group, config=config)
        assert isinstance(spec, ChunkedLocalAttentionSpec)
        self.attention_chunk_size = spec.attention_chunk_size

    def find_longest_cache_hit(
        self,
        block_hashes: Sequence[bytes],
        max_length: int,
        groups: Sequence[int],
        *,
        drop_eagle_block: bool,
        alignment_tokens: int,
    ) -> tuple[list[KVCacheBlock], ...]:
        assert not drop_eagle_block
        assert alignment_tokens == self.block_size
        num_before = self.get_num_skipped_tokens(max_length) // self.block_size
        null_block = self.pool.null_block
        hit = tuple([[null_block] * num_before for _ in groups])
        indexes = [self.pool.indexes[group] for group in groups]
        for block_hash in block_hashes[num_before : max_length // self.block_size]:
            found = visible_blocks(block_hash, indexes, self.view)
            if found is None:
                break
            for blocks, block in zip(hit, found, strict=True):
                blocks.append(block)
        return hit

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.attention_chunk_size * self.attention_chunk_size
