"""Every unary call, as data: its method, its request, and how to read its reply.

The synchronous and the asyncio client send these; neither knows more of the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvclient import convert, reports
from kvclient.convert_pool import pool_description
from kvclient.description import PoolDescription
from kvclient.errors import FailedPrecondition
from kvclient.values import (
    Content,
    FreeMode,
    FreeResult,
    Hit,
    ResetMode,
    ResetResult,
    SlotRequest,
    SlotResult,
    Step,
    StepMark,
    StepResult,
    Tokens,
)
from kvdepot.v1 import admin_pb2, cache_pb2, transfer_pb2

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """One unary call. Those of a session have a ``context`` in their request."""

    service: str
    method: str
    request: Any
    read: Callable[[Any], Result]
    mark: StepMark | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """What a session is opened with; ``lease_ttl_s`` None: the server's default."""

    name: str = ""
    fingerprint: str = ""
    lease_ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """A session as the server opened it."""

    session_id: str
    epoch: str
    pool: PoolDescription
    reply_window: int
    lease_ttl_s: float
    step_operations_max: int


def client_closed() -> FailedPrecondition:
    """What a call of a closed client raises."""
    return FailedPrecondition("the client is closed", reason="CLIENT_CLOSED")


def _cache(
    method: str, request: Any, read: Callable[[Any], Result], mark: StepMark | None = None
) -> Call[Result]:
    return Call("KVCacheService", method, request, read, mark)


def open_session(opening: Opening) -> Call[Opened]:
    """OpenSession."""
    return _cache(
        "OpenSession",
        cache_pb2.OpenSessionRequest(
            name=opening.name,
            fingerprint=opening.fingerprint,
            lease_ttl_seconds=opening.lease_ttl_s,
        ),
        lambda reply: Opened(
            reply.session_id,
            reply.epoch,
            pool_description(reply.pool, reply.epoch),
            reply.reply_window,
            reply.lease_ttl_seconds,
            reply.max_step_operations,
        ),
    )


def keep_alive(session_id: str, epoch: str) -> Call[None]:
    """KeepAlive: none of the ordered calls, so it may overtake any."""
    return _cache(
        "KeepAlive",
        cache_pb2.KeepAliveRequest(session_id=session_id, epoch=epoch),
        lambda reply: None,
    )


def close_session() -> Call[int]:
    """CloseSession; answers the number of requests freed."""
    return _cache(
        "CloseSession", cache_pb2.CloseSessionRequest(), lambda reply: int(reply.num_requests_freed)
    )


def get_computed_blocks(
    request_id: str, content: Content | Tokens | None, mark: StepMark | None
) -> Call[Hit]:
    """GetComputedBlocks."""
    return _cache(
        "GetComputedBlocks",
        cache_pb2.GetComputedBlocksRequest(request_id=request_id, content=convert.content(content)),
        convert.hit,
        mark,
    )


def allocate_slots(slots: SlotRequest, mark: StepMark | None) -> Call[SlotResult]:
    """AllocateSlots."""
    return _cache(
        "AllocateSlots",
        cache_pb2.AllocateSlotsRequest(slots=convert.slot_request(slots)),
        lambda reply: convert.slot_result(reply.result),
        mark,
    )


def cache_blocks(
    request_id: str,
    num_computed_tokens: int,
    content: Content | Tokens | None,
    mark: StepMark | None,
) -> Call[bool]:
    """CacheBlocks; answers whether the request is known."""
    return _cache(
        "CacheBlocks",
        cache_pb2.CacheBlocksRequest(
            request_id=request_id,
            content=convert.content(content),
            num_computed_tokens=convert.uint32(num_computed_tokens, "num_computed_tokens"),
        ),
        lambda reply: bool(reply.known),
        mark,
    )


def free(
    request_id: str, mode: FreeMode, did_not_run: bool, mark: StepMark | None
) -> Call[FreeResult]:
    """Free."""
    return _cache(
        "Free",
        cache_pb2.FreeRequest(
            request_id=request_id,
            mode=int(mode),  # type: ignore[arg-type]
            did_not_run=did_not_run,
        ),
        lambda reply: FreeResult(reply.known, reply.ticket),
        mark,
    )


def return_blocks(ticket: int, mark: StepMark | None) -> Call[int]:
    """ReturnBlocks; answers the number of blocks."""
    return _cache(
        "ReturnBlocks",
        cache_pb2.ReturnBlocksRequest(ticket=convert.uint64(ticket, "ticket")),
        lambda reply: int(reply.num_blocks),
        mark,
    )


def reset_prefix_cache(
    mark: StepMark | None,
    *,
    mode: ResetMode,
    lora_name: str | None,
    cache_salt: str | None,
    deadline_s: float | None,
    drain_id: int,
) -> Call[ResetResult]:
    """ResetPrefixCache; with ``drain_id``, how that drain stands."""
    return _cache(
        "ResetPrefixCache",
        convert.reset_request(
            mode,
            lora_name=lora_name,
            cache_salt=cache_salt,
            deadline_s=deadline_s,
            drain_id=drain_id,
        ),
        convert.reset_result,
        mark,
    )


def step(step: Step, mark: StepMark | None) -> Call[StepResult]:
    """Step, unary or a message of StepStream."""
    return _cache("Step", convert.step_request(step), convert.step_result, mark)


def describe_pool() -> Call[PoolDescription]:
    """DescribePool."""
    return Call(
        "KVTransferService",
        "DescribePool",
        transfer_pb2.DescribePoolRequest(),
        lambda reply: pool_description(reply.pool, reply.epoch),
    )


def get_stats() -> Call[reports.Stats]:
    """GetStats."""
    return Call("KVAdminService", "GetStats", admin_pb2.GetStatsRequest(), reports.stats)


def audit() -> Call[reports.AuditReport]:
    """Audit."""
    return Call("KVAdminService", "Audit", admin_pb2.AuditRequest(), reports.audit_report)


def list_sessions() -> Call[tuple[reports.SessionInfo, ...]]:
    """ListSessions."""
    return Call(
        "KVAdminService", "ListSessions", admin_pb2.ListSessionsRequest(), reports.session_infos
    )


def list_requests(session_id: str, page_size: int, page_token: str) -> Call[reports.RequestPage]:
    """ListRequests, one page."""
    return Call(
        "KVAdminService",
        "ListRequests",
        admin_pb2.ListRequestsRequest(
            session_id=session_id,
            page_size=convert.uint32(page_size, "page_size"),
            page_token=page_token,
        ),
        reports.request_page,
    )


def list_transfers() -> Call[tuple[reports.TransferInfo, ...]]:
    """ListTransfers."""
    return Call(
        "KVAdminService", "ListTransfers", admin_pb2.ListTransfersRequest(), reports.transfer_infos
    )


def evict_blocks(block_ids: Iterable[int]) -> Call[int]:
    """EvictBlocks; answers how many had content."""
    return Call(
        "KVAdminService",
        "EvictBlocks",
        admin_pb2.EvictBlocksRequest(
            block_ids=[convert.uint32(block_id, "block_ids") for block_id in block_ids]
        ),
        lambda reply: int(reply.num_evicted),
    )


def drain() -> Call[int]:
    """Drain; answers how many sessions are open."""
    return Call(
        "KVAdminService",
        "Drain",
        admin_pb2.DrainRequest(),
        lambda reply: int(reply.num_sessions),
    )


def attach_worker(session_id: str, epoch: str, name: str) -> transfer_pb2.AttachWorkerRequest:
    """The request of AttachWorker."""
    return transfer_pb2.AttachWorkerRequest(session_id=session_id, epoch=epoch, name=name)
