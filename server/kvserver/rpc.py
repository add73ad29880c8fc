"""What every RPC goes through: decoding, error mapping, and its counts. No interceptors."""

from __future__ import annotations

import asyncio
import contextlib
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from kvcore.errors import ResourceExhausted
from kvserver.errors import Failure, failure
from kvserver.fields import FIELD_BYTES_MIN, FIELDS_FEW, require_few_fields
from kvserver.unread import LARGE_BYTES, SMALL, UnreadReplies

Request = TypeVar("Request", bound=Message)
# Subscripted for the type checker only: grpc's own classes are not generic.
Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"

DURATION_BOUNDS_SECONDS = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
_ABORT_SECONDS = 1.0
_STALLED = "STALLED"


class RpcCounts:
    """Calls of one method by status code, and how long the server took. Plain numbers."""

    __slots__ = ("buckets", "codes", "method", "seconds_total")

    def __init__(self, method: str) -> None:
        self.method = method
        self.codes: Counter[str] = Counter()
        self.buckets = [0] * (len(DURATION_BOUNDS_SECONDS) + 1)
        self.seconds_total = 0.0

    def add(self, code: str, seconds: float) -> None:
        """Count one call."""
        self.codes[code] += 1
        self.buckets[bisect_left(DURATION_BOUNDS_SECONDS, seconds)] += 1
        self.seconds_total += seconds


class Rpcs:
    """Makes the handlers of one server; ``counts`` holds one entry a method."""

    def __init__(
        self,
        epoch: str,
        *,
        streams_max: int,
        unread_bytes_max: float = math.inf,
        message_bytes_max: float = math.inf,
    ) -> None:
        self.counts: dict[str, RpcCounts] = {}
        # Open now, of all methods together.
        self.num_streams = 0
        self._streams_max = streams_max
        self._epoch = epoch
        self.unread = UnreadReplies(unread_bytes_max)
        self._fields_max = max(FIELDS_FEW, message_bytes_max / FIELD_BYTES_MIN)

    def stream(self) -> AbstractContextManager[None]:
        """One more stream, open until the context ends. ResourceExhausted if it is too many."""
        if self.num_streams >= self._streams_max:
            raise ResourceExhausted(
                f"{self.num_streams} streams are open, the maximum",
                reason="TOO_MANY_STREAMS",
                retryable=True,
            )
        return self._stream()

    @contextmanager
    def _stream(self) -> Iterator[None]:
        self.num_streams += 1
        try:
            yield
        finally:
            self.num_streams -= 1

    def failure(self, error: Exception, method: str) -> Failure:
        """The status of ``error`` in a call of ``method``."""
        return failure(error, method=method, epoch=self._epoch)

    def parser(self, message: type[Request]) -> Callable[[bytes], Request]:
        """Reads messages. ResourceExhausted for one of too many fields."""
        parse, descriptor, fields_max = message.FromString, message.DESCRIPTOR, self._fields_max
        few_bytes = 2 * fields_max  # each field has two at least

        def read(raw: bytes) -> Request:
            if len(raw) > few_bytes:
                require_few_fields(raw, descriptor, int(fields_max))
            return parse(raw)

        return read

    def count(self, method: str) -> RpcCounts:
        """The counts of ``method``."""
        return self.counts.setdefault(method, RpcCounts(method))

    def unary(
        self,
        method: str,
        request: type[Request],
        answer: Callable[[Request], bytes | Awaitable[bytes]],
    ) -> Handler:
        """A unary RPC that ``answer`` answers, with serialized bytes."""
        may_be_large = method not in SMALL
        counts, unread = self.count(method), self.unread
        parse = self.parser(request)

        async def call(raw: bytes, context: Context) -> bytes:
            began = perf_counter()
            try:
                if may_be_large:
                    unread.require_room(context)
                answered = answer(parse(raw))
                reply = answered if isinstance(answered, bytes) else await answered
            except asyncio.CancelledError:
                counts.add("CANCELLED", perf_counter() - began)
                raise
            except Exception as error:
                failed = self.failure(error, method)
                counts.add(failed.code.name, perf_counter() - began)
                await failed.abort(context)
            counts.add("OK", perf_counter() - began)
            if len(reply) > LARGE_BYTES and (task := asyncio.current_task()) is not None:
                # The task sends the reply, and ends when that is done.
                task.add_done_callback(unread.hold(context, len(reply)))
            return reply

        return grpc.unary_unary_rpc_method_handler(call)

    def server_stream(
        self,
        method: str,
        request: type[Request],
        serve: Callable[[Request, Context], Awaitable[None]],
    ) -> Handler:
        """A server-streaming RPC; ``serve`` writes serialized bytes to the context."""
        counts = self.count(method)
        parse = self.parser(request)

        async def call(raw: bytes, context: Context) -> None:
            began = perf_counter()
            code = "CANCELLED"
            try:
                with self.stream():
                    await serve(parse(raw), context)
                code = "OK"
            except grpc.aio.InternalError:
                return  # a write to a client that is gone
            except Exception as error:
                failed = self.failure(error, method)
                code = failed.code.name
                if getattr(error, "reason", None) != _STALLED:
                    await failed.abort(context)
                # A client that reads no more is told when it does; nobody waits for that.
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(failed.abort(context), _ABORT_SECONDS)
            finally:
                counts.add(code, perf_counter() - began)

        return grpc.unary_stream_rpc_method_handler(call)


async def write(context: Context, message: bytes, *, seconds: float) -> None:
    """Send ``message``. ResourceExhausted if the client takes nothing for so long."""
    try:
        await asyncio.wait_for(context.write(message), seconds)
    except asyncio.TimeoutError:
        raise _stalled(seconds) from None


class StallWatch:
    """Sends the messages of one stream, all from one task. ``close`` it when the stream ends.

    As ``write``, with one timer for all messages: ``wait_for`` makes a task and a timer of each.
    """

    def __init__(self, context: Context, seconds: float) -> None:
        self._context = context
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        # What writes, and until when it may take.
        self._task: asyncio.Task[Any] | None = None
        self._until = math.inf
        self._stalled = False
        self._timer = self._loop.call_later(seconds, self._look)

    async def write(self, message: bytes) -> None:
        """Send ``message``. ResourceExhausted if the client takes nothing for so long."""
        self._task = asyncio.current_task()
        self._until = self._loop.time() + self._seconds
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            if self._stalled:
                raise _stalled(self._seconds) from None
            raise
        self._until = math.inf

    def close(self) -> None:
        """No write is watched any more."""
        self._timer.cancel()

    def _look(self) -> None:
        left = self._until - self._loop.time()
        if left <= 0 and self._task is not None:
            self._stalled = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(min(left, self._seconds), self._look)


def _stalled(seconds: float) -> ResourceExhausted:
    return ResourceExhausted(f"nothing was read for {seconds:g} s", reason=_STALLED, retryable=True)


async def write_then(context: Context, message: bytes, finish: Callable[[], None]) -> None:
    """Send ``message``; ``finish`` runs while it travels, before anybody else has a turn."""
    sending = context.write(message).__await__()
    try:
        waited_for = next(sending)
    except StopIteration:
        finish()
        return
    except BaseException:
        finish()
        raise
    finish()
    await _Rest(waited_for, sending)


class _Rest:
    """What is left to await of a coroutine that has run up to its first await."""

    __slots__ = ("_sending", "_waited_for")

    def __init__(self, waited_for: Any, sending: Generator[Any, Any, None]) -> None:
        self._waited_for = waited_for
        self._sending = sending

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            yield self._waited_for
        except BaseException as error:
            self._sending.throw(error)
            raise
        yield from self._sending


def register(server: grpc.aio.Server, service: str, handlers: dict[str, Any]) -> None:
    """Serve ``handlers`` under the full name of ``service``."""
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
