from kvdepot.v1 import event_pb2 as _event_pb2
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

class TransferPath(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_PATH_UNSPECIFIED: _ClassVar[TransferPath]
    TRANSFER_PATH_MAPPING: _ClassVar[TransferPath]
    TRANSFER_PATH_NIXL: _ClassVar[TransferPath]
    TRANSFER_PATH_GRPC: _ClassVar[TransferPath]

class ImportStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IMPORT_STATUS_UNSPECIFIED: _ClassVar[ImportStatus]
    IMPORT_STATUS_IMPORTED: _ClassVar[ImportStatus]
    IMPORT_STATUS_PRESENT: _ClassVar[ImportStatus]
    IMPORT_STATUS_PENDING: _ClassVar[ImportStatus]
    IMPORT_STATUS_MISSING: _ClassVar[ImportStatus]
    IMPORT_STATUS_FAILED: _ClassVar[ImportStatus]
    IMPORT_STATUS_NO_FIT: _ClassVar[ImportStatus]
    IMPORT_STATUS_NOT_ATTEMPTED: _ClassVar[ImportStatus]
BLOCK_STATUS_UNSPECIFIED: BlockStatus
BLOCK_STATUS_READY: BlockStatus
BLOCK_STATUS_PENDING: BlockStatus
BLOCK_STATUS_MISSING: BlockStatus
TRANSFER_PATH_UNSPECIFIED: TransferPath
TRANSFER_PATH_MAPPING: TransferPath
TRANSFER_PATH_NIXL: TransferPath
TRANSFER_PATH_GRPC: TransferPath
IMPORT_STATUS_UNSPECIFIED: ImportStatus
IMPORT_STATUS_IMPORTED: ImportStatus
IMPORT_STATUS_PRESENT: ImportStatus
IMPORT_STATUS_PENDING: ImportStatus
IMPORT_STATUS_MISSING: ImportStatus
IMPORT_STATUS_FAILED: ImportStatus
IMPORT_STATUS_NO_FIT: ImportStatus
IMPORT_STATUS_NOT_ATTEMPTED: ImportStatus

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

class GroupHashes(_message.Message):
    __slots__ = ("group", "block_hashes")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    group: int
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, group: _Optional[int] = ..., block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("session_id", "epoch", "request_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: str
    request_id: str
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class OpenTransferRequest(_message.Message):
    __slots__ = ("fingerprint", "groups", "request", "lease_ttl_seconds", "name", "contents", "checksums")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    groups: _containers.RepeatedCompositeFieldContainer[GroupHashes]
    request: SessionRequest
    lease_ttl_seconds: float
    name: str
    contents: bool
    checksums: bool
    def __init__(self, fingerprint: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[GroupHashes, _Mapping]]] = ..., request: _Optional[_Union[SessionRequest, _Mapping]] = ..., lease_ttl_seconds: _Optional[float] = ..., name: _Optional[str] = ..., contents: bool = ..., checksums: bool = ...) -> None: ...

class ContentRun(_message.Message):
    __slots__ = ("num_blocks", "parent_hash", "token_ids", "extra_keys", "lora_id", "lora_name", "cache_salt")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    LORA_ID_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    parent_hash: bytes
    token_ids: bytes
    extra_keys: _containers.RepeatedCompositeFieldContainer[ExtraKeyRange]
    lora_id: int
    lora_name: str
    cache_salt: str
    def __init__(self, num_blocks: _Optional[int] = ..., parent_hash: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., extra_keys: _Optional[_Iterable[_Union[ExtraKeyRange, _Mapping]]] = ..., lora_id: _Optional[int] = ..., lora_name: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class ExtraKeyRange(_message.Message):
    __slots__ = ("first", "num_blocks", "keys")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    first: int
    num_blocks: int
    keys: _event_pb2.ExtraKeyList
    def __init__(self, first: _Optional[int] = ..., num_blocks: _Optional[int] = ..., keys: _Optional[_Union[_event_pb2.ExtraKeyList, _Mapping]] = ...) -> None: ...

class GroupBlocks(_message.Message):
    __slots__ = ("group", "statuses", "block_ids", "block_hashes", "contents", "checksums")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    group: int
    statuses: bytes
    block_ids: bytes
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    contents: _containers.RepeatedCompositeFieldContainer[ContentRun]
    checksums: bytes
    def __init__(self, group: _Optional[int] = ..., statuses: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., contents: _Optional[_Iterable[_Union[ContentRun, _Mapping]]] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class NixlRegion(_message.Message):
    __slots__ = ("kind", "device", "address", "nbytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    device: int
    address: int
    nbytes: int
    def __init__(self, kind: _Optional[str] = ..., device: _Optional[int] = ..., address: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class Reach(_message.Message):
    __slots__ = ("host_id", "data_address", "nixl_agent", "nixl_regions")
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NIXL_AGENT_FIELD_NUMBER: _ClassVar[int]
    NIXL_REGIONS_FIELD_NUMBER: _ClassVar[int]
    host_id: str
    data_address: str
    nixl_agent: bytes
    nixl_regions: _containers.RepeatedCompositeFieldContainer[NixlRegion]
    def __init__(self, host_id: _Optional[str] = ..., data_address: _Optional[str] = ..., nixl_agent: _Optional[bytes] = ..., nixl_regions: _Optional[_Iterable[_Union[NixlRegion, _Mapping]]] = ...) -> None: ...

class OpenTransferResponse(_message.Message):
    __slots__ = ("transfer_id", "epoch", "lease_ttl_seconds", "groups", "reach")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: str
    lease_ttl_seconds: float
    groups: _containers.RepeatedCompositeFieldContainer[GroupBlocks]
    reach: Reach
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[str] = ..., lease_ttl_seconds: _Optional[float] = ..., groups: _Optional[_Iterable[_Union[GroupBlocks, _Mapping]]] = ..., reach: _Optional[_Union[Reach, _Mapping]] = ...) -> None: ...

class RenewTransferRequest(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    def __init__(self, transfer_id: _Optional[str] = ...) -> None: ...

class RenewTransferResponse(_message.Message):
    __slots__ = ("epoch", "lease_ttl_seconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    lease_ttl_seconds: float
    def __init__(self, epoch: _Optional[str] = ..., lease_ttl_seconds: _Optional[float] = ...) -> None: ...

class CloseTransferRequest(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    def __init__(self, transfer_id: _Optional[str] = ...) -> None: ...

class CloseTransferResponse(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    def __init__(self, epoch: _Optional[str] = ...) -> None: ...

class PullBlocksRequest(_message.Message):
    __slots__ = ("transfer_id", "group", "positions", "checksums", "checksums_only")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_ONLY_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    group: int
    positions: bytes
    checksums: bool
    checksums_only: bool
    def __init__(self, transfer_id: _Optional[str] = ..., group: _Optional[int] = ..., positions: _Optional[bytes] = ..., checksums: bool = ..., checksums_only: bool = ...) -> None: ...

class PullBlocksResponse(_message.Message):
    __slots__ = ("first", "num_blocks", "data", "checksums")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    first: int
    num_blocks: int
    data: bytes
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first: _Optional[int] = ..., num_blocks: _Optional[int] = ..., data: _Optional[bytes] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class ImportBlocksRequest(_message.Message):
    __slots__ = ("peer", "groups", "request", "paths", "checksums", "deadline_seconds")
    PEER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    groups: _containers.RepeatedCompositeFieldContainer[GroupHashes]
    request: SessionRequest
    paths: _containers.RepeatedScalarFieldContainer[TransferPath]
    checksums: bool
    deadline_seconds: float
    def __init__(self, peer: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[GroupHashes, _Mapping]]] = ..., request: _Optional[_Union[SessionRequest, _Mapping]] = ..., paths: _Optional[_Iterable[_Union[TransferPath, str]]] = ..., checksums: bool = ..., deadline_seconds: _Optional[float] = ...) -> None: ...

class GroupImport(_message.Message):
    __slots__ = ("group", "statuses")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    group: int
    statuses: bytes
    def __init__(self, group: _Optional[int] = ..., statuses: _Optional[bytes] = ...) -> None: ...

class PathFailure(_message.Message):
    __slots__ = ("path", "reason")
    PATH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    path: TransferPath
    reason: str
    def __init__(self, path: _Optional[_Union[TransferPath, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class ImportBlocksResponse(_message.Message):
    __slots__ = ("epoch", "num_blocks", "num_bytes", "path", "done", "groups", "num_tokens", "failures", "missing_parents")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    MISSING_PARENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    num_blocks: int
    num_bytes: int
    path: TransferPath
    done: bool
    groups: _containers.RepeatedCompositeFieldContainer[GroupImport]
    num_tokens: int
    failures: _containers.RepeatedCompositeFieldContainer[PathFailure]
    missing_parents: _containers.RepeatedCompositeFieldContainer[GroupHashes]
    def __init__(self, epoch: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., path: _Optional[_Union[TransferPath, str]] = ..., done: bool = ..., groups: _Optional[_Iterable[_Union[GroupImport, _Mapping]]] = ..., num_tokens: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[PathFailure, _Mapping]]] = ..., missing_parents: _Optional[_Iterable[_Union[GroupHashes, _Mapping]]] = ...) -> None: ...
