"""The state one server owns: the core, its bytes, its feed, each session's lease and replies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from google.protobuf.message import Message

from kvcore.depot import Depot, check_name
from kvcore.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from kvcore.listing import SessionInfo
from kvcore.memory import PoolMemory, layer_layouts
from kvcore.operation import Step, StepResult
from kvcore.reset import ResetMode, ResetResult, ResetScope
from kvcore.session import Session
from kvdepot.v1 import types_pb2
from kvserver import convert_pool
from kvserver.data_plane import DataPlane
from kvserver.deadlines import Clock, Deadlines
from kvserver.imports import Imports
from kvserver.publisher import Publisher
from kvserver.replies import Replies
from kvserver.rpc import Request
from kvserver.transfers import Transfers
from kvserver.worker import Worker

logger = logging.getLogger(__name__)

_NAMED_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPolicy:
    """What sessions are granted."""

    reply_window: int
    reply_window_bytes: int
    reply_windows_bytes: int
    ended_sessions_kept: int
    lease_ttl_seconds: float
    lease_ttl_seconds_max: float
    quarantine_seconds: float
    reset_deadline_seconds: float
    worker_heartbeat_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPolicy:
    """What peers and imports are granted."""

    lease_ttl_seconds: float
    lease_ttl_seconds_max: float
    import_seconds_max: float


@dataclass(frozen=True, slots=True)
class ListedSession:
    """A session, since when, and its lease; a departed one has none (both 0)."""

    info: SessionInfo
    age_seconds: float
    lease_ttl_seconds: float
    lease_remaining_seconds: float


class Node:
    """Used from one event loop only; each call runs to its end without awaiting."""

    def __init__(
        self,
        depot: Depot,
        memory: PoolMemory | None,
        publisher: Publisher,
        policy: SessionPolicy,
        transfer_policy: TransferPolicy,
        *,
        data_plane: DataPlane | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.depot = depot
        self.memory = memory
        self.publisher = publisher
        self.policy = policy
        self.transfer_policy = transfer_policy
        # None when there are no bytes to move.
        self.data_plane = data_plane
        self.started = time.monotonic()
        self.draining = False  # no new sessions
        self.draining_streams = False  # no new requests on open streams
        self.drain_requested = asyncio.Event()
        # How sessions ended: "closed" or "expired".
        self.sessions_ended: Counter[str] = Counter()
        self.pool: types_pb2.PoolDescription = convert_pool.pool_description(
            depot.config,
            [] if memory is None else layer_layouts(depot.config),
            [] if memory is None else memory.mappings,
        )
        # Of leases by session id; of quarantines, drains and transfers by (what it is, id).
        self.deadlines = Deadlines(clock)
        self.transfers = Transfers(self)
        self.imports = Imports(self)
        if data_plane is not None:
            data_plane.on_summed = depot.transfers.keep_sums
        # Whose Step is answered but not finished; None between calls.
        self._unfinished: Session | None = None
        self._workers: dict[str, set[Worker]] = {}
        self._opened_at: WeakKeyDictionary[Session, float] = WeakKeyDictionary()
        self._replies = Replies(
            size=policy.reply_window,
            window_bytes_max=policy.reply_window_bytes,
            total_bytes_max=policy.reply_windows_bytes,
            closed_max=policy.ended_sessions_kept,
        )
        # Leases of sessions that ended by them, so that late calls are told what happened.
        self._expired: OrderedDict[str, float] = OrderedDict()

    # --- sessions ---------------------------------------------------------------------

    def open_session(
        self, name: str, fingerprint: str, lease_ttl_seconds: float | None = None
    ) -> Session:
        """A new session. Raises Unavailable while the server drains."""
        self.require_not_draining()
        ttl = self.policy.lease_ttl_seconds if lease_ttl_seconds is None else lease_ttl_seconds
        if not 0.0 < ttl <= self.policy.lease_ttl_seconds_max:
            raise InvalidArgument(
                f"a lease is above 0 and at most {self.policy.lease_ttl_seconds_max:g} seconds, "
                f"not {ttl:g}",
                field="lease_ttl_seconds",
            )
        session = self.depot.open_session(name, fingerprint)
        self._replies.open(session.session_id)
        self._opened_at[session] = time.monotonic()
        self.deadlines.set(session.session_id, ttl, lambda: self._expire(session, ttl))
        return session

    def session(self, session_id: str, epoch: str, within: str = "context.") -> Session:
        """An open session, its lease renewed. NotFound says if the lease ran out.

        ``within`` is where, in the caller's request, the two fields are.
        """
        if not session_id:
            raise InvalidArgument("a session id is needed", field=f"{within}session_id")
        try:
            session = self.depot.session(session_id, epoch, within)
        except NotFound:
            ttl = self._expired.get(session_id)
            if ttl is None:
                raise
            raise NotFound(
                f"session {session_id!r} has ended: its lease of {ttl:g} seconds ran out; its "
                "requests are freed: open a new session",
                reason="SESSION_EXPIRED",
                field=f"{within}session_id",
            ) from None
        self.deadlines.renew(session_id)
        return session

    def lease_ttl_seconds(self, session: Session) -> float:
        """How long ``session`` lives after its last call."""
        return self.deadlines.seconds(session.session_id)

    def close_session(self, session: Session) -> int:
        """Free all the session holds; the number of its requests."""
        self._replies.close(session.session_id)
        return self._end_session(session, "closed")

    def list_sessions(self) -> list[ListedSession]:
        """Every session with its lease, open ones first, oldest first."""
        deadlines, depot, now = self.deadlines, self.depot, time.monotonic()
        listed = []
        for info in depot.list_sessions():
            session_id = info.session_id
            session = (depot.departed if info.departed else depot.sessions)[session_id]
            ttl = remaining = 0.0
            if not info.departed:
                ttl = deadlines.seconds(session_id)
                remaining = deadlines.remaining_seconds(session_id)
            listed.append(ListedSession(info, now - self._opened_at[session], ttl, remaining))
        return listed

    def _expire(self, session: Session, ttl: float) -> None:
        self._replies.drop(session.session_id)
        self._expired[session.session_id] = ttl
        if len(self._expired) > self.policy.ended_sessions_kept:
            self._expired.popitem(last=False)
        self._end_session(session, "expired")
        self.publish()

    def _end_session(self, session: Session, cause: str) -> int:
        session_id = session.session_id
        self.sessions_ended[cause] += 1
        self.deadlines.drop(session_id)
        num_requests = self.depot.close_session(session)
        if session.num_workers:
            self.deadlines.set(
                ("quarantine", session_id),
                self.policy.quarantine_seconds,
                lambda: self._end_quarantine(session),
            )
            for worker in self._workers[session_id]:
                worker.end_session()
        return num_requests

    # --- workers ----------------------------------------------------------------------

    def attach_worker(self, session: Session, name: str) -> Worker:
        """A worker that may write to the session's blocks until it is detached."""
        check_name(name)
        self.depot.attach_worker(session)
        worker = Worker(session, name)
        self._workers.setdefault(session.session_id, set()).add(worker)
        return worker

    def detach_worker(self, worker: Worker) -> None:
        """The worker is gone; if it was the last of an ended session, so is the quarantine."""
        session_id = worker.session.session_id
        workers = self._workers[session_id]
        workers.remove(worker)
        if not workers:
            del self._workers[session_id]
            self.deadlines.drop(("quarantine", session_id))
        self.depot.detach_worker(worker.session)

    def _end_quarantine(self, session: Session) -> None:
        logger.warning(
            "session %s: workers %s are still attached after %g s; its blocks are free now",
            session.session_id,
            sorted(worker.name for worker in self._workers.get(session.session_id, ())),
            self.policy.quarantine_seconds,
        )
        self.depot.end_quarantine(session)

    # --- operations -------------------------------------------------------------------

    def call(
        self,
        method: str,
        operate: Callable[[Session, Request], Message],
        request: Request,
        *,
        finish: bool = True,
    ) -> bytes:
        """One call of a session, in its ``op_seq``; the reply, serialized.

        ``request`` has a CallContext. ``operate`` also converts its arguments, so that a
        call refused for them takes its number like any other. Without ``finish``, the
        caller owes ``finish()`` before anything else is done with the node.
        """
        context: types_pb2.CallContext = request.context  # type: ignore[attr-defined]
        has, session_id = context.HasField, context.session_id
        op_seq = context.op_seq if has("op_seq") else None
        try:
            session = self.session(session_id, context.epoch)
        except NotFound:
            kept = None
            if op_seq is not None:
                kept = self._replies.of_closed(session_id, op_seq, method)
            if kept is None:
                raise
            return kept

        def execute() -> bytes:
            try:
                # A session that ends says nothing of the step before: it may have failed.
                if method != "CloseSession" or has("step") or has("completed_step"):
                    session.begin(
                        context.step if has("step") else None,
                        context.completed_step if has("completed_step") else None,
                    )
                reply = operate(session, request).SerializeToString()
            except BaseException:
                self.finish()
                raise
            if finish:
                self.finish()
            return reply

        if op_seq is None:
            return execute()
        return self._replies.answer(session_id, op_seq, method, execute)

    def answer_step(self, session: Session, step: Step) -> StepResult:
        """What a Step answers; ``finish`` does the rest of it."""
        assert self._unfinished is None
        self._unfinished = session
        return self.depot.answer_step(session, step)

    def finish(self) -> None:
        """What a call's reply does not depend on."""
        session, self._unfinished = self._unfinished, None
        if session is not None:
            self.depot.finish_step(session)
        self.publish()

    def reset_prefix_cache(
        self, mode: ResetMode, scope: ResetScope | None, deadline_seconds: float | None
    ) -> ResetResult:
        """As the depot's. A drain is abandoned after ``deadline_seconds``."""
        limit = self.policy.reset_deadline_seconds
        if deadline_seconds is None:
            deadline_seconds = limit
        if not 0.0 < deadline_seconds <= limit:
            raise InvalidArgument(
                f"a drain has above 0 and at most {limit:g} seconds, not {deadline_seconds:g}",
                field="deadline_seconds",
            )
        result = self.depot.reset_prefix_cache(mode, scope)
        key = ("drain", result.drain_id)
        if not result.done and key not in self.deadlines:
            self.deadlines.set(key, deadline_seconds, lambda: self._abandon_drain(result.drain_id))
        return result

    def _abandon_drain(self, drain_id: int) -> None:
        self.depot.abandon_drain(drain_id)

    def evict_blocks(self, block_ids: Sequence[int]) -> int:
        """Make blocks no hits any more; how many were."""
        num_blocks = self.depot.evict_blocks(block_ids)
        self.publish()
        return num_blocks

    def publish(self) -> None:
        """Hand on the events that a call caused."""
        entries = self.depot.take_feed()
        if entries:
            self.publisher.publish(entries)
            if len(self.imports):
                self.imports.cut_void_short()

    # --- bytes ------------------------------------------------------------------------

    @property
    def pulled_bytes(self) -> int:
        """Of blocks, sent to peers by PullBlocks."""
        return 0 if self.data_plane is None else self.data_plane.pulled_bytes

    def require_data_plane(self) -> DataPlane:
        """What moves bytes. FailedPrecondition if there are none, or it could not be started."""
        if self.data_plane is None:
            if self.memory is None:
                raise FailedPrecondition("the server keeps no bytes", reason="NO_MEMORY")
            raise FailedPrecondition(
                "the process that moves bytes between servers could not be started: the server's "
                "log says why",
                reason="NO_DATA_PLANE",
            )
        return self.data_plane

    def require_not_draining(self) -> None:
        """Unavailable once the server begins to stop."""
        if self.draining:
            raise _stopping()

    # --- the end ----------------------------------------------------------------------

    def drain(self) -> None:
        """Begin to stop: no session is opened any more. What serves the node does the rest."""
        self.draining = True
        self.drain_requested.set()

    @property
    def is_in_use(self) -> bool:
        """Whether a session, a transfer or an import is still open."""
        depot = self.depot
        return bool(depot.sessions or len(self.transfers) or depot.imports.by_id)

    def in_use(self) -> list[str]:
        """What is open, in words; of many, the oldest."""
        sessions = [
            f"session {session.name or session.session_id} ({len(session.requests)} requests)"
            for session in self.depot.sessions.values()
        ]
        transfers = [
            f"{'import' if one.is_import else 'transfer'} {one.shown_id} "
            f"{'from' if one.is_import else 'of'} {one.name or 'an unnamed peer'} "
            f"({one.num_blocks} blocks)"
            for one in (*self.transfers.listed(), *self.imports.listed())
        ]
        named = [*sessions[:_NAMED_MAX], *transfers[:_NAMED_MAX]]
        num_more = len(sessions) + len(transfers) - len(named)
        return [*named, f"and {num_more} more"] if num_more else named

    def end_streams(self) -> None:
        """No more requests on open streams; those of workers and followers end."""
        self.draining_streams = True
        self.imports.stop_all()
        self.transfers.end_all()
        for workers in self._workers.values():
            for worker in workers:
                worker.wake()
        self.publisher.close()

    def require_streams(self) -> None:
        """Unavailable once open streams are to end."""
        if self.draining_streams:
            raise _stopping()

    def close(self) -> None:
        """Nothing is called back any more."""
        self.deadlines.close()


def _stopping() -> Unavailable:
    return Unavailable("the server is stopping", reason="DRAINING", retryable=True)
