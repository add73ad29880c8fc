"""What operators are told of a server: figures, sessions, requests, broken invariants."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kvclient import convert
from kvclient.values import BlockHolder
from kvdepot.v1 import admin_pb2


class SessionState(IntEnum):
    """DEPARTED: it ended, and workers attached under it may still write."""

    OPEN = 1
    DEPARTED = 2


class RequestState(IntEnum):
    """Where a request stands.

    A WAITING one holds blocks only while its external tokens are on their way.
    """

    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3


@dataclass(frozen=True, slots=True)
class BlockStates:
    """Blocks by state; they sum to ``num_blocks - 1``."""

    live: int
    cached: int
    pinned: int
    in_transfer: int
    quarantined: int
    free: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Queries and hits are in tokens, since the start."""

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


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Every violated invariant; clean when there is none. ``holders``: who has blocks in use,
    the largest first."""

    violations: tuple[str, ...]
    num_blocks_checked: int
    num_requests_checked: int
    holders: tuple[BlockHolder, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session, as operators see it.

    ``age_seconds`` is since it was opened; ``num_blocks`` are in its block tables and
    tickets, once for each.
    """

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


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """A request, as operators see it."""

    session_id: str
    request_id: str
    handle: int
    state: RequestState
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_preemptions: int
    lora_name: str | None
    outlived_reset: bool


@dataclass(frozen=True, slots=True)
class RequestPage:
    """Some requests; ``next_page_token`` is empty on the last page."""

    requests: tuple[RequestInfo, ...]
    next_page_token: str


class TransferDirection(IntEnum):
    """OUT: a peer reads. IN: an import."""

    OUT = 1
    IN = 2


@dataclass(frozen=True, slots=True)
class TransferInfo:
    """A transfer or an import, as operators see it.

    ``transfer`` is how its id begins, ``name`` who reads, or the peer of an import. An import's
    lease is its deadline, and only of imports it is known how much is done.
    """

    transfer: str
    name: str
    direction: TransferDirection
    age_seconds: float
    lease_remaining_seconds: float
    num_blocks: int
    num_bytes: int
    num_blocks_done: int
    num_bytes_done: int


# --- from the wire --------------------------------------------------------------------


def stats(reply: admin_pb2.GetStatsResponse) -> Stats:
    """The server's figures."""
    blocks = reply.blocks
    return Stats(
        epoch=reply.epoch,
        uptime_seconds=reply.uptime_seconds,
        num_blocks=reply.num_blocks,
        blocks=BlockStates(
            live=blocks.live,
            cached=blocks.cached,
            pinned=blocks.pinned,
            in_transfer=blocks.in_transfer,
            quarantined=blocks.quarantined,
            free=blocks.free,
        ),
        usage=reply.usage,
        num_sessions=reply.num_sessions,
        num_requests=reply.num_requests,
        prefix_cache_queries=reply.prefix_cache_queries,
        prefix_cache_hits=reply.prefix_cache_hits,
        preempted_queries=reply.preempted_queries,
        preempted_hits=reply.preempted_hits,
        evictions=reply.evictions,
        generation=reply.generation,
        next_event_sequence=reply.next_event_sequence,
        pulled_bytes=reply.pulled_bytes,
        num_event_subscribers=reply.num_event_subscribers,
        num_departed_sessions=reply.num_departed_sessions,
        num_workers=reply.num_workers,
        reset_pending=reply.reset_pending,
        num_transfers=reply.num_transfers,
        num_imports=reply.num_imports,
    )


def audit_report(reply: admin_pb2.AuditResponse) -> AuditReport:
    """What Audit found."""
    return AuditReport(
        tuple(reply.violations),
        reply.num_blocks_checked,
        reply.num_requests_checked,
        convert.block_holders(reply.holders),
    )


def session_infos(reply: admin_pb2.ListSessionsResponse) -> tuple[SessionInfo, ...]:
    """The sessions of ListSessions."""
    return tuple(
        SessionInfo(
            session_id=session.session_id,
            name=session.name,
            state=SessionState(session.state),
            age_seconds=session.age_seconds,
            lease_ttl_seconds=session.lease_ttl_seconds,
            lease_remaining_seconds=session.lease_remaining_seconds,
            num_requests=session.num_requests,
            num_tokens=session.num_tokens,
            num_blocks=session.num_blocks,
            num_quarantined_blocks=session.num_quarantined_blocks,
            num_tickets=session.num_tickets,
            num_workers=session.num_workers,
            step=session.step,
            completed_step=session.completed_step,
        )
        for session in reply.sessions
    )


def transfer_infos(reply: admin_pb2.ListTransfersResponse) -> tuple[TransferInfo, ...]:
    """The transfers of ListTransfers."""
    return tuple(
        TransferInfo(
            transfer=transfer.transfer,
            name=transfer.name,
            direction=TransferDirection(transfer.direction),
            age_seconds=transfer.age_seconds,
            lease_remaining_seconds=transfer.lease_remaining_seconds,
            num_blocks=transfer.num_blocks,
            num_bytes=transfer.num_bytes,
            num_blocks_done=transfer.num_blocks_done,
            num_bytes_done=transfer.num_bytes_done,
        )
        for transfer in reply.transfers
    )


def request_page(reply: admin_pb2.ListRequestsResponse) -> RequestPage:
    """One page of ListRequests."""
    return RequestPage(
        tuple(
            RequestInfo(
                session_id=request.session_id,
                request_id=request.request_id,
                handle=request.handle,
                state=RequestState(request.state),
                num_tokens=request.num_tokens,
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                num_blocks=request.num_blocks,
                num_preemptions=request.num_preemptions,
                lora_name=request.lora_name if request.HasField("lora_name") else None,
                outlived_reset=request.outlived_reset,
            )
            for request in reply.requests
        ),
        reply.next_page_token,
    )
