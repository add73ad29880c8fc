"""StepStream over the synchronous stub: a queue for requests, an iterator of replies."""

from __future__ import annotations

import threading
import time
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import grpc

from kvclient import calls
from kvclient.calls import Call
from kvclient.channel import BACKOFFS_S
from kvclient.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    Unavailable,
    unanswered,
)
from kvclient.values import Step, StepMark, StepResult

if TYPE_CHECKING:
    from kvclient.session import Session


class StepStream:
    """Steps of one session, one at a time. Opens when first used, again when it broke.

    A Step whose answer a broken stream lost is sent again with its number.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._timeout_s = session.client.timeout_s
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._replies: Any = None
        self._deadline: float | None = None
        self._late = False
        self._closed = threading.Event()
        self._watch: threading.Thread | None = None

    def call(self, step: Step, *, mark: StepMark | None = None) -> StepResult:
        """The answer to one Step."""
        if self._closed.is_set():
            raise FailedPrecondition("the stream is closed", reason="STREAM_CLOSED")
        return self._session._call(calls.step(step, mark), self._send)

    def close(self) -> None:
        """Ends the stream; the session stays."""
        self._closed.set()
        self._drop()

    def __enter__(self) -> StepStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _send(self, call: Call[Any]) -> Any:
        """Half the time for an answer; then, or when the stream breaks, sent again on a new one."""
        deadline = time.monotonic() + self._timeout_s
        waits_s = iter(BACKOFFS_S)
        while True:
            left_s = deadline - time.monotonic()
            try:
                return self._send_once(call, min(left_s, self._timeout_s / 2))
            except Unavailable:
                wait_s = next(waits_s, None)
                if wait_s is None or time.monotonic() + wait_s >= deadline:
                    raise
                time.sleep(wait_s)
            except DeadlineExceeded:
                if time.monotonic() >= deadline or next(waits_s, None) is None:
                    raise

    def _send_once(self, call: Call[Any], timeout_s: float) -> Any:
        if self._replies is None:
            self._open()
        try:
            self._deadline = time.monotonic() + timeout_s
            self._requests.put(call.request)
            reply = next(self._replies)
        except StopIteration:
            self._drop()
            raise Unavailable(
                "the server ended the stream", reason="STREAM_ENDED", retryable=True
            ) from None
        except grpc.RpcError as error:
            self._drop()
            if self._late:
                raise DeadlineExceeded(
                    f"no answer within {timeout_s:g} s", reason="DEADLINE_EXCEEDED", retryable=True
                ) from None
            closed = self._closed.is_set() or self._session.client._stubs.closed
            raise unanswered(error, closed=closed) from None
        except BaseException:
            self._drop()
            raise
        finally:
            self._deadline = None
        if reply.op_seq != call.request.context.op_seq:
            self._drop()
            raise InternalError(
                f"asked {call.request.context.op_seq}, answered {reply.op_seq}", reason="BAD_REPLY"
            )
        return reply

    def _open(self) -> None:
        open_stream = self._session.client._stubs.method("KVCacheService", "StepStream")
        self._requests = SimpleQueue()
        self._late = False
        self._replies = open_stream(iter(self._requests.get, None))
        if self._watch is None:
            # It knows the stream weakly: one that nobody refers to any more ends.
            interval_s = min(0.5, self._timeout_s / 8)
            self._watch = threading.Thread(
                target=_watch, args=(weakref.ref(self), self._closed, interval_s), daemon=True
            )
            self._watch.start()

    def _drop(self) -> None:
        self._requests.put(None)
        if self._replies is not None:
            self._replies.cancel()
            self._replies = None

    def _cancel_if_late(self) -> None:
        deadline, replies = self._deadline, self._replies
        if deadline is not None and replies is not None and time.monotonic() > deadline:
            self._late = True
            replies.cancel()


def _watch(stream: weakref.ref[StepStream], closed: threading.Event, interval_s: float) -> None:
    """The synchronous stream has no deadline a message: this cancels it when one is late."""
    while not closed.wait(interval_s):
        watched = stream()
        if watched is None:
            return
        watched._cancel_if_late()
        del watched
