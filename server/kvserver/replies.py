"""Replies kept for replay, so that a call may be sent again without being done again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvcore.errors import FailedPrecondition


class ReplyWindow:
    """One session's ``op_seq``: what it expects, and its last ``size`` answers.

    The expected number executes. One in the window answers the same again, errors
    included, and changes nothing. Any other is FailedPrecondition with the expected number.
    """

    __slots__ = ("_answers", "expected")

    def __init__(self, size: int) -> None:
        self.expected = 1
        self._answers: deque[tuple[str, bytes | Exception]] = deque(maxlen=size)

    def answer(self, op_seq: int, method: str, execute: Callable[[], bytes]) -> bytes:
        """The serialized reply to call ``op_seq`` of ``method``."""
        if op_seq != self.expected:
            return self._again(op_seq, method)
        self.expected += 1
        try:
            reply = execute()
        except Exception as error:
            self._answers.append((method, _bare(error)))
            raise
        self._answers.append((method, reply))
        return reply

    def keeps(self, op_seq: int, method: str) -> bool:
        """Whether call ``op_seq`` was one of ``method`` and its answer is kept."""
        position = op_seq - self.expected
        return -len(self._answers) <= position < 0 and self._answers[position][0] == method

    def _again(self, op_seq: int, method: str) -> bytes:
        answers = self._answers
        position = op_seq - self.expected
        if not -len(answers) <= position < 0:
            raise FailedPrecondition(
                f"op_seq {op_seq} is neither the expected {self.expected} "
                f"nor one of the {len(answers)} before it",
                reason="OP_SEQ_OUT_OF_WINDOW",
                field="context.op_seq",
                expected_op_seq=self.expected,
            )
        kept_method, answer = answers[position]
        if kept_method != method:
            raise FailedPrecondition(
                f"op_seq {op_seq} was a call of {kept_method}, not {method}",
                reason="OP_SEQ_REUSED",
                field="context.op_seq",
                expected_op_seq=self.expected,
            )
        if isinstance(answer, Exception):
            raise _bare(answer)
        return answer


def _bare(error: Exception) -> Exception:
    """The same error without its traceback, whose frames keep the whole request alive."""
    bare = type(error).__new__(type(error), *error.args)
    bare.__dict__.update(error.__dict__)
    return bare
