"""The state one server owns: the core, its bytes, its feed, and each session's replies."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from google.protobuf.message import Message

from kvcore.depot import Depot
from kvcore.errors import InvalidArgument, NotFound, Unavailable
from kvcore.memory import PoolMemory, layer_layouts
from kvcore.session import Session
from kvdepot.v1 import types_pb2
from kvserver import convert
from kvserver.publisher import Publisher
from kvserver.replies import ReplyWindow

_CLOSED_KEPT = 1024


class Node:
    """Used from one event loop only; each call runs to its end without awaiting."""

    def __init__(
        self, depot: Depot, memory: PoolMemory | None, publisher: Publisher, *, reply_window: int
    ) -> None:
        self.depot = depot
        self.memory = memory
        self.publisher = publisher
        self.reply_window = reply_window
        self.started = time.monotonic()
        self.pulled_bytes = 0
        self.draining = False  # no new sessions
        self.draining_streams = False  # no new requests on open streams
        self.pool: types_pb2.PoolDescription = convert.pool_description(
            depot.config,
            [] if memory is None else layer_layouts(depot.config),
            path="" if memory is None else memory.path,
            nbytes=0 if memory is None else memory.nbytes,
        )
        self._windows: dict[str, ReplyWindow] = {}
        # Of sessions closed lately, so that a CloseSession sent again is answered again.
        self._closed: OrderedDict[str, ReplyWindow] = OrderedDict()

    def open_session(self, name: str, fingerprint: str) -> Session:
        """A new session. Raises Unavailable while the server drains."""
        if self.draining:
            raise Unavailable("the server is stopping", reason="DRAINING", retryable=True)
        session = self.depot.open_session(name, fingerprint)
        self._windows[session.session_id] = ReplyWindow(self.reply_window)
        return session

    def close_session(self, session: Session) -> int:
        """Free all the session holds; the number of its requests."""
        num_requests = self.depot.close_session(session)
        self._closed[session.session_id] = self._windows.pop(session.session_id)
        if len(self._closed) > _CLOSED_KEPT:
            self._closed.popitem(last=False)
        return num_requests

    def call(
        self,
        method: str,
        context: types_pb2.CallContext,
        operate: Callable[[Session], Message],
    ) -> bytes:
        """One call of a session, in its ``op_seq``; the reply, serialized.

        ``operate`` also converts the request's arguments, so that a call refused for
        them takes its number like any other.
        """
        session_id = context.session_id
        if not session_id:
            raise InvalidArgument("a session id is needed", field="context.session_id")
        op_seq = context.op_seq if context.HasField("op_seq") else None
        try:
            session = self.depot.session(session_id, context.epoch)
        except NotFound:
            closed = self._closed.get(session_id)
            if closed is None or op_seq is None or not closed.keeps(op_seq, method):
                raise
            return closed.answer(op_seq, method, _unreachable)

        def execute() -> bytes:
            try:
                session.begin(
                    context.step if context.HasField("step") else None,
                    context.completed_step if context.HasField("completed_step") else None,
                )
                return operate(session).SerializeToString()
            finally:
                self.publish()

        if op_seq is None:
            return execute()
        return self._windows[session_id].answer(op_seq, method, execute)

    def publish(self) -> None:
        """Hand on the events that a call caused."""
        entries = self.depot.take_feed()
        if entries:
            self.publisher.publish(entries)


def _unreachable() -> bytes:
    raise AssertionError("a kept answer is not executed")
