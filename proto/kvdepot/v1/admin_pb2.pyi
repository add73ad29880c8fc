from kvdepot.v1 import cache_pb2 as _cache_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_STATE_UNSPECIFIED: _ClassVar[SessionState]
    SESSION_STATE_OPEN: _ClassVar[SessionState]
    SESSION_STATE_DEPARTED: _ClassVar[SessionState]

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_WAITING: _ClassVar[RequestState]
    REQUEST_STATE_RUNNING: _ClassVar[RequestState]
    REQUEST_STATE_PREEMPTED: _ClassVar[RequestState]

class TransferDirection(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_DIRECTION_UNSPECIFIED: _ClassVar[TransferDirection]
    TRANSFER_DIRECTION_OUT: _ClassVar[TransferDirection]
    TRANSFER_DIRECTION_IN: _ClassVar[TransferDirection]
SESSION_STATE_UNSPECIFIED: SessionState
SESSION_STATE_OPEN: SessionState
SESSION_STATE_DEPARTED: SessionState
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_WAITING: RequestState
REQUEST_STATE_RUNNING: RequestState
REQUEST_STATE_PREEMPTED: RequestState
TRANSFER_DIRECTION_UNSPECIFIED: TransferDirection
TRANSFER_DIRECTION_OUT: TransferDirection
TRANSFER_DIRECTION_IN: TransferDirection

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BlockStates(_message.Message):
    __slots__ = ("live", "cached", "quarantined", "free", "pinned", "in_transfer")
    LIVE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    IN_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    live: int
    cached: int
    quarantined: int
    free: int
    pinned: int
    in_transfer: int
    def __init__(self, live: _Optional[int] = ..., cached: _Optional[int] = ..., quarantined: _Optional[int] = ..., free: _Optional[int] = ..., pinned: _Optional[int] = ..., in_transfer: _Optional[int] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("epoch", "uptime_seconds", "num_blocks", "blocks", "usage", "num_sessions", "num_requests", "prefix_cache_queries", "prefix_cache_hits", "preempted_queries", "preempted_hits", "evictions", "generation", "next_event_sequence", "pulled_bytes", "num_event_subscribers", "num_departed_sessions", "num_workers", "reset_pending", "num_transfers", "num_imports")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_HITS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NEXT_EVENT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PULLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_EVENT_SUBSCRIBERS_FIELD_NUMBER: _ClassVar[int]
    NUM_DEPARTED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    RESET_PENDING_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    NUM_IMPORTS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    uptime_seconds: float
    num_blocks: int
    blocks: BlockStates
    usage: float
    num_sessions: int
    num_requests: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preempted_queries: int
    preempted_hits: int
    evictions: int
    generation: int
    next_event_sequence: int
    pulled_bytes: int
    num_event_subscribers: int
    num_departed_sessions: int
    num_workers: int
    reset_pending: bool
    num_transfers: int
    num_imports: int
    def __init__(self, epoch: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., num_blocks: _Optional[int] = ..., blocks: _Optional[_Union[BlockStates, _Mapping]] = ..., usage: _Optional[float] = ..., num_sessions: _Optional[int] = ..., num_requests: _Optional[int] = ..., prefix_cache_queries: _Optional[int] = ..., prefix_cache_hits: _Optional[int] = ..., preempted_queries: _Optional[int] = ..., preempted_hits: _Optional[int] = ..., evictions: _Optional[int] = ..., generation: _Optional[int] = ..., next_event_sequence: _Optional[int] = ..., pulled_bytes: _Optional[int] = ..., num_event_subscribers: _Optional[int] = ..., num_departed_sessions: _Optional[int] = ..., num_workers: _Optional[int] = ..., reset_pending: bool = ..., num_transfers: _Optional[int] = ..., num_imports: _Optional[int] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("session_id", "name", "state", "age_seconds", "lease_ttl_seconds", "lease_remaining_seconds", "num_requests", "num_tokens", "num_blocks", "num_quarantined_blocks", "num_tickets", "num_workers", "step", "completed_step")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_REMAINING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TICKETS_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_STEP_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    name: str
    state: SessionState
    age_seconds: float
    lease_ttl_seconds: float
    lease_remaining_seconds: float
    num_requests: int
    num_tokens: int
    num_blocks: int
    num_quarantined_blocks: int
    num_tickets: int
    num_workers: int
    step: int
    completed_step: int
    def __init__(self, session_id: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[_Union[SessionState, str]] = ..., age_seconds: _Optional[float] = ..., lease_ttl_seconds: _Optional[float] = ..., lease_remaining_seconds: _Optional[float] = ..., num_requests: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_quarantined_blocks: _Optional[int] = ..., num_tickets: _Optional[int] = ..., num_workers: _Optional[int] = ..., step: _Optional[int] = ..., completed_step: _Optional[int] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "epoch")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    epoch: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ..., epoch: _Optional[str] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("session_id", "page_size", "page_token")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    page_size: int
    page_token: str
    def __init__(self, session_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class RequestInfo(_message.Message):
    __slots__ = ("session_id", "request_id", "handle", "state", "num_tokens", "num_prompt_tokens", "num_computed_tokens", "num_blocks", "num_preemptions", "lora_name", "outlived_reset")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    OUTLIVED_RESET_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    handle: int
    state: RequestState
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_preemptions: int
    lora_name: str
    outlived_reset: bool
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., handle: _Optional[int] = ..., state: _Optional[_Union[RequestState, str]] = ..., num_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., lora_name: _Optional[str] = ..., outlived_reset: bool = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "next_page_token", "epoch")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestInfo]
    next_page_token: str
    epoch: str
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., epoch: _Optional[str] = ...) -> None: ...

class ListTransfersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TransferInfo(_message.Message):
    __slots__ = ("transfer", "name", "direction", "age_seconds", "lease_remaining_seconds", "num_blocks", "num_bytes", "num_blocks_done", "num_bytes_done")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_REMAINING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_DONE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    transfer: str
    name: str
    direction: TransferDirection
    age_seconds: float
    lease_remaining_seconds: float
    num_blocks: int
    num_bytes: int
    num_blocks_done: int
    num_bytes_done: int
    def __init__(self, transfer: _Optional[str] = ..., name: _Optional[str] = ..., direction: _Optional[_Union[TransferDirection, str]] = ..., age_seconds: _Optional[float] = ..., lease_remaining_seconds: _Optional[float] = ..., num_blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_blocks_done: _Optional[int] = ..., num_bytes_done: _Optional[int] = ...) -> None: ...

class ListTransfersResponse(_message.Message):
    __slots__ = ("transfers", "epoch")
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    transfers: _containers.RepeatedCompositeFieldContainer[TransferInfo]
    epoch: str
    def __init__(self, transfers: _Optional[_Iterable[_Union[TransferInfo, _Mapping]]] = ..., epoch: _Optional[str] = ...) -> None: ...

class EvictBlocksRequest(_message.Message):
    __slots__ = ("block_ids",)
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class EvictBlocksResponse(_message.Message):
    __slots__ = ("num_evicted", "epoch")
    NUM_EVICTED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    num_evicted: int
    epoch: str
    def __init__(self, num_evicted: _Optional[int] = ..., epoch: _Optional[str] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditResponse(_message.Message):
    __slots__ = ("violations", "num_blocks_checked", "num_requests_checked", "holders")
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_CHECKED_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_CHECKED_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    violations: _containers.RepeatedScalarFieldContainer[str]
    num_blocks_checked: int
    num_requests_checked: int
    holders: _containers.RepeatedCompositeFieldContainer[_cache_pb2.BlockHolder]
    def __init__(self, violations: _Optional[_Iterable[str]] = ..., num_blocks_checked: _Optional[int] = ..., num_requests_checked: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[_cache_pb2.BlockHolder, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_sessions", "epoch")
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    num_sessions: int
    epoch: str
    def __init__(self, num_sessions: _Optional[int] = ..., epoch: _Optional[str] = ...) -> None: ...
