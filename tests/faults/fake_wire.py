"""A wire without sockets between kvclient.aio and a server's handlers. It loses things.

It stands where ``grpc.aio``'s channel does, so that the client is the real one; calls end
in the handlers that the server registers. Waits are the loop's, so that virtual time does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import grpc

Status = grpc.StatusCode

LATENCY_SECONDS = 0.0005
STRAY_SECONDS = 20.0
"""The longest that a request or its duplicate strays before it arrives."""


@dataclass(frozen=True)
class Faults:
    """Chances that something happens to one message."""

    lose_request: float = 0.0
    lose_reply: float = 0.0
    duplicate: float = 0.0
    stray: float = 0.0
    first_replies: bool = False
    """The first reply to each request is lost, and no other."""


class Aborted(Exception):
    """A handler ended its call with an error."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Any) -> None:
        super().__init__(details)
        self.code, self.details, self.trailing = code, details, tuple(trailing)

    def as_rpc_error(self) -> grpc.aio.AioRpcError:
        """As the client gets it."""
        return rpc_error(self.code, self.details, self.trailing)


def rpc_error(code: grpc.StatusCode, details: str, trailing: Any = ()) -> grpc.aio.AioRpcError:
    """An error as grpc.aio raises it."""
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details
    )


class _Sent(asyncio.Future[None]):
    """Tells of a reply when its handler begins to wait: what that does until then, nobody sees."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell

    def add_done_callback(self, *args: Any, **kwargs: Any) -> None:
        """The handler waits."""
        super().add_done_callback(*args, **kwargs)
        self._tell()
        self.set_result(None)


class Context:
    """A servicer context: of a unary call, or of a stream with its two queues.

    ``on_reply`` is told of a stream's replies as they are made, with their requests.
    """

    def __init__(self, on_reply: Callable[[bytes, bytes], None] | None = None) -> None:
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self.replies: asyncio.Queue[Any] = asyncio.Queue()
        self.last = b""
        self._on_reply = on_reply

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Any = ()) -> None:
        """End the call with an error."""
        raise Aborted(code, details, trailing)

    async def send_initial_metadata(self, _: Any) -> None:
        """Nobody looks at it."""

    async def read(self) -> Any:
        """The next request of a stream."""
        self.last = await self.requests.get()
        return self.last

    async def write(self, reply: bytes) -> None:
        """A reply of a stream."""
        assert self._on_reply is not None
        self.replies.put_nowait(reply)
        await _Sent(partial(self._on_reply, self.last, reply))

    def done(self) -> bool:
        """Never asked to hurry."""
        return False

    def cancelled(self) -> bool:
        """Never told."""
        return False


Tap = Callable[[str, bytes, "bytes | Aborted"], None]
"""Told of every unary call and Step that a handler answered: path, request, answer."""


class Wire:
    """The way to one server at a time; ``handlers`` None: nobody listens."""

    def __init__(self, handlers: dict[str, Any] | None, chance: Random, faults: Faults) -> None:
        self.handlers = handlers
        self.chance = chance
        self.faults = faults
        self.tap: Tap = lambda path, request, answer: None
        self.streams: set[_StreamCall] = set()
        self._answered: set[tuple[str, bytes]] = set()
        self._strays: set[asyncio.Task[Any]] = set()

    def channel(self, options: Any = ()) -> Channel:
        """A client's end."""
        return Channel(self, dict(options))

    def happens(self, chance: float) -> bool:
        """A draw; only faults that are asked for take one."""
        return chance > 0 and self.chance.random() < chance

    def loses_reply(self, path: str, raw: bytes) -> bool:
        """Whether the reply that was just made never comes."""
        if self.faults.first_replies and not path.endswith("OpenSession"):
            method = path.removesuffix("Stream")
            if (method, raw) not in self._answered:
                self._answered.add((method, raw))
                return True
        return self.happens(self.faults.lose_reply)

    async def deliver(self, path: str, raw: bytes) -> bytes | Aborted:
        """One request to its handler; an answer, or the error it ended in."""
        if self.handlers is None:
            raise rpc_error(Status.UNAVAILABLE, "connection refused")
        try:
            answer: bytes | Aborted = await self.handlers[path].unary_unary(raw, Context())
        except Aborted as aborted:
            answer = aborted
        self.tap(path, raw, answer)
        return answer

    def stray(self, path: str, raw: bytes) -> None:
        """A copy that arrives later, or never if the server is another one by then."""
        handlers, delay = self.handlers, self.chance.uniform(0, STRAY_SECONDS)

        async def arrive() -> None:
            await asyncio.sleep(delay)
            if self.handlers is handlers:
                await self.deliver(path, raw)

        task = asyncio.get_running_loop().create_task(arrive())
        self._strays.add(task)

    async def settle(self) -> None:
        """Wait until nothing strays any more; what a stray ran into is raised."""
        for task in sorted(self._strays, key=id):
            await task
        self._strays.clear()

    async def unary(self, path: str, raw: bytes) -> bytes:
        """One attempt at a unary call."""
        faults = self.faults
        await asyncio.sleep(LATENCY_SECONDS * self.chance.uniform(1, 2))
        if self.happens(faults.duplicate):
            self.stray(path, raw)
        if self.happens(faults.stray):  # it arrives after its caller gave up
            self.stray(path, raw)
            await asyncio.sleep(2 * STRAY_SECONDS)
        if self.happens(faults.lose_request):
            raise rpc_error(Status.UNAVAILABLE, "the connection broke before the server read")
        answer = await self.deliver(path, raw)
        if self.loses_reply(path, raw):
            raise rpc_error(Status.UNAVAILABLE, "the connection broke before the reply")
        await asyncio.sleep(LATENCY_SECONDS * self.chance.uniform(1, 2))
        if isinstance(answer, Aborted):
            raise answer.as_rpc_error()
        return answer


class Channel:
    """What the generated stubs need of a channel."""

    def __init__(self, wire: Wire, options: dict[str, Any]) -> None:
        self._wire = wire
        self._cut_until = 0.0
        config = json.loads(options.get("grpc.service_config", "{}"))
        self._policies = {
            (name["service"], name.get("method")): entry.get("retryPolicy")
            for entry in config.get("methodConfig", ())
            for name in entry["name"]
        }

    def cut_off(self, seconds: float) -> None:
        """Nothing comes through for so long."""
        self._cut_until = asyncio.get_running_loop().time() + seconds
        for stream in [stream for stream in self._wire.streams if stream.channel is self]:
            stream.fail(rpc_error(Status.UNAVAILABLE, "the connection broke"))

    @property
    def is_cut(self) -> bool:
        """Whether nothing comes through."""
        return asyncio.get_running_loop().time() < self._cut_until

    def unary_unary(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Any:
        """A unary call, retried as the service config says."""
        service, method = path.removeprefix("/").split("/")
        policy = self._policies.get((service, method), self._policies.get((service, None)))
        if (service, method) in self._policies:
            policy = self._policies[service, method]

        async def attempt_all(raw: bytes) -> bytes:
            attempts = policy["maxAttempts"] if policy else 1
            backoff = float(policy["initialBackoff"].rstrip("s")) if policy else 0.0
            while True:
                attempts -= 1
                try:
                    if self.is_cut:
                        await asyncio.sleep(LATENCY_SECONDS)
                        raise rpc_error(Status.UNAVAILABLE, "no route to the server")
                    return await self._wire.unary(path, raw)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not Status.UNAVAILABLE or not attempts:
                        raise
                await asyncio.sleep(backoff)
                backoff *= policy["backoffMultiplier"]

        async def call(request: Any, *, timeout: float | None = None, **_: Any) -> Any:
            raw = request_serializer(request)
            try:
                return response_deserializer(await asyncio.wait_for(attempt_all(raw), timeout))
            except asyncio.TimeoutError:
                raise rpc_error(Status.DEADLINE_EXCEEDED, "deadline exceeded") from None

        return call

    def stream_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Any:
        """A bidirectional stream."""
        return lambda **_: _StreamCall(self, path, (request_serializer, response_deserializer))

    def unary_stream(self, path: str, *_: Any, **__: Any) -> Any:
        """Not on this wire."""

        def call(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(path)

        return call

    async def close(self) -> None:
        """Nothing to end."""


class _StreamCall:
    """One stream, with a handler running at its other end."""

    def __init__(self, channel: Channel, path: str, convert: tuple[Any, Any]) -> None:
        self.channel = channel
        self._wire = wire = channel._wire
        self._path = path
        self._serialize, self._deserialize = convert
        self._error: grpc.aio.AioRpcError | None = None
        self._context = Context(lambda raw, reply: wire.tap(path, raw, reply))
        self._task: asyncio.Task[Any] | None = None
        wire.streams.add(self)
        if wire.handlers is None or channel.is_cut:
            self.fail(rpc_error(Status.UNAVAILABLE, "connection refused"))
        else:
            self._task = asyncio.get_running_loop().create_task(
                self._serve(wire.handlers[path].stream_stream)
            )

    async def _serve(self, handler: Any) -> None:
        try:
            await handler(None, self._context)
        except Aborted as aborted:
            self._wire.tap(self._path, self._context.last, aborted)
            self._context.replies.put_nowait(aborted)
        else:
            self._context.replies.put_nowait(grpc.aio.EOF)

    async def write(self, request: Any) -> None:
        """Send one message."""
        if self._error is not None:
            raise asyncio.InvalidStateError
        raw = self._serialize(request)
        await asyncio.sleep(LATENCY_SECONDS * self._wire.chance.uniform(1, 2))
        if self._wire.happens(self._wire.faults.lose_request):
            self.fail(rpc_error(Status.UNAVAILABLE, "the connection broke before the server read"))
            raise asyncio.InvalidStateError
        self._context.requests.put_nowait(raw)

    async def read(self) -> Any:
        """The next message."""
        if self._error is not None:
            raise self._error
        answer = await self._context.replies.get()
        if isinstance(answer, Aborted):
            self.fail(answer.as_rpc_error())
        elif isinstance(answer, grpc.aio.AioRpcError):
            self.fail(answer)
        elif answer is not grpc.aio.EOF and self._wire.loses_reply(self._path, self._context.last):
            self.fail(rpc_error(Status.UNAVAILABLE, "the connection broke before the reply"))
        if self._error is not None:
            raise self._error
        return answer if answer is grpc.aio.EOF else self._deserialize(answer)

    def fail(self, error: grpc.aio.AioRpcError) -> None:
        """The connection is gone."""
        if self._error is None:
            self._error = error
            self._context.replies.put_nowait(error)
        self.cancel()

    def cancel(self) -> None:
        """End it from this side."""
        self._wire.streams.discard(self)
        if self._task is not None:
            self._task.cancel()
