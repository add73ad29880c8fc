"""Between what a server answered and the model: which calls were executed, and which replayed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import grpc

from model import Model
from model_state import Answer, Divergence, Session, agree


@dataclass
class Judged:
    """An opened session, and its answers by op_seq."""

    session: Session
    window: int
    expected: int = 1
    answers: dict[int, tuple[str, Answer]] = field(default_factory=dict)
    closed: bool = False
    workers: int = 0

    def kept(self, op_seq: int, method: str) -> Answer | None:
        """The answer that a repeat must get; None if it is refused."""
        if self.expected - self.window <= op_seq < self.expected:
            kept_method, answer = self.answers[op_seq]
            if kept_method == method:
                return answer
        return None


class Judge:
    """Sees every call that reached the server, in their order, with its answer."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.sessions: dict[str, Judged] = {}
        self.num_replayed = 0

    def opened(self, name: str, reply: Any) -> Judged:
        """OpenSession was answered."""
        session = self.model.open(name, reply.lease_ttl_seconds)
        judged = Judged(session, reply.reply_window)
        self.sessions[reply.session_id] = judged
        return judged

    def see(self, method: str, request: Any, answer: Answer) -> None:
        """A call of a session was answered."""
        if method == "KeepAlive":
            self._see_keep_alive(request, answer)
            return
        judged = self.sessions[request.context.session_id]
        session = judged.session
        is_open = session in self.model.sessions
        op_seq = request.context.op_seq
        if is_open:
            session.heard_at = self.model.now
        if is_open and op_seq == judged.expected:
            self.model.call(session, method, request, answer)
            judged.answers[op_seq] = method, answer
            judged.expected += 1
            judged.closed = method == "CloseSession"
            return
        kept = judged.kept(op_seq, method) if is_open or judged.closed else None
        if kept is not None:
            self.num_replayed += 1
        elif is_open:
            kept = grpc.StatusCode.FAILED_PRECONDITION
        else:
            kept = grpc.StatusCode.NOT_FOUND
        if answer != kept:
            raise Divergence(f"{method} {op_seq} again: {answer}, not {kept}")

    def _see_keep_alive(self, request: Any, answer: Answer) -> None:
        session = self.sessions[request.session_id].session
        if session in self.model.sessions:
            session.heard_at = self.model.now
            agree("lease", answer.lease_ttl_seconds, session.lease_seconds)
        else:
            agree("KeepAlive", answer, grpc.StatusCode.NOT_FOUND)

    def check_stats(self, stats: Any, violations: list[str]) -> None:
        """GetStats and Audit, compared."""
        agree("violations", violations, [])
        self.model.check_stats(stats)
