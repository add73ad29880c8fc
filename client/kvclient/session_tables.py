"""All block tables of one session: who shares what, and which blocks are new."""

from __future__ import annotations

from kvclient.description import PoolDescription
from kvclient.slots import NULL_BLOCK
from kvclient.tables import RequestTables
from kvclient.values import BlockTables

_ZEROED_KINDS = ("full_attention", "mla_attention")
_SHARED_KINDS = (*_ZEROED_KINDS, "sink_full_attention")


class SessionTables:
    """Counts this session's references to blocks, in groups whose prefixes are shared."""

    def __init__(self, pool: PoolDescription) -> None:
        groups = pool.groups
        self._pool = pool
        # Those with tables.
        self.num_requests = 0
        self._shares = [
            pool.enable_prefix_caching and group.kind in _SHARED_KINDS for group in groups
        ]
        self._zeroes = [
            group.kind in _ZEROED_KINDS and group.spec.rswa_window is None for group in groups
        ]
        # Spare blocks of states may come again, further right.
        self._is_appended = [group.spec.mamba_cache_mode != "align" for group in groups]
        self._references: list[dict[int, int]] = [{} for _ in groups]
        self._new_block_ids: list[list[int]] = [[] for _ in groups]

    def begin(
        self,
        num_prompt_tokens: int,
        hit: BlockTables,
        new_blocks: BlockTables,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> RequestTables:
        """The tables of a request that is admitted; see RequestTables.admit."""
        tables = RequestTables(self._pool, num_prompt_tokens, self._left)
        tables.admit(hit, new_blocks, num_computed_tokens, num_external_tokens)
        self.num_requests += 1
        self._refer(tables.blocks, 1)
        self._note_new(new_blocks)
        return tables

    def grow(self, tables: RequestTables, new_blocks: BlockTables) -> None:
        """New blocks of a running request."""
        tables.grow(new_blocks)
        for group, blocks in enumerate(new_blocks):
            if blocks:
                self._refer_in(group, blocks, 1)
                if self._zeroes[group]:
                    self._new_block_ids[group] += blocks

    def extend(self, tables: RequestTables, group: int, blocks: list[int]) -> None:
        """As ``grow``, of one group, to whose tables nothing but new blocks comes."""
        assert self._is_appended[group], "blocks move within the tables of this group"
        tables.blocks[group].extend(blocks)
        if self._shares[group]:
            references = self._references[group]
            for block_id in blocks:
                references[block_id] = references.get(block_id, 0) + 1
        if self._zeroes[group]:
            self._new_block_ids[group] += blocks

    def end(self, tables: RequestTables) -> BlockTables:
        """The request holds no tables any more; its blocks stay referenced until ``drop``."""
        self.num_requests -= 1
        return tables.blocks

    def drop(self, blocks: BlockTables) -> None:
        """References of an ended request go."""
        self._refer(blocks, -1)

    def num_common_prefix_blocks(self, blocks: BlockTables) -> list[int]:
        """Leading blocks that all requests with tables share; 0 in groups that share none."""
        common = []
        for table, references, shares in zip(blocks, self._references, self._shares, strict=True):
            num_common = 0
            while (
                shares
                and num_common < len(table)
                and references.get(table[num_common]) == self.num_requests
            ):
                num_common += 1
            common.append(num_common)
        return common

    def take_new_block_ids(self) -> list[int]:
        """Ids of the blocks taken since the last call, for zeroing; of states, none."""
        taken = [block_id for blocks in self._new_block_ids for block_id in blocks]
        self._new_block_ids = [[] for _ in self._new_block_ids]
        return taken

    def _note_new(self, new_blocks: BlockTables) -> None:
        for group, blocks in enumerate(new_blocks):
            if self._zeroes[group]:
                self._new_block_ids[group].extend(blocks)

    def _left(self, group: int, block_id: int) -> None:
        """A block was freed while its request runs."""
        self._refer_in(group, [block_id], -1)

    def _refer(self, tables: BlockTables, change: int) -> None:
        for group, blocks in enumerate(tables):
            self._refer_in(group, blocks, change)

    def _refer_in(self, group: int, blocks: list[int], change: int) -> None:
        if not self._shares[group]:
            return
        references = self._references[group]
        for block_id in blocks:
            if block_id == NULL_BLOCK:
                continue
            num_references = references.get(block_id, 0) + change
            if num_references:
                references[block_id] = num_references
            else:
                del references[block_id]
