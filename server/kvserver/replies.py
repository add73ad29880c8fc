"""Replies kept for replay, so that a call may be sent again without being done again."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from heapq import heapify, heappop, heapreplace

from kvcore.errors import FailedPrecondition, KVDepotError
from kvserver.errors import MESSAGE_LENGTH_MAX, note_took_op_seq

# What a kept answer takes besides its bytes, or its message, about.
_REPLY_BYTES = 128
_ERROR_BYTES = 1024


class ReplyWindow:
    """One session's ``op_seq``: what it expects, and its last answers.

    The expected number executes. One in the window answers the same again, errors
    included, and changes nothing. Any other is FailedPrecondition with the expected number.

    The last ``size`` answers are kept, fewer when they are more than ``nbytes_max``
    bytes together, but always the last one.
    """

    __slots__ = ("_answers", "_nbytes_max", "_size", "expected", "nbytes")

    def __init__(self, size: int, nbytes_max: int) -> None:
        self.expected = 1
        self.nbytes = 0
        self._size = size
        self._nbytes_max = nbytes_max
        self._answers: deque[tuple[str, bytes | Exception, int]] = deque()

    def __len__(self) -> int:
        return len(self._answers)

    def answer(self, op_seq: int, method: str, execute: Callable[[], bytes]) -> bytes:
        """The serialized reply to call ``op_seq`` of ``method``."""
        if op_seq != self.expected:
            return self.again(op_seq, method)
        self.expected += 1
        try:
            reply = execute()
        except Exception as error:
            note_took_op_seq(error)
            bare = _bare(error)
            self._keep(method, bare, _ERROR_BYTES + sys.getsizeof(str(bare)))
            raise
        self._keep(method, reply, _REPLY_BYTES + len(reply))
        return reply

    def keeps(self, op_seq: int, method: str) -> bool:
        """Whether call ``op_seq`` was one of ``method`` and its answer is kept."""
        position = op_seq - self.expected
        return -len(self._answers) <= position < 0 and self._answers[position][0] == method

    def again(self, op_seq: int, method: str) -> bytes:
        """The kept answer to call ``op_seq``. FailedPrecondition if there is none."""
        answers = self._answers
        position = op_seq - self.expected
        if not -len(answers) <= position < 0:
            raise FailedPrecondition(
                f"op_seq {op_seq} is neither the expected {self.expected} "
                f"nor one of the {len(answers)} before it, whose answers are kept",
                reason="OP_SEQ_OUT_OF_WINDOW",
                field="context.op_seq",
                expected_op_seq=self.expected,
            )
        kept_method, answer, _ = answers[position]
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

    def drop_oldest(self) -> int:
        """Keep the oldest answer no longer; the bytes that it took."""
        nbytes = self._answers.popleft()[2]
        self.nbytes -= nbytes
        return nbytes

    def _keep(self, method: str, answer: bytes | Exception, nbytes: int) -> None:
        self._answers.append((method, answer, nbytes))
        self.nbytes += nbytes
        while len(self._answers) > self._size or (
            self.nbytes > self._nbytes_max and len(self._answers) > 1
        ):
            self.drop_oldest()


class Replies:
    """The reply windows of all sessions; all together keep ``total_bytes_max`` at most.

    What must go, goes in this order: the windows of closed sessions, the longest closed
    first; of the session that keeps the most, all but its last answer, the oldest first;
    last answers, the largest first.
    """

    def __init__(
        self, *, size: int, window_bytes_max: int, total_bytes_max: int, closed_max: int
    ) -> None:
        self.nbytes = 0
        self._size = size
        self._window_bytes_max = window_bytes_max
        self._total_bytes_max = total_bytes_max
        self._closed_max = closed_max
        self._open: dict[str, ReplyWindow] = {}
        # So that a CloseSession sent again is answered again.
        self._closed: OrderedDict[str, ReplyWindow] = OrderedDict()

    def open(self, session_id: str) -> None:
        """A session begins."""
        self._open[session_id] = ReplyWindow(self._size, self._window_bytes_max)

    def close(self, session_id: str) -> None:
        """A session is closed, by a call that is under way; late repeats are answered."""
        self._closed[session_id] = self._open.pop(session_id)
        if len(self._closed) > self._closed_max:
            self._forget_closed()

    def drop(self, session_id: str) -> None:
        """A session is over, and its calls are answered no more."""
        self.nbytes -= self._open.pop(session_id).nbytes

    def answer(
        self, session_id: str, op_seq: int, method: str, execute: Callable[[], bytes]
    ) -> bytes:
        """As ReplyWindow.answer, of an open session."""
        window = self._open[session_id]
        nbytes = window.nbytes
        try:
            return window.answer(op_seq, method, execute)
        finally:
            self.nbytes += window.nbytes - nbytes
            if self.nbytes > self._total_bytes_max:
                self._shrink()

    def of_closed(self, session_id: str, op_seq: int, method: str) -> bytes | None:
        """The kept answer of a closed session; None if there is none."""
        window = self._closed.get(session_id)
        if window is None or not window.keeps(op_seq, method):
            return None
        return window.again(op_seq, method)

    def _forget_closed(self) -> None:
        self.nbytes -= self._closed.popitem(last=False)[1].nbytes

    def _shrink(self) -> None:
        """Make room, and some to spare, so that it lasts for many calls."""
        target = self._total_bytes_max - self._total_bytes_max // 8
        while self._closed and self.nbytes > target:
            self._forget_closed()
        heap = [
            (len(window) == 1, -window.nbytes, number, window)
            for number, window in enumerate(self._open.values())
            if len(window)
        ]
        heapify(heap)
        while self.nbytes > target:
            _, _, number, window = heap[0]
            self.nbytes -= window.drop_oldest()
            if len(window):
                heapreplace(heap, (len(window) == 1, -window.nbytes, number, window))
            else:
                heappop(heap)


def _bare(error: Exception) -> Exception:
    """The same error to a caller, without what may be large.

    Its traceback's frames keep the whole request alive; of a long message only the
    beginning travels; of an error that is nobody's doing, nothing does.
    """
    if not isinstance(error, KVDepotError):
        unexpected = RuntimeError(f"{type(error).__name__}: {error}"[:MESSAGE_LENGTH_MAX])
        note_took_op_seq(unexpected)
        return unexpected
    message = error.message[: MESSAGE_LENGTH_MAX + 1]
    bare = type(error).__new__(type(error), message)
    bare.__dict__.update(error.__dict__, message=message)
    return bare
