"""Small pools and requests for the tests of kvcore."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from kvcore.depot import Depot
from kvcore.events import Event
from kvcore.feed import events_of
from kvcore.hashing import ExtraKeys, make_scheme
from kvcore.manager import KVCacheManager
from kvcore.operation import Content
from kvcore.request import Request
from kvcore.spec import (
    DepotConfig,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

SCHEME = make_scheme("kvd_sha256", "0")


def truth_events(depot: Depot) -> list[Event]:
    """What the truth feed says since the last call, an event a block."""
    return list(events_of(depot.take_feed()))


def token_bytes(tokens: Iterable[int]) -> bytes:
    """Tokens as the core takes them."""
    ids = list(tokens)
    return struct.pack(f"<{len(ids)}I", *ids)


def config(num_blocks: int, block_size: int = 4, **options: object) -> DepotConfig:
    """A pool of one full attention group with one layer."""
    spec = FullAttentionSpec(block_size, num_kv_heads=1, head_size=16)
    groups = (KVCacheGroup(("layer",), spec),)
    return DepotConfig(KVCacheConfig(num_blocks, groups), **options)  # type: ignore[arg-type]


def full(block_size: int = 4) -> FullAttentionSpec:
    """Full attention of one small head."""
    return FullAttentionSpec(block_size, num_kv_heads=1, head_size=16)


def window(sliding_window: int, block_size: int = 4) -> SlidingWindowSpec:
    """A sliding window of one small head."""
    return SlidingWindowSpec(
        block_size, num_kv_heads=1, head_size=16, sliding_window=sliding_window
    )


def mamba(mode: str, block_size: int = 4, num_speculative_blocks: int = 0) -> MambaSpec:
    """A small state."""
    return MambaSpec(
        block_size,
        ((4,),),
        ("float32",),
        mamba_cache_mode=mode,
        num_speculative_blocks=num_speculative_blocks,
    )


def groups_config(num_blocks: int, *specs: KVCacheSpec, **options: object) -> DepotConfig:
    """A pool of several groups with one layer each."""
    groups = tuple(KVCacheGroup((f"layer.{i}",), spec) for i, spec in enumerate(specs))
    return DepotConfig(KVCacheConfig(num_blocks, groups), **options)  # type: ignore[arg-type]


def make_manager(num_blocks: int, block_size: int = 4, **options: object) -> KVCacheManager:
    """A manager with a pool of its own."""
    return KVCacheManager(config(num_blocks, block_size, **options), enable_kv_cache_events=True)


def make_depot(num_blocks: int, block_size: int = 4, **options: object) -> Depot:
    """A depot for several sessions."""
    return Depot(config(num_blocks, block_size, **options))


def make_request(request_id: str, tokens: Iterable[int], block_size: int = 4) -> Request:
    """A request with its tokens hashed."""
    extra = ExtraKeys()
    request = Request(request_id, hash_chain=SCHEME.chain(block_size, extra), extra=extra)
    request.append(token_bytes(tokens))
    return request


def content(tokens: Iterable[int], offset: int = 0) -> Content:
    """Tokens on their way to a depot."""
    return Content(token_offset=offset, tokens=token_bytes(tokens))
