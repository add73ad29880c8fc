"""Which manager serves which spec; open to specs of your own."""

from __future__ import annotations

from kvcore.block_pool import BlockPool
from kvcore.errors import InvalidArgument
from kvcore.single_type.base import SingleTypeKVCacheManager
from kvcore.single_type.chunked_local import ChunkedLocalAttentionManager
from kvcore.single_type.encoder import CrossAttentionManager, EncoderOnlyManager
from kvcore.single_type.full_attention import (
    FullAttentionManager,
    RSWAManager,
    SinkFullAttentionManager,
)
from kvcore.single_type.mamba import MambaManager
from kvcore.single_type.sliding_window import SlidingWindowManager
from kvcore.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    DepotConfig,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from kvcore.view import PoolView

_MANAGERS: dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]] = {
    FullAttentionSpec: FullAttentionManager,
    RSWASpec: RSWAManager,
    SinkFullAttentionSpec: SinkFullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
    MambaSpec: MambaManager,
    CrossAttentionSpec: CrossAttentionManager,
    EncoderOnlyAttentionSpec: EncoderOnlyManager,
}


def register_kv_cache_spec(
    spec_class: type[KVCacheSpec], manager_class: type[SingleTypeKVCacheManager]
) -> None:
    """Serve ``spec_class``, and what derives from it, with ``manager_class``.

    Call it once, before a depot is made with such a spec. A spec that derives from one
    that is served already needs no manager of its own. For instance::

        @dataclass(frozen=True, slots=True)
        class PrefixOnlySpec(FullAttentionSpec):
            '''Keeps the KV of the first block only.'''

        class PrefixOnlyManager(FullAttentionManager):
            def remove_skipped_blocks(self, request_id, total_computed_tokens, num_prompt_tokens):
                self._remove_range(request_id, 1, total_computed_tokens // self.block_size)

        register_kv_cache_spec(PrefixOnlySpec, PrefixOnlyManager)

    InvalidArgument if another manager serves exactly ``spec_class`` already.
    """
    present = _MANAGERS.setdefault(spec_class, manager_class)
    if present is not manager_class:
        raise InvalidArgument(
            f"{spec_class.__name__} is served by {present.__name__} already", field="spec_class"
        )


def manager_class_for(spec: KVCacheSpec) -> type[SingleTypeKVCacheManager]:
    """The manager of the nearest registered class of ``spec``; InvalidArgument if none is."""
    for base in type(spec).__mro__:
        manager_class = _MANAGERS.get(base)
        if manager_class is not None:
            return manager_class
    raise InvalidArgument(
        f"no manager serves {type(spec).__name__}: register one with "
        "kvcore.single_type.register_kv_cache_spec",
        field="spec",
    )


def make_manager(
    config: DepotConfig, pool: BlockPool, view: PoolView, group: int
) -> SingleTypeKVCacheManager:
    """The manager of one group of ``config``."""
    spec = config.kv_cache.groups[group].manager_spec
    return manager_class_for(spec)(spec, pool=pool, view=view, group=group, config=config)
