"""Every unary call, as data: its method, its request, and how to read its reply.

The synchronous and the asyncio client send these; neither knows more of the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvclient import convert
from kvclient.values import (
    AuditReport,
    Content,
    FreeMode,
    FreeResult,
    Hit,
    PoolDescription,
    SlotRequest,
    SlotResult,
    Stats,
    Step,
    StepMark,
    StepResult,
    Tokens,
)
from kvdepot.v1 import admin_pb2, cache_pb2, event_pb2, transfer_pb2

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
class Opened:
    """A session as the server opened it."""

    session_id: str
    epoch: str
    pool: PoolDescription
    reply_window: int


def _cache(
    method: str, request: Any, read: Callable[[Any], Result], mark: StepMark | None = None
) -> Call[Result]:
    return Call("KVCacheService", method, request, read, mark)


def open_session(name: str, fingerprint: str) -> Call[Opened]:
    """OpenSession."""
    return _cache(
        "OpenSession",
        cache_pb2.OpenSessionRequest(name=name, fingerprint=fingerprint),
        lambda reply: Opened(
            reply.session_id,
            reply.epoch,
            convert.pool_description(reply.pool, reply.epoch),
            reply.reply_window,
        ),
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


def reset_prefix_cache(mark: StepMark | None) -> Call[int]:
    """ResetPrefixCache; answers the new generation."""
    return _cache(
        "ResetPrefixCache",
        cache_pb2.ResetPrefixCacheRequest(),
        lambda reply: int(reply.generation),
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
        lambda reply: convert.pool_description(reply.pool, reply.epoch),
    )


def get_stats() -> Call[Stats]:
    """GetStats."""
    return Call("KVAdminService", "GetStats", admin_pb2.GetStatsRequest(), convert.stats)


def audit() -> Call[AuditReport]:
    """Audit."""
    return Call("KVAdminService", "Audit", admin_pb2.AuditRequest(), convert.audit_report)


def pull_blocks(
    block_hashes: Sequence[bytes], group: int, checksums: bool, fingerprint: str
) -> transfer_pb2.PullBlocksRequest:
    """The request of PullBlocks."""
    return transfer_pb2.PullBlocksRequest(
        fingerprint=fingerprint,
        block_hashes=block_hashes,
        group=convert.uint32(group, "group"),
        checksums=checksums,
    )


def stream_events(
    from_sequence: int | None, epoch: str, snapshot: bool
) -> event_pb2.StreamEventsRequest:
    """The request of StreamEvents."""
    return event_pb2.StreamEventsRequest(
        epoch=epoch,
        from_sequence=(
            None if from_sequence is None else convert.uint64(from_sequence, "from_sequence")
        ),
        snapshot=snapshot,
    )
