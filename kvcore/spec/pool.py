"""Groups of layers, and the pool that they share: what it holds and how large it is.

Sizing as in vLLM 0.25.1 (v1/core/kv_cache_utils.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvcore.errors import InvalidArgument
from kvcore.spec.base import KVCacheSpec, require_positive
from kvcore.spec.full_attention import FullAttentionSpec, TQFullAttentionSpec
from kvcore.spec.mamba import MambaSpec
from kvcore.spec.mla import HiddenStateCacheSpec, MLAAttentionSpec
from kvcore.spec.uniform import UniformTypeKVCacheSpecs

ZEROED_SPECS = (FullAttentionSpec, TQFullAttentionSpec, MLAAttentionSpec, HiddenStateCacheSpec)
"""The specs, exactly these, whose new blocks vLLM's workers zero beside Mamba layers."""


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share block tables. ``is_eagle_group``: they are a draft model's."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    is_eagle_group: bool = False

    def __post_init__(self) -> None:
        if not self.layer_names:
            raise InvalidArgument("a KV cache group needs a layer", field="layer_names")
        for name, count in Counter(self.layer_names).items():
            if count > 1:
                raise InvalidArgument(
                    f"layer {name!r} stands in its group twice", field="layer_names"
                )
        if isinstance(self.spec, UniformTypeKVCacheSpecs) and (
            tuple(self.spec.kv_cache_specs) != self.layer_names
        ):
            raise InvalidArgument(
                "layer_names must be the layers of kv_cache_specs, in their order",
                field="layer_names",
            )

    @property
    def manager_spec(self) -> KVCacheSpec:
        """What decides which blocks the group needs: of a uniform group, one layer's."""
        spec = self.spec
        return spec.first if isinstance(spec, UniformTypeKVCacheSpecs) else spec

    @property
    def holds_blocks(self) -> bool:
        """Whether its layers have a cache at all."""
        return self.manager_spec.holds_blocks

    @property
    def layer_specs(self) -> tuple[KVCacheSpec, ...]:
        """The spec of each layer."""
        spec = self.spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            return tuple(spec.kv_cache_specs.values())
        return (spec,) * len(self.layer_names)

    @property
    def num_pages(self) -> int:
        """Pages of ``spec`` in one block."""
        if not self.holds_blocks:
            return 0
        return 1 if isinstance(self.spec, UniformTypeKVCacheSpecs) else len(self.layer_names)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers of the group, without what pads their places."""
        return self.num_pages * self.spec.page_size_bytes


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The pool: ``num_blocks`` blocks, of which block 0 is the null block.

    A block serves any group, as a group's layers share its memory with those of the
    others. No groups: a model without a cache.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    def __post_init__(self) -> None:
        if self.num_blocks < 2:
            raise InvalidArgument(
                f"num_blocks must be at least 2 (block 0 is the null block), got {self.num_blocks}",
                field="num_blocks",
            )
        if self.num_blocks >= 1 << 31:
            raise InvalidArgument(
                f"{self.num_blocks} blocks are too many: num_blocks must fit an int32",
                field="num_blocks",
            )
        group_of: dict[str, int] = {}
        for number, group in enumerate(self.groups):
            for name in group.layer_names:
                if name in group_of:
                    raise InvalidArgument(
                        f"layer {name!r} stands in two groups, {group_of[name]} and {number}: "
                        "leave it in one",
                        field="layer_names",
                    )
                group_of[name] = number
        num_sink_blocks = sum(group.manager_spec.num_sink_blocks for group in self.groups)
        if num_sink_blocks > self.num_blocks - 2:
            raise InvalidArgument(
                f"of {self.num_blocks} blocks, {num_sink_blocks} are set aside for attention "
                "sinks and one is the null block: none is left",
                field="num_blocks",
            )

    @property
    def places(self) -> tuple[list[int], dict[str, int]]:
        """Bytes of each place of a block, one behind the other, and each layer's place.

        Layers at the same position of different groups share a place, and places are of
        one size: smaller pages are padded. Where layers of a group differ in size, each
        has a page of its own size; several such groups meet by page size, as in vLLM's
        packed layout.
        """
        sizes: dict[tuple[int, int], int] = {}  # page size (or 0) and position: bytes
        chosen: dict[str, tuple[int, int]] = {}
        groups = [group for group in self.groups if group.holds_blocks]
        differ = any(isinstance(group.spec, UniformTypeKVCacheSpecs) for group in groups)
        for group in groups:
            seen: Counter[int] = Counter()
            for name, spec in zip(group.layer_names, group.layer_specs, strict=True):
                nbytes = spec.page_size_bytes
                bucket = nbytes if differ and len(groups) > 1 else 0
                key = (bucket, seen[bucket])
                seen[bucket] += 1
                sizes[key] = nbytes
                chosen[name] = key
        if not differ and sizes:
            largest = max(group.spec.page_size_bytes for group in groups)
            sizes = dict.fromkeys(sizes, largest)
        numbers = {key: number for number, key in enumerate(sizes)}
        return list(sizes.values()), {name: numbers[key] for name, key in chosen.items()}

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return sum(self.places[0])

    @property
    def zeroed_group_ids(self) -> frozenset[int]:
        """Groups whose new blocks workers zero before they are written, as in vLLM.

        Full attention beside Mamba layers: a kernel that multiplies what lies behind a
        sequence's end by 0 must not find there what a state's bytes are as K and V, NaN
        among it.
        """
        if not any(isinstance(group.manager_spec, MambaSpec) for group in self.groups):
            return frozenset()
        return frozenset(
            number
            for number, group in enumerate(self.groups)
            if type(group.manager_spec) in ZEROED_SPECS
        )

    @property
    def pool_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_bytes


def num_blocks_for(available_bytes: int, groups: tuple[KVCacheGroup, ...]) -> int:
    """Blocks that fit ``available_bytes``: ``available // page // group_size``, or what a
    block's places take where pages differ in size.
    """
    require_positive("available_bytes", available_bytes)
    block_bytes = KVCacheConfig(1 << 30, groups).block_bytes
    if block_bytes == 0:
        raise InvalidArgument("no group has a cache: give num_blocks instead", field="groups")
    num_blocks = available_bytes // block_bytes
    if num_blocks < 2:
        raise InvalidArgument(
            f"{available_bytes} bytes hold {num_blocks} blocks of {block_bytes} bytes; "
            "at least 2 are needed",
            field="available_bytes",
        )
    return num_blocks


def available_bytes_for(total_bytes: int, utilization: float) -> int:
    """Bytes of ``total_bytes`` that the pool may take: a share in (0, 1]."""
    if not 0.0 < utilization <= 1.0:
        raise InvalidArgument(
            f"memory_utilization must be in (0, 1], got {utilization}",
            field="memory_utilization",
        )
    return int(total_bytes * utilization)
