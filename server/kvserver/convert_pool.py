"""The pool's description on the wire: its groups, where each layer lies, its mappings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.memory import CudaIpcMapping, FileMapping, LayerLayout
from kvcore.spec import (
    AttentionSpec,
    DepotConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)
from kvdepot.v1 import types_pb2

_SPEC_KINDS: dict[str, Any] = {
    name.removeprefix("SPEC_KIND_").lower(): number for name, number in types_pb2.SpecKind.items()
}
_QUANT_MODES: dict[str, Any] = {
    name.removeprefix("KV_QUANT_MODE_").lower(): number
    for name, number in types_pb2.KVQuantMode.items()
} | {"none": types_pb2.KV_QUANT_MODE_UNSPECIFIED}
_MAMBA_CACHE_MODES: dict[str, Any] = {
    name.removeprefix("MAMBA_CACHE_MODE_").lower(): number
    for name, number in types_pb2.MambaCacheMode.items()
}
_LAYOUTS = {"block": types_pb2.POOL_LAYOUT_BLOCK, "layer": types_pb2.POOL_LAYOUT_LAYER}


def kv_cache_spec(spec: KVCacheSpec) -> types_pb2.KVCacheSpec:
    """What a layer keeps; of kinds that are not vLLM's no more than sizes."""
    message = types_pb2.KVCacheSpec(
        kind=spec_kind(spec.kind),
        block_size=spec.block_size,
        page_size_bytes=spec.page_size_bytes,
    )
    if isinstance(spec, AttentionSpec):
        message.num_kv_heads = spec.num_kv_heads
        message.head_size = spec.head_size
        if not isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
            message.head_size_v = getattr(spec, "head_size_v", spec.head_size)
        message.dtype = spec.dtype
        message.kv_quant_mode = _QUANT_MODES[spec.kv_quant_mode]
        for name in ("sliding_window", "attention_chunk_size", "rswa_window", "sink_len"):
            value = getattr(spec, name, None)
            if value is not None:
                setattr(message, name, value)
    elif isinstance(spec, MambaSpec):
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
            message.mamba_states.add(shape=shape, dtype=dtype)
        message.mamba_cache_mode = _MAMBA_CACHE_MODES[spec.mamba_cache_mode]
        message.num_speculative_blocks = spec.num_speculative_blocks
    return message


def kv_cache_group(group: KVCacheGroup, *, needs_zeroing: bool = False) -> types_pb2.KVCacheGroup:
    """A group; where layers differ, with the spec of each."""
    differ = isinstance(group.spec, UniformTypeKVCacheSpecs)
    message = types_pb2.KVCacheGroup(
        spec=kv_cache_spec(group.manager_spec),
        layer_names=group.layer_names,
        layer_specs=[kv_cache_spec(spec) for spec in group.layer_specs] if differ else [],
        is_eagle_group=group.is_eagle_group,
        needs_zeroing=needs_zeroing,
    )
    if differ:
        message.spec.kind = spec_kind(group.spec.kind)
    return message


def layer_layout(layer: LayerLayout) -> types_pb2.LayerLayout:
    """Where a layer lies."""
    return types_pb2.LayerLayout(
        name=layer.name,
        offset_bytes=layer.offset_bytes,
        block_stride_bytes=layer.block_stride_bytes,
        group=layer.group,
        views=[
            types_pb2.TensorView(
                name=view.name,
                dtype=view.dtype,
                shape=view.shape,
                strides=view.strides,
                offset_bytes=view.offset_bytes,
            )
            for view in layer.views
        ],
    )


def spec_kind(kind: str) -> types_pb2.SpecKind:
    """A kind that an operator registered is none of the wire's."""
    number: types_pb2.SpecKind = _SPEC_KINDS.get(kind, types_pb2.SPEC_KIND_UNKNOWN)
    return number


def pool_mapping(mapping: FileMapping | CudaIpcMapping) -> types_pb2.PoolMapping:
    """Where one rank's bytes are."""
    message = types_pb2.PoolMapping(num_bytes=mapping.nbytes)
    if isinstance(mapping, FileMapping):
        message.file.path = mapping.path
        message.file.huge_pages = mapping.huge_pages
        return message
    message.cuda_ipc.CopyFrom(
        types_pb2.CudaIpcMapping(
            device_index=mapping.device_index,
            device_uuid=mapping.device_uuid,
            handle=mapping.handle,
            offset_bytes=mapping.offset_bytes,
            ref_counter_handle=mapping.ref_counter_handle,
            ref_counter_offset=mapping.ref_counter_offset,
            event_handle=mapping.event_handle,
            event_sync_required=mapping.event_sync_required,
        )
    )
    return message


def pool_description(
    config: DepotConfig,
    layers: list[LayerLayout],
    mappings: Sequence[FileMapping | CudaIpcMapping],
) -> types_pb2.PoolDescription:
    """What clients need to know of the pool; no ``mappings``: it holds no bytes."""
    zeroed = config.kv_cache.zeroed_group_ids
    return types_pb2.PoolDescription(
        fingerprint=config.fingerprint,
        num_blocks=config.kv_cache.num_blocks,
        groups=[
            kv_cache_group(group, needs_zeroing=number in zeroed)
            for number, group in enumerate(config.kv_cache.groups)
        ],
        layout=_LAYOUTS[config.layout],
        layers=[layer_layout(layer) for layer in layers],
        mappings=[pool_mapping(mapping) for mapping in mappings],
        hash_scheme=config.hash_scheme,
        hash_seed=config.hash_seed,
        hash_block_size=config.hash_block_size,
        max_model_len=config.max_model_len,
        enable_prefix_caching=config.enable_caching,
        scheduler_block_size=config.scheduler_block_size,
        decode_context_parallel_size=config.dcp_world_size,
        prefill_context_parallel_size=config.pcp_world_size,
        tensor_parallel_size=config.tensor_parallel_size,
        tensor_parallel_rank=config.tensor_parallel_rank,
        model=config.model,
        weights_revision=config.weights_revision,
    )
