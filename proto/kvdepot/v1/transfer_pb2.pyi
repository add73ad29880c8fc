from kvdepot.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATUS_UNSPECIFIED: _ClassVar[BlockStatus]
    BLOCK_STATUS_READY: _ClassVar[BlockStatus]
    BLOCK_STATUS_PENDING: _ClassVar[BlockStatus]
    BLOCK_STATUS_MISSING: _ClassVar[BlockStatus]
BLOCK_STATUS_UNSPECIFIED: BlockStatus
BLOCK_STATUS_READY: BlockStatus
BLOCK_STATUS_PENDING: BlockStatus
BLOCK_STATUS_MISSING: BlockStatus

class DescribePoolRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribePoolResponse(_message.Message):
    __slots__ = ("pool", "epoch")
    POOL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    pool: _types_pb2.PoolDescription
    epoch: str
    def __init__(self, pool: _Optional[_Union[_types_pb2.PoolDescription, _Mapping]] = ..., epoch: _Optional[str] = ...) -> None: ...

class AttachWorkerRequest(_message.Message):
    __slots__ = ("session_id", "epoch", "name")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: str
    name: str
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class AttachWorkerResponse(_message.Message):
    __slots__ = ("epoch", "heartbeat_seconds", "session_ended")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ENDED_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    heartbeat_seconds: float
    session_ended: bool
    def __init__(self, epoch: _Optional[str] = ..., heartbeat_seconds: _Optional[float] = ..., session_ended: bool = ...) -> None: ...

class PullBlocksRequest(_message.Message):
    __slots__ = ("fingerprint", "block_hashes", "group", "checksums")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    group: int
    checksums: bool
    def __init__(self, fingerprint: _Optional[str] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., group: _Optional[int] = ..., checksums: bool = ...) -> None: ...

class PullBlocksResponse(_message.Message):
    __slots__ = ("first_index", "statuses", "data", "checksums")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    statuses: _containers.RepeatedScalarFieldContainer[BlockStatus]
    data: bytes
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_index: _Optional[int] = ..., statuses: _Optional[_Iterable[_Union[BlockStatus, str]]] = ..., data: _Optional[bytes] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...
