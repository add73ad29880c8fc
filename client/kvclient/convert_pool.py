"""From the wire's description of a pool to the client's."""

from __future__ import annotations

from kvclient.description import (
    CudaIpcMapping,
    FileMapping,
    KVCacheGroup,
    KVCacheSpec,
    LayerLayout,
    MambaState,
    PoolDescription,
    PoolMapping,
    TensorView,
)
from kvdepot.v1 import types_pb2

SPEC_KINDS = {
    number: name.removeprefix("SPEC_KIND_").lower()
    for name, number in types_pb2.SpecKind.items()
    if number
}
_QUANT_MODES = {
    number: name.removeprefix("KV_QUANT_MODE_").lower()
    for name, number in types_pb2.KVQuantMode.items()
    if number
}
_MAMBA_CACHE_MODES = {
    number: name.removeprefix("MAMBA_CACHE_MODE_").lower()
    for name, number in types_pb2.MambaCacheMode.items()
    if number
}
_LAYOUTS = {types_pb2.POOL_LAYOUT_BLOCK: "block", types_pb2.POOL_LAYOUT_LAYER: "layer"}


def kv_cache_spec(spec: types_pb2.KVCacheSpec) -> KVCacheSpec:
    """What a layer keeps. A kind or mode that this client does not know is "unknown"."""
    has = spec.HasField
    return KVCacheSpec(
        kind=SPEC_KINDS.get(spec.kind, "unknown"),
        block_size=spec.block_size,
        page_size_bytes=spec.page_size_bytes,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=spec.dtype,
        kv_quant_mode=(
            _QUANT_MODES.get(spec.kv_quant_mode, "unknown") if spec.kv_quant_mode else "none"
        ),
        sliding_window=spec.sliding_window if has("sliding_window") else None,
        attention_chunk_size=spec.attention_chunk_size if has("attention_chunk_size") else None,
        rswa_window=spec.rswa_window if has("rswa_window") else None,
        sink_len=spec.sink_len if has("sink_len") else None,
        mamba_states=tuple(
            MambaState(tuple(state.shape), state.dtype) for state in spec.mamba_states
        ),
        mamba_cache_mode=(
            _MAMBA_CACHE_MODES.get(spec.mamba_cache_mode, "unknown")
            if spec.mamba_cache_mode
            else None
        ),
        num_speculative_blocks=spec.num_speculative_blocks,
    )


def layer_layout(layer: types_pb2.LayerLayout) -> LayerLayout:
    """Where a layer lies."""
    return LayerLayout(
        layer.name,
        layer.offset_bytes,
        layer.block_stride_bytes,
        layer.group,
        tuple(
            TensorView(
                view.name, view.dtype, tuple(view.shape), tuple(view.strides), view.offset_bytes
            )
            for view in layer.views
        ),
    )


def pool_mapping(mapping: types_pb2.PoolMapping) -> PoolMapping:
    """Where one rank's bytes are."""
    if not mapping.HasField("cuda_ipc"):
        return FileMapping(mapping.file.path, mapping.num_bytes, mapping.file.huge_pages)
    cuda = mapping.cuda_ipc
    return CudaIpcMapping(
        device_index=cuda.device_index,
        device_uuid=cuda.device_uuid,
        handle=cuda.handle,
        nbytes=mapping.num_bytes,
        offset_bytes=cuda.offset_bytes,
        ref_counter_handle=cuda.ref_counter_handle,
        ref_counter_offset=cuda.ref_counter_offset,
        event_handle=cuda.event_handle,
        event_sync_required=cuda.event_sync_required,
    )


def pool_description(pool: types_pb2.PoolDescription, epoch: str) -> PoolDescription:
    """The server's pool."""
    return PoolDescription(
        epoch=epoch,
        fingerprint=pool.fingerprint,
        num_blocks=pool.num_blocks,
        groups=tuple(
            KVCacheGroup(
                kv_cache_spec(group.spec),
                tuple(group.layer_names),
                tuple(kv_cache_spec(spec) for spec in group.layer_specs),
                group.is_eagle_group,
                group.needs_zeroing,
            )
            for group in pool.groups
        ),
        layout=_LAYOUTS.get(pool.layout, "unknown"),
        layers=tuple(layer_layout(layer) for layer in pool.layers),
        mappings=tuple(pool_mapping(mapping) for mapping in pool.mappings),
        hash_scheme=pool.hash_scheme,
        hash_seed=pool.hash_seed,
        hash_block_size=pool.hash_block_size,
        max_model_len=pool.max_model_len,
        enable_prefix_caching=pool.enable_prefix_caching,
        scheduler_block_size=pool.scheduler_block_size,
        decode_context_parallel_size=pool.decode_context_parallel_size or 1,
        prefill_context_parallel_size=pool.prefill_context_parallel_size or 1,
        tensor_parallel_size=pool.tensor_parallel_size or 1,
        tensor_parallel_rank=pool.tensor_parallel_rank,
        model=pool.model,
        weights_revision=pool.weights_revision,
    )
