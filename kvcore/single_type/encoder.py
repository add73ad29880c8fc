"""Managers of layers of encoder-decoder models and of encoders."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.block import KVCacheBlock
from kvcore.single_type.base import SingleTypeKVCacheManager


class CrossAttentionManager(SingleTypeKVCacheManager):
    """Blocks for the encoder's tokens, given once; they are shared with no other request."""

    counts_encoder_tokens = True

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
    ) -> None:
        assert not new_computed_blocks

    def allocate_external_computed_blocks(
        self, request_id: str, total_computed_tokens: int, num_external_computed_tokens: int
    ) -> None:
        """The encoder's output is never brought from elsewhere."""

    def is_settled(
        self, request_id: str, num_computed_tokens: int, num_slots: int, num_tokens_to_cache: int
    ) -> bool:
        return True  # the encoder's tokens have their blocks from the start

    def find_longest_cache_hit(
        self,
        block_hashes: Sequence[bytes],
        max_length: int,
        groups: Sequence[int],
        *,
        drop_eagle_block: bool,
        alignment_tokens: int,
    ) -> tuple[list[KVCacheBlock], ...]:
        return tuple([[] for _ in groups])


class EncoderOnlyManager(CrossAttentionManager):
    """Layers without a cache: their tables stay empty."""

    counts_encoder_tokens = False

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool,
    ) -> int:
        return 0

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        return []

    def is_settled(
        self, request_id: str, num_computed_tokens: int, num_slots: int, num_tokens_to_cache: int
    ) -> bool:
        return True

    def cache_blocks(self, request: object, num_tokens: int) -> None:
        """There is nothing to make a hit."""
