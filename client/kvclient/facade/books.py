"""What the facade answers from this side alone: block tables and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvclient.facade.blocks import KVCacheBlocks
from kvclient.facade.known import KnownRequest
from kvclient.facade.stats import PrefixCacheStats
from kvclient.session import Session
from kvclient.session_tables import SessionTables
from kvclient.values import BlockTables

_KINDS_NOT_BY_TOKEN = ("mamba", "cross_attention", "encoder_only_attention")


class Books:
    """The requests of one session, as their tables are known here. Nothing is sent."""

    def __init__(self, session: Session, *, log_stats: bool) -> None:
        groups = session.pool.groups
        self.session = session
        self.log_stats = log_stats
        self.num_kv_cache_groups = len(groups)
        self.enable_caching = session.pool.enable_prefix_caching
        self.max_model_len = session.pool.max_model_len
        self.empty_kv_cache_blocks = KVCacheBlocks(tuple([] for _ in groups))
        self.prefix_cache_stats: PrefixCacheStats | None = PrefixCacheStats() if log_stats else None
        self._block_sizes = session.pool.table_block_sizes
        self._known: dict[str, KnownRequest] = {}
        self._tables = SessionTables(session.pool)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The request's blocks."""
        return self._blocks(self.get_block_ids(request_id))

    def get_block_ids(self, request_id: str) -> BlockTables:
        """The request's block table, by group."""
        known = self._known.get(request_id)
        if known is None or known.tables is None:
            return tuple([] for _ in self._block_sizes)
        return tuple(list(blocks) for blocks in known.tables.blocks)

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> BlockTables:
        """The part of the block table that holds ``num_computed_tokens``, by group.

        Blocks of states and of encoder tokens are answered in full.
        """
        return tuple(
            blocks
            if group.kind in _KINDS_NOT_BY_TOKEN
            else blocks[: -(-num_computed_tokens // group.block_size)]
            for blocks, group in zip(
                self.get_block_ids(request_id), self.session.pool.groups, strict=True
            )
        )

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Drops from the tables what no attention looks at any more.

        On this side only: the server frees these blocks with the request's next call.
        """
        known = self._known.get(request_id)
        if known is not None and known.tables is not None:
            known.tables.skip(total_computed_tokens)

    def take_new_block_ids(self) -> list[int]:
        """Ids of the blocks taken since the last call, for zeroing."""
        return self._tables.take_new_block_ids()

    def take_events(self) -> list[Any]:
        """None: the server publishes them itself."""
        return []

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """The statistics since the last call; None when they are not kept."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def create_kv_cache_blocks(self, blocks: Sequence[Sequence[int]]) -> KVCacheBlocks:
        """``blocks`` as a result."""
        return self._blocks(tuple(list(group) for group in blocks))

    def _blocks(self, blocks: BlockTables) -> KVCacheBlocks:
        return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks
