"""The synchronous client. ``kvclient.aio`` has its asyncio twin."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import grpc

from kvclient import calls, convert
from kvclient.calls import Call, Opened
from kvclient.channel import MAX_MESSAGE_BYTES, TIMEOUT_S, Stubs, channel_options
from kvclient.errors import FailedPrecondition, KVDepotError, from_rpc_error
from kvclient.events import EventBatch
from kvclient.sequence import Sequence as OpSequence
from kvclient.sequence import unsettled
from kvclient.stream import StepStream
from kvclient.values import (
    AuditReport,
    Content,
    FreeMode,
    FreeResult,
    Hit,
    PoolDescription,
    PulledBlock,
    SlotRequest,
    SlotResult,
    Stats,
    Step,
    StepMark,
    StepResult,
    Tokens,
)

Result = TypeVar("Result")


class Stream(Generic[Result]):
    """What a server streams, to iterate over; ``close`` ends it early."""

    def __init__(self, call: Any, read: Callable[[Any], Iterable[Result]]) -> None:
        self._call = call
        self._items = self._read(read)

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        return next(self._items)

    def _read(self, read: Callable[[Any], Iterable[Result]]) -> Iterator[Result]:
        try:
            for message in self._call:
                yield from read(message)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def close(self) -> None:
        """Ends the stream; whoever waits for its next item gets Cancelled."""
        self._call.cancel()

    def __enter__(self) -> Stream[Result]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Client:
    """One server, at ``host:port`` or ``unix:/path``. For use from any thread.

    Every call ends within ``timeout_s`` in a value or an error of ``kvclient.errors``.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float = TIMEOUT_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self._stubs = Stubs(grpc.insecure_channel(target, channel_options(max_message_bytes)))

    def open_session(self, name: str = "", fingerprint: str = "") -> Session:
        """A new session; with ``fingerprint``, only on a pool that has it."""
        return Session(self, self._invoke(calls.open_session(name, fingerprint)))

    def describe_pool(self) -> PoolDescription:
        """What the server's pool is, and where its bytes are."""
        return self._invoke(calls.describe_pool())

    def stats(self) -> Stats:
        """The server's figures."""
        return self._invoke(calls.get_stats())

    def audit(self) -> AuditReport:
        """Has the server check every invariant."""
        return self._invoke(calls.audit())

    def pull_blocks(
        self,
        block_hashes: Sequence[bytes],
        group: int = 0,
        *,
        checksums: bool = False,
        fingerprint: str = "",
        timeout_s: float | None = None,
    ) -> Stream[PulledBlock]:
        """Copies of blocks, one answer a hash, in order; all within ``timeout_s``.

        With ``checksums`` each is verified: DataLoss for one that came damaged.
        """
        request = calls.pull_blocks(block_hashes, group, checksums, fingerprint)
        pull = self._stubs.method("KVTransferService", "PullBlocks")
        return Stream(
            pull(request, timeout=self.timeout_s if timeout_s is None else timeout_s),
            lambda message: convert.pulled_blocks(message, block_hashes),
        )

    def stream_events(
        self, from_sequence: int | None = None, *, epoch: str = "", snapshot: bool = False
    ) -> Stream[EventBatch]:
        """What happens to the index, from ``from_sequence`` (default: now), until closed.

        With ``snapshot``, all that is there comes first. The subscription stands when
        this returns. OutOfRange for a cursor no longer kept, DataLoss for one of an
        ``epoch`` that is over.
        """
        request = calls.stream_events(from_sequence, epoch, snapshot)
        call = self._stubs.method("KVEventService", "StreamEvents")(request)
        # Answered once subscribed; a failed call answers too, and fails when iterated over.
        call.initial_metadata()
        return Stream(call, lambda message: (convert.event_batch(message),))

    def close(self) -> None:
        """Ends every call and stream. Sessions stay open on the server: close them first."""
        self._stubs.closed = True
        self._stubs.channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _invoke(self, call: Call[Result]) -> Result:
        return call.read(self._send(call))

    def _send(self, call: Call[Any]) -> Any:
        method = self._stubs.method(call.service, call.method)
        try:
            return method(call.request, timeout=self.timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


class Session:
    """One scheduler's session. Calls from several threads take turns.

    A call that raised Unavailable or DeadlineExceeded may or may not have been done;
    by the time of the next call (or of ``settle``) it has been, exactly once. If that
    next call cannot reach the server either, it is not begun, and raises Unavailable
    with the reason UNSETTLED.
    ``mark`` says which scheduler step a call belongs to and which have ended;
    left out, each call ends the step before it.
    """

    def __init__(self, client: Client, opened: Opened) -> None:
        self.client = client
        self.session_id = opened.session_id
        self.epoch = opened.epoch
        self.pool = opened.pool
        self.reply_window = opened.reply_window
        self._sequence = OpSequence(opened.session_id, opened.epoch)
        self._lock = threading.Lock()
        self._closed = False

    def get_computed_blocks(
        self,
        request_id: str,
        content: Content | Tokens | None = None,
        *,
        mark: StepMark | None = None,
    ) -> Hit:
        """The longest cached prefix; introduces or extends the request by ``content``."""
        return self._call(calls.get_computed_blocks(request_id, content, mark))

    def allocate_slots(self, slots: SlotRequest, *, mark: StepMark | None = None) -> SlotResult:
        """Slots for one request; that it does not fit is an outcome, not an error."""
        return self._call(calls.allocate_slots(slots, mark))

    def cache_blocks(
        self,
        request_id: str,
        num_computed_tokens: int,
        content: Content | Tokens | None = None,
        *,
        mark: StepMark | None = None,
    ) -> bool:
        """Registers full blocks and confirms their bytes; False for an unknown request."""
        return self._call(calls.cache_blocks(request_id, num_computed_tokens, content, mark))

    def free(
        self,
        request_id: str,
        mode: FreeMode = FreeMode.FINISH,
        *,
        did_not_run: bool = False,
        mark: StepMark | None = None,
    ) -> FreeResult:
        """Gives the request's blocks back, or detaches them; a no-op if it is unknown."""
        return self._call(calls.free(request_id, mode, did_not_run, mark))

    def return_blocks(self, ticket: int, *, mark: StepMark | None = None) -> int:
        """Gives detached blocks back; answers how many."""
        return self._call(calls.return_blocks(ticket, mark))

    def reset_prefix_cache(self, *, mark: StepMark | None = None) -> int:
        """Empties the cache; the new generation. FailedPrecondition while blocks are in use."""
        return self._call(calls.reset_prefix_cache(mark))

    def step(self, step: Step, *, mark: StepMark | None = None) -> StepResult:
        """All operations of one scheduler step."""
        return self._call(calls.step(step, mark))

    def step_stream(self) -> StepStream:
        """A stream on which steps cost less."""
        return StepStream(self)

    def settle(self) -> Any:
        """The result of the last call, if its answer did not come; else None."""
        with self._lock:
            pending = self._sequence.pending
            return None if pending is None else self._exchange(pending, self.client._send)

    def close(self) -> int:
        """Frees all the session holds; answers the number of its requests."""
        if self._closed:
            return 0
        num_requests = self._call(calls.close_session())
        self._closed = True
        return num_requests

    def __enter__(self) -> Session:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        if exc_type is None:
            self.close()
        else:
            with contextlib.suppress(KVDepotError):
                self.close()

    def _call(self, call: Call[Result], send: Callable[[Call[Any]], Any] | None = None) -> Result:
        """Settles what is pending, then does ``call``, one at a time."""
        if self._closed:
            raise FailedPrecondition("the session is closed", reason="SESSION_CLOSED")
        with self._lock:
            if self._sequence.pending is not None:
                self._settle(self._sequence.pending)
            self._sequence.begin(call)
            return self._exchange(call, send or self.client._send)

    def _settle(self, pending: Call[Any]) -> None:
        try:
            self._exchange(pending, self.client._send)
        except KVDepotError as error:
            if self._sequence.pending is not None:
                raise unsettled(error) from None
            # Else its own error, which its caller was spared: it had no effect.

    def _exchange(self, call: Call[Result], send: Callable[[Call[Any]], Any]) -> Result:
        while True:
            try:
                reply = send(call)
            except KVDepotError as error:
                if self._sequence.failed(error):
                    continue
                raise
            self._sequence.succeeded()
            return call.read(reply)
