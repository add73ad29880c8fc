from kvdepot.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RemovalReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REMOVAL_REASON_UNSPECIFIED: _ClassVar[RemovalReason]
    REMOVAL_REASON_EVICTED: _ClassVar[RemovalReason]
    REMOVAL_REASON_RESET: _ClassVar[RemovalReason]
REMOVAL_REASON_UNSPECIFIED: RemovalReason
REMOVAL_REASON_EVICTED: RemovalReason
REMOVAL_REASON_RESET: RemovalReason

class StreamEventsRequest(_message.Message):
    __slots__ = ("epoch", "from_sequence", "snapshot")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    from_sequence: int
    snapshot: bool
    def __init__(self, epoch: _Optional[str] = ..., from_sequence: _Optional[int] = ..., snapshot: bool = ...) -> None: ...

class BlockStored(_message.Message):
    __slots__ = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "lora_name", "extra_keys", "group", "spec_kind", "medium", "sliding_window")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LORA_ID_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SPEC_KIND_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    parent_block_hash: bytes
    token_ids: bytes
    block_size: int
    lora_id: int
    lora_name: str
    extra_keys: _containers.RepeatedCompositeFieldContainer[ExtraKeyList]
    group: int
    spec_kind: _types_pb2.SpecKind
    medium: str
    sliding_window: int
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., parent_block_hash: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., block_size: _Optional[int] = ..., lora_id: _Optional[int] = ..., lora_name: _Optional[str] = ..., extra_keys: _Optional[_Iterable[_Union[ExtraKeyList, _Mapping]]] = ..., group: _Optional[int] = ..., spec_kind: _Optional[_Union[_types_pb2.SpecKind, str]] = ..., medium: _Optional[str] = ..., sliding_window: _Optional[int] = ...) -> None: ...

class ExtraKeyList(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[ExtraKey]
    def __init__(self, keys: _Optional[_Iterable[_Union[ExtraKey, _Mapping]]] = ...) -> None: ...

class ExtraKey(_message.Message):
    __slots__ = ("text", "digest", "multimodal")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MULTIMODAL_FIELD_NUMBER: _ClassVar[int]
    text: str
    digest: bytes
    multimodal: MultimodalKey
    def __init__(self, text: _Optional[str] = ..., digest: _Optional[bytes] = ..., multimodal: _Optional[_Union[MultimodalKey, _Mapping]] = ...) -> None: ...

class MultimodalKey(_message.Message):
    __slots__ = ("identifier", "offset")
    IDENTIFIER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    identifier: str
    offset: int
    def __init__(self, identifier: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class BlockRemoved(_message.Message):
    __slots__ = ("block_hashes", "group", "medium", "reason")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    group: int
    medium: str
    reason: RemovalReason
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., group: _Optional[int] = ..., medium: _Optional[str] = ..., reason: _Optional[_Union[RemovalReason, str]] = ...) -> None: ...

class AllBlocksCleared(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("block_stored", "block_removed", "all_blocks_cleared")
    BLOCK_STORED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_REMOVED_FIELD_NUMBER: _ClassVar[int]
    ALL_BLOCKS_CLEARED_FIELD_NUMBER: _ClassVar[int]
    block_stored: BlockStored
    block_removed: BlockRemoved
    all_blocks_cleared: AllBlocksCleared
    def __init__(self, block_stored: _Optional[_Union[BlockStored, _Mapping]] = ..., block_removed: _Optional[_Union[BlockRemoved, _Mapping]] = ..., all_blocks_cleared: _Optional[_Union[AllBlocksCleared, _Mapping]] = ...) -> None: ...

class StreamEventsResponse(_message.Message):
    __slots__ = ("epoch", "first_sequence", "timestamp_seconds", "events", "snapshot", "snapshot_end")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    first_sequence: int
    timestamp_seconds: float
    events: _containers.RepeatedCompositeFieldContainer[Event]
    snapshot: bool
    snapshot_end: bool
    def __init__(self, epoch: _Optional[str] = ..., first_sequence: _Optional[int] = ..., timestamp_seconds: _Optional[float] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., snapshot: bool = ..., snapshot_end: bool = ...) -> None: ...
