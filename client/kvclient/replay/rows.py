"""The rows of every layer's pages, and which of them a request reads and writes.

A row is what a token leaves in a layer; where a layer keeps less than that, several
tokens share a row, and it holds what the last of them left: a block of a Mamba layer is one
row, its state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvclient.description import KVCacheSpec, PoolDescription
from kvclient.pool import row_shape
from kvclient.replay.pattern import WORD_BYTES, Values, salts
from kvclient.tables import num_skipped_tokens

# They hold no tokens of the request itself, or what they hold is not known here.
_NOT_FOLLOWED = ("cross_attention", "encoder_only_attention", "unknown")


@dataclass(frozen=True, slots=True)
class LayerRows:
    """One layer's pages: ``salts`` are ``(parts, words)``, a row of ``words`` in each part."""

    name: str
    rows: int
    salts: Values
    page_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes of a page that rows take; the rest is padding."""
        return self.rows * self.salts.size * WORD_BYTES


@dataclass(frozen=True, slots=True)
class GroupRows:
    """One KV cache group that holds the request's own tokens."""

    group: int
    spec: KVCacheSpec
    block_size: int
    tokens_per_row: int
    layers: tuple[LayerRows, ...]

    @property
    def rows_per_block(self) -> int:
        """Rows of one block in one layer."""
        return self.block_size // self.tokens_per_row

    def read(self, num_tokens: int, num_prompt_tokens: int) -> Iterator[tuple[int, int]]:
        """Ranges of rows that the token after ``num_tokens`` looks at."""
        spec, per_row = self.spec, self.tokens_per_row
        if spec.rswa_window is not None and num_tokens > num_prompt_tokens:
            yield 0, -(-num_prompt_tokens // per_row)
            start = max(num_prompt_tokens, num_tokens - spec.rswa_window)
            yield -(-start // per_row), -(-num_tokens // per_row)
            return
        start = num_skipped_tokens(spec, num_tokens) // per_row
        if start * per_row < num_tokens:
            yield start, -(-num_tokens // per_row)

    def written(self, start: int, stop: int) -> tuple[int, int]:
        """The range of rows that computing the tokens ``start`` to ``stop`` writes."""
        last = -(-stop // self.tokens_per_row)
        if self.spec.kind == "mamba" and self.spec.mamba_cache_mode != "all":
            return last - 1, last  # the state after the step, no other
        return start // self.tokens_per_row, last


def group_rows(pool: PoolDescription) -> list[GroupRows]:
    """The groups whose bytes a replay can follow. ValueError for rows it cannot fill."""
    if pool.decode_context_parallel_size * pool.prefill_context_parallel_size > 1:
        raise ValueError("the tokens of a block lie on several ranks: replay without bytes")
    layouts = {layout.name: layout for layout in pool.layers}
    groups, taken = [], 0
    for number, group in enumerate(pool.groups):
        if group.kind in _NOT_FOLLOWED:
            continue
        specs = group.layer_specs or (group.spec,) * len(group.layer_names)
        layers = []
        for name, spec in zip(group.layer_names, specs, strict=True):
            parts, rows, row_bytes = row_shape(layouts[name])
            if row_bytes % WORD_BYTES:
                raise ValueError(
                    f"a row of {name} has {row_bytes} bytes, no multiple of {WORD_BYTES}"
                )
            constants = salts(parts, row_bytes, taken)
            taken += constants.size
            layers.append(LayerRows(name, rows, constants, spec.page_size_bytes))
        groups.append(
            GroupRows(
                number,
                group.spec,
                group.block_size,
                group.block_size // layers[0].rows,
                tuple(layers),
            )
        )
    return groups
