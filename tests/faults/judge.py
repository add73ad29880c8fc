"""Between what a server answered and the model: which calls were executed, and which replayed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import grpc

from model import Answer, Divergence, Model, Session, agree


@dataclass
class Judged:
    """An opened session, and its answers by op_seq."""

    session: Session
    window: int
    expected: int = 1
    answers: dict[int, tuple[str, Answer]] = field(default_factory=dict)
    ended: bool = False

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
        judged = Judged(self.model.open(name), reply.reply_window)
        self.sessions[reply.session_id] = judged
        return judged

    def see(self, method: str, request: Any, answer: Answer) -> None:
        """A call of a session was answered."""
        judged = self.sessions[request.context.session_id]
        op_seq = request.context.op_seq
        if op_seq == judged.expected and not judged.ended:
            self.model.call(judged.session, method, request, answer)
            judged.answers[op_seq] = method, answer
            judged.expected += 1
            judged.ended = method == "CloseSession"
            return
        kept = judged.kept(op_seq, method)
        if kept is not None:
            self.num_replayed += 1
        elif judged.ended:
            kept = grpc.StatusCode.NOT_FOUND
        else:
            kept = grpc.StatusCode.FAILED_PRECONDITION
        if answer != kept:
            raise Divergence(f"{method} {op_seq} again: {answer}, not {kept}")

    def check_stats(self, stats: Any, violations: list[str]) -> None:
        """GetStats and Audit, compared."""
        agree("violations", violations, [])
        self.model.check_stats(stats)
