from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BlockStates(_message.Message):
    __slots__ = ("live", "cached", "quarantined", "free")
    LIVE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    live: int
    cached: int
    quarantined: int
    free: int
    def __init__(self, live: _Optional[int] = ..., cached: _Optional[int] = ..., quarantined: _Optional[int] = ..., free: _Optional[int] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("epoch", "uptime_seconds", "num_blocks", "blocks", "usage", "num_sessions", "num_requests", "prefix_cache_queries", "prefix_cache_hits", "preempted_queries", "preempted_hits", "evictions", "generation", "next_event_sequence", "pulled_bytes", "num_event_subscribers")
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
    def __init__(self, epoch: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., num_blocks: _Optional[int] = ..., blocks: _Optional[_Union[BlockStates, _Mapping]] = ..., usage: _Optional[float] = ..., num_sessions: _Optional[int] = ..., num_requests: _Optional[int] = ..., prefix_cache_queries: _Optional[int] = ..., prefix_cache_hits: _Optional[int] = ..., preempted_queries: _Optional[int] = ..., preempted_hits: _Optional[int] = ..., evictions: _Optional[int] = ..., generation: _Optional[int] = ..., next_event_sequence: _Optional[int] = ..., pulled_bytes: _Optional[int] = ..., num_event_subscribers: _Optional[int] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditResponse(_message.Message):
    __slots__ = ("violations", "num_blocks_checked", "num_requests_checked")
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_CHECKED_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_CHECKED_FIELD_NUMBER: _ClassVar[int]
    violations: _containers.RepeatedScalarFieldContainer[str]
    num_blocks_checked: int
    num_requests_checked: int
    def __init__(self, violations: _Optional[_Iterable[str]] = ..., num_blocks_checked: _Optional[int] = ..., num_requests_checked: _Optional[int] = ...) -> None: ...
