from kvdepot.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_OK: _ClassVar[Outcome]
    OUTCOME_NO_FIT: _ClassVar[Outcome]
    OUTCOME_HIT_CHANGED: _ClassVar[Outcome]
    OUTCOME_NOT_ATTEMPTED: _ClassVar[Outcome]
    OUTCOME_UNKNOWN_HANDLE: _ClassVar[Outcome]
    OUTCOME_INVALID: _ClassVar[Outcome]
    OUTCOME_NO_BUDGET: _ClassVar[Outcome]
    OUTCOME_RESETTING: _ClassVar[Outcome]

class NoFitReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NO_FIT_REASON_UNSPECIFIED: _ClassVar[NoFitReason]
    NO_FIT_REASON_BLOCKS: _ClassVar[NoFitReason]
    NO_FIT_REASON_HIT_OF_THIS_STEP: _ClassVar[NoFitReason]

class FreeMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FREE_MODE_UNSPECIFIED: _ClassVar[FreeMode]
    FREE_MODE_FINISH: _ClassVar[FreeMode]
    FREE_MODE_PREEMPT: _ClassVar[FreeMode]
    FREE_MODE_DETACH: _ClassVar[FreeMode]

class ResetMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESET_MODE_UNSPECIFIED: _ClassVar[ResetMode]
    RESET_MODE_REFUSE: _ClassVar[ResetMode]
    RESET_MODE_DRAIN: _ClassVar[ResetMode]
    RESET_MODE_FORCE: _ClassVar[ResetMode]

class OnNoFit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_NO_FIT_UNSPECIFIED: _ClassVar[OnNoFit]
    ON_NO_FIT_STOP: _ClassVar[OnNoFit]
    ON_NO_FIT_CONTINUE: _ClassVar[OnNoFit]

class OperationKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_KIND_UNSPECIFIED: _ClassVar[OperationKind]
    OPERATION_KIND_ADMIT: _ClassVar[OperationKind]
    OPERATION_KIND_GROW: _ClassVar[OperationKind]
    OPERATION_KIND_CACHE: _ClassVar[OperationKind]
    OPERATION_KIND_FREE: _ClassVar[OperationKind]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_OK: Outcome
OUTCOME_NO_FIT: Outcome
OUTCOME_HIT_CHANGED: Outcome
OUTCOME_NOT_ATTEMPTED: Outcome
OUTCOME_UNKNOWN_HANDLE: Outcome
OUTCOME_INVALID: Outcome
OUTCOME_NO_BUDGET: Outcome
OUTCOME_RESETTING: Outcome
NO_FIT_REASON_UNSPECIFIED: NoFitReason
NO_FIT_REASON_BLOCKS: NoFitReason
NO_FIT_REASON_HIT_OF_THIS_STEP: NoFitReason
FREE_MODE_UNSPECIFIED: FreeMode
FREE_MODE_FINISH: FreeMode
FREE_MODE_PREEMPT: FreeMode
FREE_MODE_DETACH: FreeMode
RESET_MODE_UNSPECIFIED: ResetMode
RESET_MODE_REFUSE: ResetMode
RESET_MODE_DRAIN: ResetMode
RESET_MODE_FORCE: ResetMode
ON_NO_FIT_UNSPECIFIED: OnNoFit
ON_NO_FIT_STOP: OnNoFit
ON_NO_FIT_CONTINUE: OnNoFit
OPERATION_KIND_UNSPECIFIED: OperationKind
OPERATION_KIND_ADMIT: OperationKind
OPERATION_KIND_GROW: OperationKind
OPERATION_KIND_CACHE: OperationKind
OPERATION_KIND_FREE: OperationKind

class OpenSessionRequest(_message.Message):
    __slots__ = ("name", "fingerprint", "lease_ttl_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    lease_ttl_seconds: float
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., lease_ttl_seconds: _Optional[float] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session_id", "epoch", "pool", "reply_window", "lease_ttl_seconds", "max_step_operations")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLY_WINDOW_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: str
    pool: _types_pb2.PoolDescription
    reply_window: int
    lease_ttl_seconds: float
    max_step_operations: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[str] = ..., pool: _Optional[_Union[_types_pb2.PoolDescription, _Mapping]] = ..., reply_window: _Optional[int] = ..., lease_ttl_seconds: _Optional[float] = ..., max_step_operations: _Optional[int] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("session_id", "epoch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: str
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[str] = ...) -> None: ...

class KeepAliveResponse(_message.Message):
    __slots__ = ("epoch", "lease_ttl_seconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    lease_ttl_seconds: float
    def __init__(self, epoch: _Optional[str] = ..., lease_ttl_seconds: _Optional[float] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("context",)
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    context: _types_pb2.CallContext
    def __init__(self, context: _Optional[_Union[_types_pb2.CallContext, _Mapping]] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("num_requests_freed", "epoch")
    NUM_REQUESTS_FREED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    num_requests_freed: int
    epoch: str
    def __init__(self, num_requests_freed: _Optional[int] = ..., epoch: _Optional[str] = ...) -> None: ...

class RequestContent(_message.Message):
    __slots__ = ("token_offset", "tokens", "extra_keys", "num_prompt_tokens", "skip_reading_prefix_cache")
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SKIP_READING_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    token_offset: int
    tokens: bytes
    extra_keys: _types_pb2.ExtraKeys
    num_prompt_tokens: int
    skip_reading_prefix_cache: bool
    def __init__(self, token_offset: _Optional[int] = ..., tokens: _Optional[bytes] = ..., extra_keys: _Optional[_Union[_types_pb2.ExtraKeys, _Mapping]] = ..., num_prompt_tokens: _Optional[int] = ..., skip_reading_prefix_cache: bool = ...) -> None: ...

class GetComputedBlocksRequest(_message.Message):
    __slots__ = ("context", "request_id", "content")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    context: _types_pb2.CallContext
    request_id: str
    content: RequestContent
    def __init__(self, context: _Optional[_Union[_types_pb2.CallContext, _Mapping]] = ..., request_id: _Optional[str] = ..., content: _Optional[_Union[RequestContent, _Mapping]] = ...) -> None: ...

class GetComputedBlocksResponse(_message.Message):
    __slots__ = ("num_computed_tokens", "blocks", "handle", "epoch", "num_uncached_common_prefix_tokens")
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCACHED_COMMON_PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_computed_tokens: int
    blocks: _containers.RepeatedCompositeFieldContainer[_types_pb2.BlockIds]
    handle: int
    epoch: str
    num_uncached_common_prefix_tokens: int
    def __init__(self, num_computed_tokens: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[_types_pb2.BlockIds, _Mapping]]] = ..., handle: _Optional[int] = ..., epoch: _Optional[str] = ..., num_uncached_common_prefix_tokens: _Optional[int] = ...) -> None: ...

class SlotRequest(_message.Message):
    __slots__ = ("request_id", "content", "num_computed_tokens", "num_new_tokens", "max_new_tokens", "new_tokens_alignment", "num_new_computed_tokens", "lookup", "num_lookahead_tokens", "num_external_computed_tokens", "delay_cache_blocks", "full_sequence_must_fit", "reserved_blocks", "has_scheduled_reqs", "num_encoder_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKENS_ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKAHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXTERNAL_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DELAY_CACHE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FULL_SEQUENCE_MUST_FIT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HAS_SCHEDULED_REQS_FIELD_NUMBER: _ClassVar[int]
    NUM_ENCODER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    content: RequestContent
    num_computed_tokens: int
    num_new_tokens: int
    max_new_tokens: int
    new_tokens_alignment: int
    num_new_computed_tokens: int
    lookup: bool
    num_lookahead_tokens: int
    num_external_computed_tokens: int
    delay_cache_blocks: bool
    full_sequence_must_fit: bool
    reserved_blocks: int
    has_scheduled_reqs: bool
    num_encoder_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., content: _Optional[_Union[RequestContent, _Mapping]] = ..., num_computed_tokens: _Optional[int] = ..., num_new_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., new_tokens_alignment: _Optional[int] = ..., num_new_computed_tokens: _Optional[int] = ..., lookup: bool = ..., num_lookahead_tokens: _Optional[int] = ..., num_external_computed_tokens: _Optional[int] = ..., delay_cache_blocks: bool = ..., full_sequence_must_fit: bool = ..., reserved_blocks: _Optional[int] = ..., has_scheduled_reqs: bool = ..., num_encoder_tokens: _Optional[int] = ...) -> None: ...

class SessionHold(_message.Message):
    __slots__ = ("session_id", "name", "num_blocks", "departed")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEPARTED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    name: str
    num_blocks: int
    departed: bool
    def __init__(self, session_id: _Optional[str] = ..., name: _Optional[str] = ..., num_blocks: _Optional[int] = ..., departed: bool = ...) -> None: ...

class NoFit(_message.Message):
    __slots__ = ("needed_blocks", "free_blocks", "reserved_blocks", "watermark_blocks", "holders", "reason", "pinned_blocks", "in_transfer_blocks")
    NEEDED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IN_TRANSFER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    needed_blocks: int
    free_blocks: int
    reserved_blocks: int
    watermark_blocks: int
    holders: _containers.RepeatedCompositeFieldContainer[SessionHold]
    reason: NoFitReason
    pinned_blocks: int
    in_transfer_blocks: int
    def __init__(self, needed_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., watermark_blocks: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[SessionHold, _Mapping]]] = ..., reason: _Optional[_Union[NoFitReason, str]] = ..., pinned_blocks: _Optional[int] = ..., in_transfer_blocks: _Optional[int] = ...) -> None: ...

class SlotResult(_message.Message):
    __slots__ = ("outcome", "num_new_computed_tokens", "num_new_tokens", "hit_blocks", "new_blocks", "handle", "no_fit")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NO_FIT_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    num_new_computed_tokens: int
    num_new_tokens: int
    hit_blocks: _containers.RepeatedCompositeFieldContainer[_types_pb2.BlockIds]
    new_blocks: _containers.RepeatedCompositeFieldContainer[_types_pb2.BlockIds]
    handle: int
    no_fit: NoFit
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., num_new_computed_tokens: _Optional[int] = ..., num_new_tokens: _Optional[int] = ..., hit_blocks: _Optional[_Iterable[_Union[_types_pb2.BlockIds, _Mapping]]] = ..., new_blocks: _Optional[_Iterable[_Union[_types_pb2.BlockIds, _Mapping]]] = ..., handle: _Optional[int] = ..., no_fit: _Optional[_Union[NoFit, _Mapping]] = ...) -> None: ...

class AllocateSlotsRequest(_message.Message):
    __slots__ = ("context", "slots")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    context: _types_pb2.CallContext
    slots: SlotRequest
    def __init__(self, context: _Optional[_Union[_types_pb2.CallContext, _Mapping]] = ..., slots: _Optional[_Union[SlotRequest, _Mapping]] = ...) -> None: ...

class AllocateSlotsResponse(_message.Message):
    __slots__ = ("result", "epoch")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    result: SlotResult
    epoch: str
    def __init__(self, result: _Optional[_Union[SlotResult, _Mapping]] = ..., epoch: _Optional[str] = ...) -> None: ...

class CacheBlocksRequest(_message.Message):
    __slots__ = ("context", "request_id", "content", "num_computed_tokens")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    context: _types_pb2.CallContext
    request_id: str
    content: RequestContent
    num_computed_tokens: int
    def __init__(self, context: _Optional[_Union[_types_pb2.CallContext, _Mapping]] = ..., request_id: _Optional[str] = ..., content: _Optional[_Union[RequestContent, _Mapping]] = ..., num_computed_tokens: _Optional[int] = ...) -> None: ...

class CacheBlocksResponse(_message.Message):
    __slots__ = ("known", "epoch")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    known: bool
    epoch: str
    def __init__(self, known: bool = ..., epoch: _Optional[str] = ...) -> None: ...

class FreeRequest(_message.Message):
    __slots__ = ("context", "request_id", "mode", "did_not_run")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    DID_NOT_RUN_FIELD_NUMBER: _ClassVar[int]
    context: _types_pb2.CallContext
    request_id: str
    mode: FreeMode
    did_not_run: bool
    def __init__(self, context: _Optional[_Union[_types_pb2.CallContext, _Mapping]] = ..., request_id: _Optional[str] = ..., mode: _Optional[_Union[FreeMode, str]] = ..., did_not_run: bool = ...) -> None: ...

class FreeResponse(_message.Message):
    __slots__ = ("known", "ticket", "epoch")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    known: bool
    ticket: int
    epoch: str
    def __init__(self, known: bool = ..., ticket: _Optional[int] = ..., epoch: _Optional[str] = ...) -> None: ...

class ReturnBlocksRequest(_message.Message):
    __slots__ = ("context", "ticket")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    context: _types_pb2.CallContext
    ticket: int
    def __init__(self, context: _Optional[_Union[_types_pb2.CallContext, _Mapping]] = ..., ticket: _Optional[int] = ...) -> None: ...

class ReturnBlocksResponse(_message.Message):
    __slots__ = ("num_blocks", "epoch")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    epoch: str
    def __init__(self, num_blocks: _Optional[int] = ..., epoch: _Optional[str] = ...) -> None: ...

class ResetScope(_message.Message):
    __slots__ = ("lora_name", "cache_salt")
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    lora_name: str
    cache_salt: str
    def __init__(self, lora_name: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class BlockHolder(_message.Message):
    __slots__ = ("session_id", "session_name", "request_id", "ticket", "num_blocks", "transfer")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    session_name: str
    request_id: str
    ticket: int
    num_blocks: int
    transfer: str
    def __init__(self, session_id: _Optional[str] = ..., session_name: _Optional[str] = ..., request_id: _Optional[str] = ..., ticket: _Optional[int] = ..., num_blocks: _Optional[int] = ..., transfer: _Optional[str] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("context", "mode", "scope", "deadline_seconds", "drain_id")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_ID_FIELD_NUMBER: _ClassVar[int]
    context: _types_pb2.CallContext
    mode: ResetMode
    scope: ResetScope
    deadline_seconds: float
    drain_id: int
    def __init__(self, context: _Optional[_Union[_types_pb2.CallContext, _Mapping]] = ..., mode: _Optional[_Union[ResetMode, str]] = ..., scope: _Optional[_Union[ResetScope, _Mapping]] = ..., deadline_seconds: _Optional[float] = ..., drain_id: _Optional[int] = ...) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("generation", "epoch", "done", "holders", "drain_id", "abandoned", "num_blocks_cleared")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_ID_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_CLEARED_FIELD_NUMBER: _ClassVar[int]
    generation: int
    epoch: str
    done: bool
    holders: _containers.RepeatedCompositeFieldContainer[BlockHolder]
    drain_id: int
    abandoned: bool
    num_blocks_cleared: int
    def __init__(self, generation: _Optional[int] = ..., epoch: _Optional[str] = ..., done: bool = ..., holders: _Optional[_Iterable[_Union[BlockHolder, _Mapping]]] = ..., drain_id: _Optional[int] = ..., abandoned: bool = ..., num_blocks_cleared: _Optional[int] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("kind", "count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: OperationKind
    count: int
    def __init__(self, kind: _Optional[_Union[OperationKind, str]] = ..., count: _Optional[int] = ...) -> None: ...

class GrowColumns(_message.Message):
    __slots__ = ("handles", "num_computed_tokens", "num_new_tokens", "token_offsets", "token_counts", "tokens", "num_lookahead_tokens")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKAHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    num_computed_tokens: bytes
    num_new_tokens: bytes
    token_offsets: bytes
    token_counts: bytes
    tokens: bytes
    num_lookahead_tokens: int
    def __init__(self, handles: _Optional[bytes] = ..., num_computed_tokens: _Optional[bytes] = ..., num_new_tokens: _Optional[bytes] = ..., token_offsets: _Optional[bytes] = ..., token_counts: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., num_lookahead_tokens: _Optional[int] = ...) -> None: ...

class CacheColumns(_message.Message):
    __slots__ = ("handles", "num_computed_tokens")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    num_computed_tokens: bytes
    def __init__(self, handles: _Optional[bytes] = ..., num_computed_tokens: _Optional[bytes] = ...) -> None: ...

class FreeColumns(_message.Message):
    __slots__ = ("handles", "modes", "did_not_run")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    DID_NOT_RUN_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    modes: bytes
    did_not_run: bytes
    def __init__(self, handles: _Optional[bytes] = ..., modes: _Optional[bytes] = ..., did_not_run: _Optional[bytes] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("context", "runs", "on_no_fit", "token_budget", "admissions", "grow", "cache", "free")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    ON_NO_FIT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    ADMISSIONS_FIELD_NUMBER: _ClassVar[int]
    GROW_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    context: _types_pb2.CallContext
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    on_no_fit: OnNoFit
    token_budget: int
    admissions: _containers.RepeatedCompositeFieldContainer[SlotRequest]
    grow: GrowColumns
    cache: CacheColumns
    free: FreeColumns
    def __init__(self, context: _Optional[_Union[_types_pb2.CallContext, _Mapping]] = ..., runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., on_no_fit: _Optional[_Union[OnNoFit, str]] = ..., token_budget: _Optional[int] = ..., admissions: _Optional[_Iterable[_Union[SlotRequest, _Mapping]]] = ..., grow: _Optional[_Union[GrowColumns, _Mapping]] = ..., cache: _Optional[_Union[CacheColumns, _Mapping]] = ..., free: _Optional[_Union[FreeColumns, _Mapping]] = ...) -> None: ...

class BlockColumns(_message.Message):
    __slots__ = ("counts", "ids")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    counts: bytes
    ids: bytes
    def __init__(self, counts: _Optional[bytes] = ..., ids: _Optional[bytes] = ...) -> None: ...

class GrowResults(_message.Message):
    __slots__ = ("outcomes", "new_blocks")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    new_blocks: _containers.RepeatedCompositeFieldContainer[BlockColumns]
    def __init__(self, outcomes: _Optional[bytes] = ..., new_blocks: _Optional[_Iterable[_Union[BlockColumns, _Mapping]]] = ...) -> None: ...

class CacheResults(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    def __init__(self, outcomes: _Optional[bytes] = ...) -> None: ...

class FreeResults(_message.Message):
    __slots__ = ("outcomes", "tickets")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    tickets: bytes
    def __init__(self, outcomes: _Optional[bytes] = ..., tickets: _Optional[bytes] = ...) -> None: ...

class OperationError(_message.Message):
    __slots__ = ("index", "reason", "message", "code", "field", "retryable")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    index: int
    reason: str
    message: str
    code: int
    field: str
    retryable: bool
    def __init__(self, index: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., code: _Optional[int] = ..., field: _Optional[str] = ..., retryable: bool = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("op_seq", "admissions", "grow", "cache", "free", "no_fit", "errors", "epoch", "free_blocks")
    OP_SEQ_FIELD_NUMBER: _ClassVar[int]
    ADMISSIONS_FIELD_NUMBER: _ClassVar[int]
    GROW_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    NO_FIT_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    op_seq: int
    admissions: _containers.RepeatedCompositeFieldContainer[SlotResult]
    grow: GrowResults
    cache: CacheResults
    free: FreeResults
    no_fit: NoFit
    errors: _containers.RepeatedCompositeFieldContainer[OperationError]
    epoch: str
    free_blocks: int
    def __init__(self, op_seq: _Optional[int] = ..., admissions: _Optional[_Iterable[_Union[SlotResult, _Mapping]]] = ..., grow: _Optional[_Union[GrowResults, _Mapping]] = ..., cache: _Optional[_Union[CacheResults, _Mapping]] = ..., free: _Optional[_Union[FreeResults, _Mapping]] = ..., no_fit: _Optional[_Union[NoFit, _Mapping]] = ..., errors: _Optional[_Iterable[_Union[OperationError, _Mapping]]] = ..., epoch: _Optional[str] = ..., free_blocks: _Optional[int] = ...) -> None: ...
