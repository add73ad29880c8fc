"""Layers of one group whose pages differ in size."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvcore.errors import InvalidArgument
from kvcore.spec.base import KVCacheSpec, RequestLimits, cdiv


@dataclass(frozen=True, slots=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """One spec a layer, all of one kind: they always need the same number of slots.

    Full attention with different head sizes is one kind; sliding windows of different
    sizes are not. A page holds the pages of all layers, in their order here.
    """

    kv_cache_specs: Mapping[str, KVCacheSpec] = field(hash=False)

    def __post_init__(self) -> None:
        KVCacheSpec.__post_init__(self)
        if not self.kv_cache_specs:
            raise InvalidArgument("a group needs a layer", field="kv_cache_specs")
        object.__setattr__(self, "kv_cache_specs", MappingProxyType(dict(self.kv_cache_specs)))
        first = self.first
        for name, spec in self.kv_cache_specs.items():
            if spec.block_size != self.block_size or spec.uniform_key != first.uniform_key:
                raise InvalidArgument(
                    f"layer {name!r}: its block size or its kind is not that of the group",
                    field="kv_cache_specs",
                )

    @property
    def first(self) -> KVCacheSpec:
        """A spec that stands for all in what does not depend on the page."""
        return next(iter(self.kv_cache_specs.values()))

    @property
    def kind(self) -> str:
        kinds = {spec.kind for spec in self.kv_cache_specs.values()}
        return kinds.pop() if len(kinds) == 1 else "unknown"

    @property
    def event_window(self) -> int | None:
        windows = {spec.event_window for spec in self.kv_cache_specs.values()}
        return windows.pop() if len(windows) == 1 else None

    @property
    def page_size_bytes(self) -> int:
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    @property
    def num_sink_blocks(self) -> int:
        return self.first.num_sink_blocks

    @property
    def uniform_key(self) -> Hashable:
        return self.first.uniform_key

    def max_memory_usage_bytes(self, limits: RequestLimits) -> int:
        num_pages = max(
            cdiv(spec.max_memory_usage_bytes(limits), spec.page_size_bytes)
            for spec in self.kv_cache_specs.values()
        )
        return num_pages * self.page_size_bytes

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int
    ) -> int | None:
        return self.first.max_admission_blocks_per_request(max_num_batched_tokens, max_model_len)
