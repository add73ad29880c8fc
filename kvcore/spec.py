"""What a pool is made of: KV cache specs, groups, and the sizing of both.

Page and pool arithmetic as in vLLM 0.25.1 (v1/kv_cache_interface.py and
v1/core/kv_cache_utils.py).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from kvcore.errors import InvalidArgument
from kvcore.hashing import DEFAULT_SCHEME

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}
"""Bytes of one element, by torch dtype name."""


def _require_positive(name: str, value: int) -> None:
    if value <= 0:
        raise InvalidArgument(f"{name} must be positive, got {value}", field=name)


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """A layer that attends to every earlier token.

    ``block_size`` is in tokens; ``head_size_v`` is set when the V head is of
    another size than the K head.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str = "bfloat16"
    head_size_v: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "num_kv_heads", "head_size"):
            _require_positive(name, getattr(self, name))
        if self.head_size_v is not None:
            _require_positive("head_size_v", self.head_size_v)
        if self.dtype not in DTYPE_BYTES:
            raise InvalidArgument(
                f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}", field="dtype"
            )

    @property
    def kind(self) -> str:
        """The name of this kind of attention in events and pool descriptions."""
        return "full_attention"

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in one layer, K and V together."""
        heads = self.head_size + (self.head_size if self.head_size_v is None else self.head_size_v)
        return self.block_size * self.num_kv_heads * heads * DTYPE_BYTES[self.dtype]


KVCacheSpec = FullAttentionSpec
"""Every kind of spec there is."""


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share block tables."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec

    def __post_init__(self) -> None:
        if not self.layer_names:
            raise InvalidArgument("a KV cache group needs a layer", field="layer_names")


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The pool: ``num_blocks`` blocks, of which block 0 is the null block."""

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    def __post_init__(self) -> None:
        if self.num_blocks < 2:
            raise InvalidArgument(
                f"num_blocks must be at least 2 (block 0 is the null block), got {self.num_blocks}",
                field="num_blocks",
            )
        if self.num_blocks >= 1 << 31:
            raise InvalidArgument("num_blocks must fit an int32", field="num_blocks")

    @property
    def group_size(self) -> int:
        """Pages a block holds: the layers of the largest group."""
        return max((len(group.layer_names) for group in self.groups), default=0)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in one layer, over all groups the largest."""
        return max((group.spec.page_size_bytes for group in self.groups), default=0)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all blocks in all layers."""
        return self.num_blocks * self.group_size * self.page_size_bytes


def num_blocks_for(available_bytes: int, groups: tuple[KVCacheGroup, ...]) -> int:
    """Blocks that fit ``available_bytes``: ``available // page // group_size``."""
    _require_positive("available_bytes", available_bytes)
    shape = KVCacheConfig(num_blocks=2, groups=groups)
    num_blocks = available_bytes // shape.page_size_bytes // shape.group_size
    if num_blocks < 2:
        block_bytes = shape.page_size_bytes * shape.group_size
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


@dataclass(frozen=True, slots=True)
class DepotConfig:
    """All that decides what the cache does. Blocks are hashed at the group's size."""

    kv_cache: KVCacheConfig
    max_model_len: int = 131072
    enable_caching: bool = True
    hash_scheme: str = DEFAULT_SCHEME
    hash_seed: str = "0"
    watermark: float = 0.0
    model: str = ""
    weights_revision: str = ""
    layout: str = "block"
    publish_events: bool = True
    medium: str = "CPU"
    """Where the bytes are, as the truth feed has it."""
    residency_sample_rate: float = 0.0
    max_sessions: int = 1024
    max_requests_per_session: int = 65536
    max_request_tokens: int = 1 << 22
    max_tokens_per_session: int = 1 << 26
    max_workers_per_session: int = 256

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_sessions",
            "max_requests_per_session",
            "max_request_tokens",
            "max_tokens_per_session",
            "max_workers_per_session",
        ):
            _require_positive(name, getattr(self, name))
        if not 0.0 <= self.watermark < 1.0:
            raise InvalidArgument("watermark must be in [0, 1)", field="watermark")
        if not 0.0 <= self.residency_sample_rate <= 1.0:
            raise InvalidArgument(
                "residency_sample_rate must be in [0, 1]", field="residency_sample_rate"
            )
        if self.layout not in ("block", "layer"):
            raise InvalidArgument("layout must be block or layer", field="layout")

    @property
    def block_size(self) -> int:
        """Tokens a block, of the first group."""
        return self.kv_cache.groups[0].spec.block_size

    @property
    def fingerprint(self) -> str:
        """Equal for two pools exactly when their blocks are interchangeable."""
        parts = {
            "model": self.model,
            "weights_revision": self.weights_revision,
            "hash": [self.hash_scheme, self.hash_seed],
            "groups": [
                [
                    group.spec.kind,
                    group.spec.block_size,
                    group.spec.num_kv_heads,
                    group.spec.head_size,
                    group.spec.head_size_v,
                    group.spec.dtype,
                    list(group.layer_names),
                ]
                for group in self.kv_cache.groups
            ],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
