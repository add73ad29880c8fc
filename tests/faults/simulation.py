"""A server and its schedulers in one thread, in virtual time, on a wire that loses things.

All but the sockets is real: kvclient.aio with its retries, the handlers, the node, the
core. One seed decides everything, so a run can be repeated to the letter.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import grpc

import virtual_time
from fake_wire import Aborted, Faults, Wire
from judge import Judge
from kvclient.aio import Client, Session
from kvclient.calls import Call
from kvclient.errors import CacheLost, DeadlineExceeded, KVDepotError, Unavailable
from kvclient.values import StepMark
from kvcore.depot import Depot
from kvcore.spec import DepotConfig, FullAttentionSpec, KVCacheConfig, KVCacheGroup
from kvdepot.v1 import cache_pb2 as pb
from kvserver import cache
from kvserver.node import Node, SessionPolicy, TransferPolicy
from kvserver.publisher import Publisher
from kvserver.rpc import Rpcs
from model import Model
from model_state import Divergence
from traffic import Planned, plan

BLOCK_SIZE = 2
NUM_BLOCKS = 17
MAX_MODEL_LEN = 64
TIMEOUT_SECONDS = 2.0
LEASE_SECONDS = 5.0
QUARANTINE_SECONDS = 3.0
RESET_SECONDS = 300.0


@dataclass
class Trace:
    """What the server saw and said, without what differs from process to process."""

    lines: list[str] = field(default_factory=list)

    def add(self, at: float, method: str, request: Any, answer: Any) -> None:
        """One call that was answered."""
        said = answer.name if isinstance(answer, grpc.StatusCode) else _anonymous(answer)
        self.lines.append(f"{at:.6f} {method} {_anonymous(request)} {said}")

    def digest(self) -> str:
        """Equal for equal traces."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()


_NAMES = re.compile(r'(session_id|epoch): "[^"]*"')


def _anonymous(message: Any) -> str:
    return _NAMES.sub(r"\1", " ".join(str(message).split()))


class Simulation:
    """One run; ``seed`` decides all of it."""

    def __init__(self, seed: int, faults: Faults, *, num_schedulers: int = 3) -> None:
        self.chance = Random(seed)
        self.model = Model(
            NUM_BLOCKS,
            BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            quarantine_seconds=QUARANTINE_SECONDS,
            reset_deadline_seconds=RESET_SECONDS,
        )
        self.judge = Judge(self.model)
        self.trace = Trace()
        self.node = make_node()
        self.wire = Wire(handlers_of(self.node), Random(self.chance.random()), faults)
        self.wire.tap = self._see
        self.num_schedulers = num_schedulers
        self.num_calls = 0
        self.num_lost = 0
        self._workers: list[asyncio.Task[None]] = []
        self.divergence: Exception | None = None

    def run(self, num_calls: int) -> Trace:
        """So many calls of each scheduler, and then the end of all of them."""

        async def everything() -> None:
            loop = asyncio.get_running_loop()
            tasks = [
                loop.create_task(self._schedule(number, num_calls))
                for number in range(self.num_schedulers)
            ]
            for task in tasks:
                await task
            await self.wire.settle()

        return self._run(everything())

    def run_in_turns(self, num_calls: int) -> Trace:
        """So many calls, of one scheduler after the other; they stay open."""

        async def everything() -> None:
            chance = Random(self.chance.random())
            async with Client("wire", timeout_s=TIMEOUT_SECONDS) as client:
                sessions = [
                    await client.open_session(f"scheduler {number}")
                    for number in range(self.num_schedulers)
                ]
                streams = [session.step_stream() for session in sessions]
                for number in range(num_calls):
                    session = sessions[number % len(sessions)]
                    judged = self.judge.sessions[session.session_id]
                    planned = plan(
                        chance,
                        self.model,
                        judged.session,
                        pipelines=number % 2 == 0,
                        hurries=False,
                    )
                    stream = streams[number % len(sessions)]
                    await self._call(session, planned, stream if planned.method == "Step" else None)

        return self._run(everything())

    def _run(self, work: Coroutine[Any, Any, None]) -> Trace:
        with mock.patch.object(
            grpc.aio, "insecure_channel", lambda target, options: self.wire.channel(options)
        ):
            virtual_time.run(self._to_the_end(work))
        self.check()
        return self.trace

    async def _to_the_end(self, work: Coroutine[Any, Any, None]) -> None:
        await work
        for worker in self._workers:
            await worker
        self._pass_time()

    def check(self) -> None:
        """Raise what diverged, and compare the server's state with the model's."""
        if self.divergence is not None:
            raise self.divergence
        self.judge.check_stats(StatsOf(self.node.depot.stats()), self.node.depot.audit())

    def _see(self, path: str, raw: bytes, answer: bytes | Aborted) -> None:
        """A call was answered at the server: in this order everything happened."""
        method = path.rsplit("/", 1)[1]
        method = "Step" if method == "StepStream" else method
        request = getattr(pb, f"{method}Request").FromString(raw)
        said: Any = (
            answer.code
            if isinstance(answer, Aborted)
            else getattr(pb, f"{method}Response").FromString(answer)
        )
        now = asyncio.get_running_loop().time()
        self.trace.add(now, method, request, said)
        if said is grpc.StatusCode.UNAVAILABLE or self.divergence is not None:
            return
        try:
            self.model.pass_time(now)
            if method == "OpenSession":
                self.judge.opened(request.name, said)
            else:
                self.judge.see(method, request, said)
            self.judge.check_stats(StatsOf(self.node.depot.stats()), self.node.depot.audit())
        except Exception as error:  # told when the run ends, not to the server's handler
            self.divergence = error

    async def _schedule(self, number: int, num_calls: int) -> None:
        """One scheduler: opens, calls, and at times closes, or dies without a word."""
        chance = Random(f"{self.chance.random()} {number}")
        calls_left = num_calls
        while calls_left and self.divergence is None:
            life = min(calls_left, chance.randint(1, 2 * num_calls))
            calls_left -= life
            await self._live(number, chance, life, dies=chance.random() < 0.3)

    async def _live(self, number: int, chance: Random, num_calls: int, *, dies: bool) -> None:
        async with Client("wire", timeout_s=TIMEOUT_SECONDS) as client:
            session = await self._open(client, number)
            stream = session.step_stream()
            pipelines = chance.random() < 0.7
            for _ in range(num_calls):
                if self.divergence is not None:
                    return
                if session.lost is not None:
                    self.num_lost += 1
                    session = await self._open(client, number)
                    stream = session.step_stream()
                if chance.random() < 0.02:
                    client._stubs.channel.cut_off(chance.uniform(0, 3 * LEASE_SECONDS))
                judged = self.judge.sessions[session.session_id]
                planned = plan(chance, self.model, judged.session, pipelines=pipelines)
                by_stream = planned.method == "Step" and chance.random() < 0.7
                await self._call(session, planned, stream if by_stream else None)
                await asyncio.sleep(chance.expovariate(1000))
            if not dies:
                await _insist(session.close)

    async def _open(self, client: Client, number: int) -> Session:
        """A session, if need be the second: the first one's answer may be lost."""
        session: Session | None = None
        while session is None:
            session = await _insist(lambda: client.open_session(f"scheduler {number}"))
        if self.chance.random() < 0.4:
            self._employ(session)
        return session

    def _employ(self, session: Session) -> None:
        """A worker of the session, that may live longer than it. It is attached without a wire."""
        depot_session = self.node.depot.sessions.get(session.session_id)
        if depot_session is None:
            return
        worker = self.node.attach_worker(depot_session, "worker")
        judged = self.judge.sessions[session.session_id]
        self._pass_time()
        self.model.attach(judged.session)
        life = self.chance.uniform(0, 2 * LEASE_SECONDS)

        async def leave() -> None:
            await asyncio.sleep(life)
            self._pass_time()
            self.node.detach_worker(worker)
            self.model.detach(judged.session)

        self._workers.append(asyncio.get_running_loop().create_task(leave()))

    def _pass_time(self) -> None:
        self.model.pass_time(asyncio.get_running_loop().time())

    async def _call(self, session: Session, planned: Planned, stream: Any) -> None:
        """One call, until its answer is known; it must be the one that the server gave."""
        judged = self.judge.sessions[session.session_id]
        op_seq = judged.expected
        mark = None if planned.mark is None else StepMark(*planned.mark)
        call: Call[Any] = Call(
            "KVCacheService", planned.method, planned.request, lambda reply: reply, mark
        )
        self.num_calls += 1
        code: Any = None
        try:
            if stream is None:
                answer = await session._call(call)
            else:
                answer = await session._result(await session._begin(call, stream))
        except (Unavailable, DeadlineExceeded):
            answer = await _insist(session.settle)
        except CacheLost:
            answer = None
        except KVDepotError as error:
            answer, code = None, type(error).__name__
        if self.divergence is not None:
            return
        if session.lost is not None:
            # The client gives up its lease at once, the server when it hears nothing.
            told = session.lost.reason != "LEASE_EXPIRED"
            if told and judged.session in self.model.sessions:
                raise Divergence(f"{judged.session.name} thinks that it is lost: {session.lost}")
            return
        if judged.expected != op_seq + 1:
            raise Divergence(f"call {op_seq} was done {judged.expected - op_seq} times")
        given = judged.answers[op_seq][1]
        if answer is not None and answer != given:
            raise Divergence(f"call {op_seq} was answered {given}, the client has {answer}")
        if code is not None and not isinstance(given, grpc.StatusCode):
            raise Divergence(f"call {op_seq} was answered {given}, the client raises {code}")


async def _insist(call: Any) -> Any:
    """The answer, however often it takes; an error of the server's is one, None."""
    while True:
        try:
            return await call()
        except (Unavailable, DeadlineExceeded):
            continue
        except KVDepotError:
            return None


class StatsOf:
    """The core's figures under GetStats' names."""

    def __init__(self, stats: Any) -> None:
        self._stats = stats
        self.blocks = stats

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stats, name)


def make_node(**options: Any) -> Node:
    """A node of its own, without memory."""
    spec = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=16)
    config = DepotConfig(
        KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(("layer",), spec),)),
        max_model_len=MAX_MODEL_LEN,
        **options,
    )
    depot = Depot(config)
    publisher = Publisher(
        depot.epoch,
        history_events=1024,
        history_bytes=1 << 20,
        queue_batches=16,
        queue_bytes=1 << 22,
        subscribers_max=16,
        heartbeat_seconds=60.0,
    )
    policy = SessionPolicy(
        reply_window=8,
        reply_window_bytes=1 << 20,
        reply_windows_bytes=1 << 24,
        ended_sessions_kept=64,
        lease_ttl_seconds=LEASE_SECONDS,
        lease_ttl_seconds_max=LEASE_SECONDS,
        quarantine_seconds=QUARANTINE_SECONDS,
        reset_deadline_seconds=RESET_SECONDS,
        worker_heartbeat_seconds=1.0,
    )
    transfer_policy = TransferPolicy(
        lease_ttl_seconds=LEASE_SECONDS,
        lease_ttl_seconds_max=LEASE_SECONDS,
        import_seconds_max=LEASE_SECONDS,
    )
    return Node(depot, None, publisher, policy, transfer_policy)


def handlers_of(node: Node) -> dict[str, Any]:
    """The handlers that a server registers, by path."""
    service = cache.CacheService(
        node, Rpcs(node.depot.epoch, streams_max=64), step_operations_max=1024
    )
    return {f"/{cache.SERVICE}/{name}": handler for name, handler in service.handlers().items()}
