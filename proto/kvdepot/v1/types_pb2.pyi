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

class PoolLayout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOL_LAYOUT_UNSPECIFIED: _ClassVar[PoolLayout]
    POOL_LAYOUT_BLOCK: _ClassVar[PoolLayout]
    POOL_LAYOUT_LAYER: _ClassVar[PoolLayout]
SPEC_KIND_UNSPECIFIED: SpecKind
SPEC_KIND_FULL_ATTENTION: SpecKind
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
    __slots__ = ("name", "offset_bytes", "block_stride_bytes", "group")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset_bytes: int
    block_stride_bytes: int
    group: int
    def __init__(self, name: _Optional[str] = ..., offset_bytes: _Optional[int] = ..., block_stride_bytes: _Optional[int] = ..., group: _Optional[int] = ...) -> None: ...

class KVCacheGroup(_message.Message):
    __slots__ = ("kind", "block_size", "num_kv_heads", "head_size", "dtype", "page_size_bytes", "layer_names")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYER_NAMES_FIELD_NUMBER: _ClassVar[int]
    kind: SpecKind
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    page_size_bytes: int
    layer_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[_Union[SpecKind, str]] = ..., block_size: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_size: _Optional[int] = ..., dtype: _Optional[str] = ..., page_size_bytes: _Optional[int] = ..., layer_names: _Optional[_Iterable[str]] = ...) -> None: ...

class PoolDescription(_message.Message):
    __slots__ = ("fingerprint", "num_blocks", "groups", "layout", "layers", "mapping_path", "mapping_bytes", "hash_scheme", "hash_seed", "hash_block_size", "max_model_len", "enable_prefix_caching")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAPPING_PATH_FIELD_NUMBER: _ClassVar[int]
    MAPPING_BYTES_FIELD_NUMBER: _ClassVar[int]
    HASH_SCHEME_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    HASH_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    ENABLE_PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    num_blocks: int
    groups: _containers.RepeatedCompositeFieldContainer[KVCacheGroup]
    layout: PoolLayout
    layers: _containers.RepeatedCompositeFieldContainer[LayerLayout]
    mapping_path: str
    mapping_bytes: int
    hash_scheme: str
    hash_seed: str
    hash_block_size: int
    max_model_len: int
    enable_prefix_caching: bool
    def __init__(self, fingerprint: _Optional[str] = ..., num_blocks: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[KVCacheGroup, _Mapping]]] = ..., layout: _Optional[_Union[PoolLayout, str]] = ..., layers: _Optional[_Iterable[_Union[LayerLayout, _Mapping]]] = ..., mapping_path: _Optional[str] = ..., mapping_bytes: _Optional[int] = ..., hash_scheme: _Optional[str] = ..., hash_seed: _Optional[str] = ..., hash_block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., enable_prefix_caching: bool = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("reason", "retryable", "field", "current_epoch", "expected_op_seq")
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    CURRENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_OP_SEQ_FIELD_NUMBER: _ClassVar[int]
    reason: str
    retryable: bool
    field: str
    current_epoch: str
    expected_op_seq: int
    def __init__(self, reason: _Optional[str] = ..., retryable: bool = ..., field: _Optional[str] = ..., current_epoch: _Optional[str] = ..., expected_op_seq: _Optional[int] = ...) -> None: ...
