"""What operators see of sessions and their requests."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nsmallest
from operator import itemgetter
from typing import TYPE_CHECKING

from kvcore.errors import NotFound
from kvcore.session import Session

if TYPE_CHECKING:
    from kvcore.depot import Depot


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One session. ``departed``: it ended, and workers attached under it remain."""

    session_id: str
    name: str
    num_requests: int
    # In block tables and tickets.
    num_blocks: int
    num_tokens: int
    num_tickets: int
    # Free, but held back from other sessions.
    num_quarantined_blocks: int
    step: int
    completed_step: int
    num_workers: int
    departed: bool


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One request. ``status`` is WAITING, RUNNING or PREEMPTED."""

    session_id: str
    request_id: str
    handle: int
    status: str
    num_tokens: int
    num_prompt_tokens: int | None
    num_computed_tokens: int
    num_blocks: int
    num_preemptions: int
    lora_name: str | None
    # It held blocks at a forced reset, and registers none until admitted anew.
    outlived_reset: bool


def list_sessions(depot: Depot) -> list[SessionInfo]:
    """Every session, open ones first, oldest first."""
    return [_session_info(session, departed=False) for session in depot.sessions.values()] + [
        _session_info(session, departed=True) for session in depot.departed.values()
    ]


def list_requests(
    depot: Depot, session_id: str | None, limit: int, after_handle: int = 0
) -> list[RequestInfo]:
    """At most ``limit`` requests, of one session or (None) of all, oldest first.

    Only those made after the one with ``after_handle``: handles only rise, so a list that
    is taken part by part neither repeats nor skips one that is there all the while.
    """
    if session_id is None:
        sessions = list(depot.sessions.values())
    elif session_id in depot.sessions:
        sessions = [depot.sessions[session_id]]
    else:
        raise NotFound(
            f"session {session_id!r} is not open", reason="UNKNOWN_SESSION", field="session_id"
        )
    pairs = nsmallest(
        limit,
        (
            (request.handle, session, request)
            for session in sessions
            for request in session.requests.values()
            if request.handle > after_handle
        ),
        key=itemgetter(0),
    )
    return [
        RequestInfo(
            session_id=session.session_id,
            request_id=request.request_id,
            handle=request.handle,
            status=request.status.name,
            num_tokens=request.num_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_blocks=sum(
                not block.is_null
                for table in session.manager.coordinator.get_blocks(request.request_id)
                for block in table
            ),
            num_preemptions=request.num_preemptions,
            lora_name=request.extra.lora_name,
            outlived_reset=request.outlived_reset,
        )
        for _, session, request in pairs
    ]


def _session_info(session: Session, *, departed: bool) -> SessionInfo:
    return SessionInfo(
        session_id=session.session_id,
        name=session.name,
        num_requests=len(session.requests),
        num_blocks=session.num_blocks,
        num_tokens=session.num_tokens,
        num_tickets=len(session.tickets),
        num_quarantined_blocks=session.view.num_held_blocks,
        step=session.view.step,
        completed_step=session.view.completed_step,
        num_workers=session.num_workers,
        departed=departed,
    )
