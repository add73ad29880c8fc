"""The asyncio client: the calls of ``kvclient.client``, awaited. One event loop a process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import grpc

from kvclient import calls, convert
from kvclient.calls import Call, Opened
from kvclient.channel import (
    BACKOFFS_S,
    MAX_MESSAGE_BYTES,
    TIMEOUT_S,
    Stubs,
    channel_options,
)
from kvclient.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    KVDepotError,
    Unavailable,
    from_rpc_error,
)
from kvclient.events import EventBatch
from kvclient.sequence import Sequence as OpSequence
from kvclient.sequence import unsettled
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

    def __aiter__(self) -> AsyncIterator[Result]:
        return self

    async def __anext__(self) -> Result:
        return await self._items.__anext__()

    async def _read(self, read: Callable[[Any], Iterable[Result]]) -> AsyncIterator[Result]:
        try:
            async for message in self._call:
                for item in read(message):
                    yield item
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def close(self) -> None:
        """Ends the stream."""
        self._call.cancel()

    async def __aenter__(self) -> Stream[Result]:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()


class Client:
    """One server, at ``host:port`` or ``unix:/path``; made inside the event loop.

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
        self._stubs = Stubs(grpc.aio.insecure_channel(target, channel_options(max_message_bytes)))

    async def open_session(self, name: str = "", fingerprint: str = "") -> Session:
        """A new session; with ``fingerprint``, only on a pool that has it."""
        return Session(self, await self._invoke(calls.open_session(name, fingerprint)))

    async def describe_pool(self) -> PoolDescription:
        """What the server's pool is, and where its bytes are."""
        return await self._invoke(calls.describe_pool())

    async def stats(self) -> Stats:
        """The server's figures."""
        return await self._invoke(calls.get_stats())

    async def audit(self) -> AuditReport:
        """Has the server check every invariant."""
        return await self._invoke(calls.audit())

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

    async def stream_events(
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
        with contextlib.suppress(grpc.RpcError):
            await call.initial_metadata()
        return Stream(call, lambda message: (convert.event_batch(message),))

    async def close(self) -> None:
        """Ends every call and stream. Sessions stay open on the server: close them first."""
        self._stubs.closed = True
        await self._stubs.channel.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _invoke(self, call: Call[Result]) -> Result:
        return call.read(await self._send(call))

    async def _send(self, call: Call[Any]) -> Any:
        method = self._stubs.method(call.service, call.method)
        try:
            return await method(call.request, timeout=self.timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


class Session:
    """One scheduler's session, as ``kvclient.client.Session``. Calls of several tasks take turns.

    A call that raised Unavailable or DeadlineExceeded, or was cancelled, may or may not
    have been done; by the time of the next call (or of ``settle``) it has been, once.
    If that next call cannot reach the server either, it is not begun, and raises
    Unavailable with the reason UNSETTLED.
    """

    def __init__(self, client: Client, opened: Opened) -> None:
        self.client = client
        self.session_id = opened.session_id
        self.epoch = opened.epoch
        self.pool = opened.pool
        self.reply_window = opened.reply_window
        self._sequence = OpSequence(opened.session_id, opened.epoch)
        self._lock = asyncio.Lock()
        self._closed = False

    async def get_computed_blocks(
        self,
        request_id: str,
        content: Content | Tokens | None = None,
        *,
        mark: StepMark | None = None,
    ) -> Hit:
        """The longest cached prefix; introduces or extends the request by ``content``."""
        return await self._call(calls.get_computed_blocks(request_id, content, mark))

    async def allocate_slots(
        self, slots: SlotRequest, *, mark: StepMark | None = None
    ) -> SlotResult:
        """Slots for one request; that it does not fit is an outcome, not an error."""
        return await self._call(calls.allocate_slots(slots, mark))

    async def cache_blocks(
        self,
        request_id: str,
        num_computed_tokens: int,
        content: Content | Tokens | None = None,
        *,
        mark: StepMark | None = None,
    ) -> bool:
        """Registers full blocks and confirms their bytes; False for an unknown request."""
        return await self._call(calls.cache_blocks(request_id, num_computed_tokens, content, mark))

    async def free(
        self,
        request_id: str,
        mode: FreeMode = FreeMode.FINISH,
        *,
        did_not_run: bool = False,
        mark: StepMark | None = None,
    ) -> FreeResult:
        """Gives the request's blocks back, or detaches them; a no-op if it is unknown."""
        return await self._call(calls.free(request_id, mode, did_not_run, mark))

    async def return_blocks(self, ticket: int, *, mark: StepMark | None = None) -> int:
        """Gives detached blocks back; answers how many."""
        return await self._call(calls.return_blocks(ticket, mark))

    async def reset_prefix_cache(self, *, mark: StepMark | None = None) -> int:
        """Empties the cache; the new generation. FailedPrecondition while blocks are in use."""
        return await self._call(calls.reset_prefix_cache(mark))

    async def step(self, step: Step, *, mark: StepMark | None = None) -> StepResult:
        """All operations of one scheduler step."""
        return await self._call(calls.step(step, mark))

    def step_stream(self) -> StepStream:
        """A stream on which steps cost less."""
        return StepStream(self)

    async def settle(self) -> Any:
        """The result of the last call, if its answer did not come; else None."""
        async with self._lock:
            pending = self._sequence.pending
            return None if pending is None else await self._exchange(pending, self.client._send)

    async def close(self) -> int:
        """Frees all the session holds; answers the number of its requests."""
        if self._closed:
            return 0
        num_requests = await self._call(calls.close_session())
        self._closed = True
        return num_requests

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        if exc_type is None:
            await self.close()
        else:
            with contextlib.suppress(KVDepotError):
                await self.close()

    async def _call(
        self, call: Call[Result], send: Callable[[Call[Any]], Awaitable[Any]] | None = None
    ) -> Result:
        """Settles what is pending, then does ``call``, one at a time."""
        if self._closed:
            raise FailedPrecondition("the session is closed", reason="SESSION_CLOSED")
        async with self._lock:
            if self._sequence.pending is not None:
                await self._settle(self._sequence.pending)
            self._sequence.begin(call)
            return await self._exchange(call, send or self.client._send)

    async def _settle(self, pending: Call[Any]) -> None:
        try:
            await self._exchange(pending, self.client._send)
        except KVDepotError as error:
            if self._sequence.pending is not None:
                raise unsettled(error) from None
            # Else its own error, which its caller was spared: it had no effect.

    async def _exchange(
        self, call: Call[Result], send: Callable[[Call[Any]], Awaitable[Any]]
    ) -> Result:
        while True:
            try:
                reply = await send(call)
            except KVDepotError as error:
                if self._sequence.failed(error):
                    continue
                raise
            self._sequence.succeeded()
            return call.read(reply)


class StepStream:
    """Steps of one session, one at a time. Opens when first used, again when it broke.

    A Step whose answer a broken stream lost is sent again with its number.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._timeout_s = session.client.timeout_s
        self._stream: Any = None
        self._closed = False

    async def call(self, step: Step, *, mark: StepMark | None = None) -> StepResult:
        """The answer to one Step."""
        if self._closed:
            raise FailedPrecondition("the stream is closed", reason="STREAM_CLOSED")
        return await self._session._call(calls.step(step, mark), self._send)

    async def close(self) -> None:
        """Ends the stream; the session stays."""
        self._closed = True
        self._drop()

    async def __aenter__(self) -> StepStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _send(self, call: Call[Any]) -> Any:
        for backoff_s in BACKOFFS_S:
            try:
                return await self._send_once(call)
            except Unavailable:
                await asyncio.sleep(backoff_s)
        return await self._send_once(call)

    async def _send_once(self, call: Call[Any]) -> Any:
        if self._stream is None:
            stubs = self._session.client._stubs
            self._stream = stubs.method("KVCacheService", "StepStream")()
        stream = self._stream
        try:
            reply = await asyncio.wait_for(self._exchange(stream, call), self._timeout_s)
        except asyncio.TimeoutError:
            self._drop()
            raise DeadlineExceeded(
                f"no answer within {self._timeout_s} s", reason="DEADLINE_EXCEEDED"
            ) from None
        except grpc.RpcError as error:
            self._drop()
            raise from_rpc_error(error) from None
        except BaseException:
            self._drop()
            raise
        if reply.op_seq != call.request.context.op_seq:
            self._drop()
            raise InternalError(
                f"asked {call.request.context.op_seq}, answered {reply.op_seq}", reason="BAD_REPLY"
            )
        return reply

    @staticmethod
    async def _exchange(stream: Any, call: Call[Any]) -> Any:
        with contextlib.suppress(asyncio.InvalidStateError):  # ended; reading says why
            await stream.write(call.request)
        reply = await stream.read()
        if reply is grpc.aio.EOF:
            raise Unavailable("the server ended the stream", reason="STREAM_ENDED", retryable=True)
        return reply

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
