from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpecKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPEC_KIND_UNSPECIFIED: _ClassVar[SpecKind]
    SPEC_KIND_FULL_ATTENTION: _ClassVar[SpecKind]
    SPEC_KIND_MLA_ATTENTION: _ClassVar[SpecKind]
    SPEC_KIND_SLIDING_WINDOW: _ClassVar[SpecKind]
    SPEC_KIND_SLIDING_WINDOW_MLA: _ClassVar[SpecKind]
    SPEC_KIND_MAMBA: _ClassVar[SpecKind]
    SPEC_KIND_CHUNKED_LOCAL_ATTENTION: _ClassVar[SpecKind]
    SPEC_KIND_SINK_FULL_ATTENTION: _ClassVar[SpecKind]
    SPEC_KIND_ENCODER_ONLY_ATTENTION: _ClassVar[SpecKind]
    SPEC_KIND_CROSS_ATTENTION: _ClassVar[SpecKind]
    SPEC_KIND_UNKNOWN: _ClassVar[SpecKind]

class KVQuantMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_QUANT_MODE_UNSPECIFIED: _ClassVar[KVQuantMode]
    KV_QUANT_MODE_FP8_PER_TENSOR: _ClassVar[KVQuantMode]
    KV_QUANT_MODE_INT8_PER_TOKEN_HEAD: _ClassVar[KVQuantMode]
    KV_QUANT_MODE_FP8_PER_TOKEN_HEAD: _ClassVar[KVQuantMode]
    KV_QUANT_MODE_INT4_PER_TOKEN_HEAD: _ClassVar[KVQuantMode]
    KV_QUANT_MODE_NVFP4: _ClassVar[KVQuantMode]

class MambaCacheMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MAMBA_CACHE_MODE_UNSPECIFIED: _ClassVar[MambaCacheMode]
    MAMBA_CACHE_MODE_NONE: _ClassVar[MambaCacheMode]
    MAMBA_CACHE_MODE_ALL: _ClassVar[MambaCacheMode]
    MAMBA_CACHE_MODE_ALIGN: _ClassVar[MambaCacheMode]

class PoolLayout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOL_LAYOUT_UNSPECIFIED: _ClassVar[PoolLayout]
    POOL_LAYOUT_BLOCK: _ClassVar[PoolLayout]
    POOL_LAYOUT_LAYER: _ClassVar[PoolLayout]
SPEC_KIND_UNSPECIFIED: SpecKind
SPEC_KIND_FULL_ATTENTION: SpecKind
SPEC_KIND_MLA_ATTENTION: SpecKind
SPEC_KIND_SLIDING_WINDOW: SpecKind
SPEC_KIND_SLIDING_WINDOW_MLA: SpecKind
SPEC_KIND_MAMBA: SpecKind
SPEC_KIND_CHUNKED_LOCAL_ATTENTION: SpecKind
SPEC_KIND_SINK_FULL_ATTENTION: SpecKind
SPEC_KIND_ENCODER_ONLY_ATTENTION: SpecKind
SPEC_KIND_CROSS_ATTENTION: SpecKind
SPEC_KIND_UNKNOWN: SpecKind
KV_QUANT_MODE_UNSPECIFIED: KVQuantMode
KV_QUANT_MODE_FP8_PER_TENSOR: KVQuantMode
KV_QUANT_MODE_INT8_PER_TOKEN_HEAD: KVQuantMode
KV_QUANT_MODE_FP8_PER_TOKEN_HEAD: KVQuantMode
KV_QUANT_MODE_INT4_PER_TOKEN_HEAD: KVQuantMode
KV_QUANT_MODE_NVFP4: KVQuantMode
MAMBA_CACHE_MODE_UNSPECIFIED: MambaCacheMode
MAMBA_CACHE_MODE_NONE: MambaCacheMode
MAMBA_CACHE_MODE_ALL: MambaCacheMode
MAMBA_CACHE_MODE_ALIGN: MambaCacheMode
POOL_LAYOUT_UNSPECIFIED: PoolLayout
POOL_LAYOUT_BLOCK: PoolLayout
POOL_LAYOUT_LAYER: PoolLayout

class CallContext(_message.Message):
    __slots__ = ("session_id", "epoch", "op_seq", "step", "completed_step")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OP_SEQ_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_STEP_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: str
    op_seq: int
    step: int
    completed_step: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[str] = ..., op_seq: _Optional[int] = ..., step: _Optional[int] = ..., completed_step: _Optional[int] = ...) -> None: ...

class BlockIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class MultimodalItem(_message.Message):
    __slots__ = ("identifier", "offset", "length")
    IDENTIFIER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    identifier: str
    offset: int
    length: int
    def __init__(self, identifier: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class ExtraKeys(_message.Message):
    __slots__ = ("lora_name", "lora_id", "cache_salt", "multimodal", "prompt_embeds_digests")
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    MULTIMODAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_EMBEDS_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    lora_name: str
    lora_id: int
    cache_salt: str
    multimodal: _containers.RepeatedCompositeFieldContainer[MultimodalItem]
    prompt_embeds_digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, lora_name: _Optional[str] = ..., lora_id: _Optional[int] = ..., cache_salt: _Optional[str] = ..., multimodal: _Optional[_Iterable[_Union[MultimodalItem, _Mapping]]] = ..., prompt_embeds_digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LayerLayout(_message.Message):
    __slots__ = ("name", "offset_bytes", "block_stride_bytes", "group", "views")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    VIEWS_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset_bytes: int
    block_stride_bytes: int
    group: int
    views: _containers.RepeatedCompositeFieldContainer[TensorView]
    def __init__(self, name: _Optional[str] = ..., offset_bytes: _Optional[int] = ..., block_stride_bytes: _Optional[int] = ..., group: _Optional[int] = ..., views: _Optional[_Iterable[_Union[TensorView, _Mapping]]] = ...) -> None: ...

class TensorView(_message.Message):
    __slots__ = ("name", "dtype", "shape", "strides", "offset_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    strides: _containers.RepeatedScalarFieldContainer[int]
    offset_bytes: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., strides: _Optional[_Iterable[int]] = ..., offset_bytes: _Optional[int] = ...) -> None: ...

class MambaState(_message.Message):
    __slots__ = ("shape", "dtype")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class KVCacheSpec(_message.Message):
    __slots__ = ("kind", "block_size", "page_size_bytes", "num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode", "sliding_window", "attention_chunk_size", "rswa_window", "sink_len", "mamba_states", "mamba_cache_mode", "num_speculative_blocks")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_V_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_QUANT_MODE_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_CHUNK_SIZE_FIELD_NUMBER: _ClassVar[int]
    RSWA_WINDOW_FIELD_NUMBER: _ClassVar[int]
    SINK_LEN_FIELD_NUMBER: _ClassVar[int]
    MAMBA_STATES_FIELD_NUMBER: _ClassVar[int]
    MAMBA_CACHE_MODE_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    kind: SpecKind
    block_size: int
    page_size_bytes: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: str
    kv_quant_mode: KVQuantMode
    sliding_window: int
    attention_chunk_size: int
    rswa_window: int
    sink_len: int
    mamba_states: _containers.RepeatedCompositeFieldContainer[MambaState]
    mamba_cache_mode: MambaCacheMode
    num_speculative_blocks: int
    def __init__(self, kind: _Optional[_Union[SpecKind, str]] = ..., block_size: _Optional[int] = ..., page_size_bytes: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_size: _Optional[int] = ..., head_size_v: _Optional[int] = ..., dtype: _Optional[str] = ..., kv_quant_mode: _Optional[_Union[KVQuantMode, str]] = ..., sliding_window: _Optional[int] = ..., attention_chunk_size: _Optional[int] = ..., rswa_window: _Optional[int] = ..., sink_len: _Optional[int] = ..., mamba_states: _Optional[_Iterable[_Union[MambaState, _Mapping]]] = ..., mamba_cache_mode: _Optional[_Union[MambaCacheMode, str]] = ..., num_speculative_blocks: _Optional[int] = ...) -> None: ...

class KVCacheGroup(_message.Message):
    __slots__ = ("spec", "layer_names", "layer_specs", "is_eagle_group", "needs_zeroing")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    LAYER_NAMES_FIELD_NUMBER: _ClassVar[int]
    LAYER_SPECS_FIELD_NUMBER: _ClassVar[int]
    IS_EAGLE_GROUP_FIELD_NUMBER: _ClassVar[int]
    NEEDS_ZEROING_FIELD_NUMBER: _ClassVar[int]
    spec: KVCacheSpec
    layer_names: _containers.RepeatedScalarFieldContainer[str]
    layer_specs: _containers.RepeatedCompositeFieldContainer[KVCacheSpec]
    is_eagle_group: bool
    needs_zeroing: bool
    def __init__(self, spec: _Optional[_Union[KVCacheSpec, _Mapping]] = ..., layer_names: _Optional[_Iterable[str]] = ..., layer_specs: _Optional[_Iterable[_Union[KVCacheSpec, _Mapping]]] = ..., is_eagle_group: bool = ..., needs_zeroing: bool = ...) -> None: ...

class PoolMapping(_message.Message):
    __slots__ = ("num_bytes", "file", "cuda_ipc")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    file: FileMapping
    cuda_ipc: CudaIpcMapping
    def __init__(self, num_bytes: _Optional[int] = ..., file: _Optional[_Union[FileMapping, _Mapping]] = ..., cuda_ipc: _Optional[_Union[CudaIpcMapping, _Mapping]] = ...) -> None: ...

class FileMapping(_message.Message):
    __slots__ = ("path", "huge_pages")
    PATH_FIELD_NUMBER: _ClassVar[int]
    HUGE_PAGES_FIELD_NUMBER: _ClassVar[int]
    path: str
    huge_pages: bool
    def __init__(self, path: _Optional[str] = ..., huge_pages: bool = ...) -> None: ...

class CudaIpcMapping(_message.Message):
    __slots__ = ("device_index", "device_uuid", "handle", "offset_bytes", "ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required")
    DEVICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    REF_COUNTER_HANDLE_FIELD_NUMBER: _ClassVar[int]
    REF_COUNTER_OFFSET_FIELD_NUMBER: _ClassVar[int]
    EVENT_HANDLE_FIELD_NUMBER: _ClassVar[int]
    EVENT_SYNC_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    device_index: int
    device_uuid: str
    handle: bytes
    offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool
    def __init__(self, device_index: _Optional[int] = ..., device_uuid: _Optional[str] = ..., handle: _Optional[bytes] = ..., offset_bytes: _Optional[int] = ..., ref_counter_handle: _Optional[bytes] = ..., ref_counter_offset: _Optional[int] = ..., event_handle: _Optional[bytes] = ..., event_sync_required: bool = ...) -> None: ...

class PoolDescription(_message.Message):
    __slots__ = ("fingerprint", "num_blocks", "groups", "layout", "layers", "mappings", "hash_scheme", "hash_seed", "hash_block_size", "max_model_len", "enable_prefix_caching", "scheduler_block_size", "decode_context_parallel_size", "prefill_context_parallel_size", "tensor_parallel_size", "tensor_parallel_rank", "model", "weights_revision")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAPPINGS_FIELD_NUMBER: _ClassVar[int]
    HASH_SCHEME_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    HASH_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    ENABLE_PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CONTEXT_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_REVISION_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    num_blocks: int
    groups: _containers.RepeatedCompositeFieldContainer[KVCacheGroup]
    layout: PoolLayout
    layers: _containers.RepeatedCompositeFieldContainer[LayerLayout]
    mappings: _containers.RepeatedCompositeFieldContainer[PoolMapping]
    hash_scheme: str
    hash_seed: str
    hash_block_size: int
    max_model_len: int
    enable_prefix_caching: bool
    scheduler_block_size: int
    decode_context_parallel_size: int
    prefill_context_parallel_size: int
    tensor_parallel_size: int
    tensor_parallel_rank: int
    model: str
    weights_revision: str
    def __init__(self, fingerprint: _Optional[str] = ..., num_blocks: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[KVCacheGroup, _Mapping]]] = ..., layout: _Optional[_Union[PoolLayout, str]] = ..., layers: _Optional[_Iterable[_Union[LayerLayout, _Mapping]]] = ..., mappings: _Optional[_Iterable[_Union[PoolMapping, _Mapping]]] = ..., hash_scheme: _Optional[str] = ..., hash_seed: _Optional[str] = ..., hash_block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., enable_prefix_caching: bool = ..., scheduler_block_size: _Optional[int] = ..., decode_context_parallel_size: _Optional[int] = ..., prefill_context_parallel_size: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., tensor_parallel_rank: _Optional[int] = ..., model: _Optional[str] = ..., weights_revision: _Optional[str] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("reason", "retryable", "field", "current_epoch", "expected_op_seq", "took_op_seq")
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    CURRENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_OP_SEQ_FIELD_NUMBER: _ClassVar[int]
    TOOK_OP_SEQ_FIELD_NUMBER: _ClassVar[int]
    reason: str
    retryable: bool
    field: str
    current_epoch: str
    expected_op_seq: int
    took_op_seq: bool
    def __init__(self, reason: _Optional[str] = ..., retryable: bool = ..., field: _Optional[str] = ..., current_epoch: _Optional[str] = ..., expected_op_seq: _Optional[int] = ..., took_op_seq: bool = ...) -> None: ...
