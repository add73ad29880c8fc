"""The configuration of a depot: the pool, and all that decides what its cache does."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvcore.errors import InvalidArgument
from kvcore.hashing import DEFAULT_SCHEME
from kvcore.spec.base import KVCacheSpec, require_positive
from kvcore.spec.mamba import MambaSpec
from kvcore.spec.pool import KVCacheConfig, KVCacheGroup
from kvcore.spec.window import ChunkedLocalAttentionSpec, SlidingWindowSpec

NO_GROUPS_BLOCK_SIZE = 16
"""The scheduling granularity of a model without a cache, in tokens."""


@dataclass(frozen=True, slots=True)
class DepotConfig:
    """All that decides what the cache does; what vLLM does not allow is refused.

    ``max_num_batched_tokens``: the most tokens of a step; None is ``max_model_len``.
    ``hash_block_size``: tokens a hash; None is the greatest common divisor of the
    groups' block sizes. ``use_eagle``: a draft model reads the cache; unless groups
    are flagged, all count as its own. ``prefix_cache_retention_interval``: how densely
    windows and states are kept: None at every boundary, 0 at the prompt's last one, or
    once every so many tokens. ``dcp_world_size`` and ``pcp_world_size``: ranks that
    share out a block's tokens, so that a block counts that many times its size.
    ``tensor_parallel_size``: ranks over which the model's heads are split; the groups are
    those of one rank. The pool holds ``num_ranks`` of them, from ``tensor_parallel_rank`` on.
    """

    kv_cache: KVCacheConfig
    max_model_len: int = 131072
    enable_caching: bool = True
    hash_scheme: str = DEFAULT_SCHEME
    hash_seed: str = "0"
    watermark: float = 0.0
    model: str = ""
    weights_revision: str = ""
    layout: str = "block"
    medium: str = "CPU"
    """Where the bytes are, as the truth feed has it."""
    residency_sample_rate: float = 0.0
    max_sessions: int = 1024
    max_requests_per_session: int = 65536
    max_request_tokens: int = 1 << 22
    max_tokens_per_session: int = 1 << 26
    max_workers_per_session: int = 256
    max_step_blocks: int = 1 << 20
    """Blocks that the operations of a Step may deal with; others wait for it, and it is
    one message. The operation that exceeds it is done, those after it are not."""
    max_transfers: int = 1024
    max_transfer_blocks: int = 1 << 16
    """Of a transfer or an import."""
    max_imports: int = 16
    # Never None once made.
    max_num_batched_tokens: int = None  # type: ignore[assignment]
    hash_block_size: int = None  # type: ignore[assignment]
    use_eagle: bool = False
    prefix_cache_retention_interval: int | None = None
    dcp_world_size: int = 1
    pcp_world_size: int = 1
    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens is None:
            object.__setattr__(self, "max_num_batched_tokens", self.max_model_len)
        for name in (
            "max_model_len",
            "max_sessions",
            "max_requests_per_session",
            "max_request_tokens",
            "max_tokens_per_session",
            "max_workers_per_session",
            "max_step_blocks",
            "max_transfers",
            "max_transfer_blocks",
            "max_imports",
            "max_num_batched_tokens",
            "dcp_world_size",
            "pcp_world_size",
            "tensor_parallel_size",
            "num_ranks",
        ):
            require_positive(name, getattr(self, name))
        if not 0.0 <= self.watermark < 1.0:
            raise InvalidArgument("watermark must be in [0, 1)", field="watermark")
        if not 0.0 <= self.residency_sample_rate <= 1.0:
            raise InvalidArgument(
                "residency_sample_rate must be in [0, 1]", field="residency_sample_rate"
            )
        if self.layout not in ("block", "layer"):
            raise InvalidArgument("layout must be block or layer", field="layout")
        if not 0 <= self.tensor_parallel_rank <= self.tensor_parallel_size - self.num_ranks:
            raise InvalidArgument(
                f"a pool of {self.num_ranks} ranks from rank {self.tensor_parallel_rank} on does "
                f"not lie in a tensor-parallel group of {self.tensor_parallel_size}",
                field="tensor_parallel_rank",
            )
        self._check_context_parallel()
        self._resolve_hash_block_size()
        self._check_retention()
        if self.enable_caching:
            self._check_caching()

    # --- sizes ------------------------------------------------------------------------

    @property
    def cached_groups(self) -> tuple[KVCacheGroup, ...]:
        """The groups whose layers have a cache."""
        return tuple(group for group in self.kv_cache.groups if group.holds_blocks)

    @property
    def context_parallel_size(self) -> int:
        """How many ranks share out a block's tokens."""
        return self.dcp_world_size * self.pcp_world_size

    @property
    def scheduler_block_size(self) -> int:
        """Tokens of which every hit is a multiple: the groups' least common multiple."""
        sizes = [group.spec.block_size for group in self.cached_groups] or [NO_GROUPS_BLOCK_SIZE]
        return math.lcm(*sizes) * self.context_parallel_size

    @property
    def eagle_group_ids(self) -> frozenset[int]:
        """The groups that a draft model reads: those flagged, or all."""
        flagged = [i for i, group in enumerate(self.kv_cache.groups) if group.is_eagle_group]
        if self.use_eagle and not flagged:
            flagged = list(range(len(self.kv_cache.groups)))
        return frozenset(flagged)

    # --- checks -----------------------------------------------------------------------

    def _check_context_parallel(self) -> None:
        if self.context_parallel_size == 1:
            return
        field = "dcp_world_size" if self.dcp_world_size > 1 else "pcp_world_size"
        if len(self.cached_groups) > 1:
            raise InvalidArgument(
                f"context parallelism needs a single KV cache group, not {len(self.cached_groups)}",
                field=field,
            )
        for group in self.cached_groups:
            if not group.manager_spec.supports_context_parallel:
                raise InvalidArgument(
                    f"context parallelism is not supported with {group.spec.kind}", field=field
                )

    def _resolve_hash_block_size(self) -> None:
        groups = self.cached_groups
        scheduler_block_size = self.scheduler_block_size
        given = self.hash_block_size
        if given is None:
            object.__setattr__(self, "hash_block_size", self._default_hash_block_size())
            given = self.hash_block_size
        require_positive("hash_block_size", given)
        sizes = [group.spec.block_size for group in groups]
        if len(groups) <= 1:
            if given != scheduler_block_size and self.enable_caching:
                raise InvalidArgument(
                    f"hash_block_size {given}: with one KV cache group, hashes are of its "
                    f"blocks of {scheduler_block_size} tokens",
                    field="hash_block_size",
                )
        elif self.enable_caching and any(size % given for size in sizes):
            raise InvalidArgument(
                f"hash_block_size {given} must divide every group's block size, which are {sizes}",
                field="hash_block_size",
            )
        if scheduler_block_size % given:
            raise InvalidArgument(
                f"hash_block_size {given} must divide {scheduler_block_size}, the least common "
                "multiple of the groups' block sizes",
                field="hash_block_size",
            )

    def _default_hash_block_size(self) -> int:
        groups = self.cached_groups
        if len(groups) <= 1 or not self.enable_caching:
            return self.scheduler_block_size
        return math.gcd(*(group.spec.block_size for group in groups))

    def _check_retention(self) -> None:
        interval = self.prefix_cache_retention_interval
        if interval is None:
            return
        if not any(
            isinstance(group.manager_spec, SlidingWindowSpec | MambaSpec)
            for group in self.cached_groups
        ):
            raise InvalidArgument(
                "prefix_cache_retention_interval is set, but no KV cache group has a sliding "
                "window or Mamba states, on which alone it acts: leave it out",
                field="prefix_cache_retention_interval",
            )
        if interval < 0 or interval % self.scheduler_block_size:
            raise InvalidArgument(
                f"prefix_cache_retention_interval {interval} must be 0 or a positive multiple of "
                f"the scheduler block size {self.scheduler_block_size}",
                field="prefix_cache_retention_interval",
            )

    def _check_caching(self) -> None:
        groups = self.cached_groups
        if not groups:
            raise InvalidArgument(
                "without a KV cache group there is nothing to cache: disable caching",
                field="enable_caching",
            )
        specs = [group.manager_spec for group in groups]
        if len(specs) > 1 and all(spec == specs[0] for spec in specs):
            raise InvalidArgument(
                f"the {len(specs)} KV cache groups have one spec: put their layers into one group",
                field="groups",
            )
        smallest = min(group.spec.block_size for group in groups)
        for i, group in enumerate(self.kv_cache.groups):
            spec = group.manager_spec
            if isinstance(spec, MambaSpec) and spec.block_size != smallest:
                raise InvalidArgument(
                    f"a Mamba group's blocks of {spec.block_size} tokens are larger than the "
                    f"smallest group's of {smallest}: make them equal, or disable caching",
                    field="block_size",
                )
            if not spec.supports_prefix_caching:
                raise InvalidArgument(
                    f"{spec.kind} blocks are a request's own: disable caching",
                    field="enable_caching",
                )
            if isinstance(spec, ChunkedLocalAttentionSpec):
                if i in self.eagle_group_ids:
                    raise InvalidArgument(
                        "a draft model cannot read chunked local attention groups: flag its "
                        "own groups with is_eagle_group, or disable caching",
                        field="use_eagle",
                    )
                if spec.block_size != self.scheduler_block_size:
                    raise InvalidArgument(
                        "chunked local attention needs every group to have its block size of "
                        f"{spec.block_size}: disable caching, or make them equal",
                        field="block_size",
                    )

    # --- identity ---------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """Equal for two pools exactly when their blocks are interchangeable."""
        parts = {
            "model": self.model,
            "weights_revision": self.weights_revision,
            "hash": [self.hash_scheme, self.hash_seed, self.hash_block_size],
            "context_parallel": [self.dcp_world_size, self.pcp_world_size],
            "tensor_parallel": [
                self.tensor_parallel_size,
                self.tensor_parallel_rank,
                self.num_ranks,
            ],
            "groups": [
                [_parts(group.spec), list(group.layer_names)] for group in self.kv_cache.groups
            ],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _parts(value: Any) -> Any:
    """``value`` in JSON's types; of a spec, its class and all its fields."""
    if isinstance(value, KVCacheSpec):
        own = [[field.name, _parts(getattr(value, field.name))] for field in fields(value)]
        return [type(value).__name__, *own]
    if isinstance(value, Mapping):
        return [[name, _parts(part)] for name, part in value.items()]
    if isinstance(value, tuple | list):
        return [_parts(part) for part in value]
    return value
