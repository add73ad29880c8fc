"""The RPCs of a day against an empty echo: two servers, one kind of client, in turn."""

from __future__ import annotations

import gc
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from random import Random
from time import perf_counter
from typing import Any

import grpc

from benchmarks.pairs import Row, Samples, Settings, compare
from benchmarks.workloads import (
    BLOCK_SIZE,
    DECODE_REQUESTS,
    DECODE_TOKENS,
    PROMPT_TOKENS,
)
from kvclient.replay.server import own_server
from kvdepot.v1 import cache_pb2 as pb
from kvdepot.v1 import cache_pb2_grpc, types_pb2

ROOT = Path(__file__).resolve().parents[1]
CALLS = ("GetComputedBlocks", "AllocateSlots", "CacheBlocks", "Free")
UNARY_TARGET = 1.25
NUM_CYCLES = 60
NUM_STEPS = 100


def timed(samples: list[float], call: Callable[..., Any], *arguments: Any) -> Any:
    """What ``call`` answers; its seconds go to ``samples``."""
    began = perf_counter()
    answer = call(*arguments)
    samples.append(perf_counter() - began)
    return answer


class Scheduler:
    """One session, over the generated stubs."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.stub: Any = cache_pb2_grpc.KVCacheServiceStub(channel)
        opened = self.stub.OpenSession(pb.OpenSessionRequest())
        self.session_id, self.epoch = opened.session_id, opened.epoch
        self.op_seqs = count(1)
        self.numbers = count()
        self.random = Random(0)

    def context(self) -> types_pb2.CallContext:
        """Of the next call."""
        op_seq = next(self.op_seqs)
        return types_pb2.CallContext(session_id=self.session_id, epoch=self.epoch, op_seq=op_seq)

    def content(self, num_tokens: int) -> pb.RequestContent:
        """A request of random tokens; made in no time, as an echo is."""
        return pb.RequestContent(tokens=self.random.randbytes(4 * num_tokens))

    def cycle(self) -> tuple[Any, ...]:
        """The requests of one prompt that comes, is computed and ends: one of each of CALLS."""
        name = f"r{next(self.numbers)}"
        slots = pb.SlotRequest(request_id=name, num_new_tokens=PROMPT_TOKENS)
        return (
            pb.GetComputedBlocksRequest(
                context=self.context(), request_id=name, content=self.content(PROMPT_TOKENS)
            ),
            pb.AllocateSlotsRequest(context=self.context(), slots=slots),
            pb.CacheBlocksRequest(
                context=self.context(), request_id=name, num_computed_tokens=PROMPT_TOKENS
            ),
            pb.FreeRequest(context=self.context(), request_id=name, mode=pb.FREE_MODE_FINISH),
        )

    def cycles(self, num_cycles: int) -> list[Samples]:
        """The samples of each of CALLS. Made before, the calls follow one another like echoes."""
        columns = tuple((getattr(self.stub, name), list[float]()) for name in CALLS)
        for cycle in [self.cycle() for _ in range(num_cycles)]:
            for (call, samples), request in zip(columns, cycle, strict=True):
                timed(samples, call, request)
        return [samples for _, samples in columns]

    def admit(self, num_requests: int) -> array[int]:
        """Handles of new running requests, each with DECODE_TOKENS tokens computed."""
        handles = array("i")
        for _ in range(num_requests):
            slots = pb.SlotRequest(
                request_id=f"r{next(self.numbers)}",
                content=self.content(DECODE_TOKENS + len(handles) % BLOCK_SIZE),
            )
            reply = self.stub.AllocateSlots(
                pb.AllocateSlotsRequest(context=self.context(), slots=slots)
            )
            assert reply.result.outcome == pb.OUTCOME_OK, reply
            handles.append(reply.result.handle)
        return handles

    def free(self, handles: array[int]) -> None:
        """End requests."""
        run = pb.Run(kind=pb.OPERATION_KIND_FREE, count=len(handles))
        columns = pb.FreeColumns(handles=handles.tobytes())
        self.stub.Step(
            pb.StepRequest(
                context=self.context(), runs=[run], on_no_fit=pb.ON_NO_FIT_STOP, free=columns
            )
        )


class Stream:
    """A bidirectional stream, one message at a time."""

    def __init__(self, method: Callable[[Any], Any]) -> None:
        self.requests: SimpleQueue[Any] = SimpleQueue()
        self.replies = method(iter(self.requests.get, None))

    def call(self, request: Any) -> Any:
        """The answer to one message."""
        self.requests.put(request)
        return next(self.replies)

    def close(self) -> None:
        """End it."""
        self.requests.put(None)
        for _ in self.replies:
            pass


def decode_steps(
    scheduler: Scheduler, num_steps: int, num_requests: int = DECODE_REQUESTS
) -> list[Samples]:
    """One token more for each request, in one Step; blocks are cached as they fill."""
    handles = scheduler.admit(num_requests)
    computed = array("i", [DECODE_TOKENS + i % BLOCK_SIZE for i in range(num_requests)])
    ones = array("i", [1] * num_requests).tobytes()
    run = pb.Run(kind=pb.OPERATION_KIND_GROW, count=num_requests)
    tokens = array("I", range(num_requests)).tobytes()
    stream = Stream(scheduler.stub.StepStream)
    samples: list[float] = []
    for _ in range(num_steps):
        columns = pb.GrowColumns(
            handles=handles.tobytes(),
            num_computed_tokens=computed.tobytes(),
            num_new_tokens=ones,
            token_offsets=computed.tobytes(),
            token_counts=ones,
            tokens=tokens,
        )
        request = pb.StepRequest(
            context=scheduler.context(), runs=[run], on_no_fit=pb.ON_NO_FIT_STOP, grow=columns
        )
        reply = timed(samples, stream.call, request)
        assert not reply.grow.outcomes and not reply.errors, reply
        computed = array("i", [num_tokens + 1 for num_tokens in computed])
    stream.close()
    scheduler.free(handles)
    return [samples]


def empty_steps(scheduler: Scheduler, num_steps: int) -> list[Samples]:
    """Steps that hold nothing."""
    stream = Stream(scheduler.stub.StepStream)
    samples: list[float] = []
    for _ in range(num_steps):
        timed(samples, stream.call, pb.StepRequest(context=scheduler.context()))
    stream.close()
    return [samples]


def children() -> list[int]:
    """Processes that this one started, the oldest first."""
    own = Path("/proc/self/task")
    return [int(pid) for task in own.iterdir() for pid in (task / "children").read_text().split()]


def cpu_seconds(pid: int) -> float:
    """What the threads of a process have run so far, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def server_cpu(pid: int, measure: Callable[[], list[Samples]]) -> Callable[[], list[Samples]]:
    """The same burst, of which the one sample is the CPU time that a call took in the server."""

    def burst() -> list[Samples]:
        began = cpu_seconds(pid)
        num_calls = sum(map(len, measure()))
        return [[(cpu_seconds(pid) - began) / num_calls]]

    return burst


@contextmanager
def echo_server() -> Iterator[str]:
    """Runs one; gives its target."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.echo"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def rows(settings: Settings) -> Iterator[Row]:
    """The rows, as they are measured."""
    num_cycles, num_steps = settings.samples(NUM_CYCLES), settings.samples(NUM_STEPS)
    with (
        own_server(["--no-memory", "--num-blocks", "65536"]) as target,
        echo_server() as echo_target,
        grpc.insecure_channel(target) as channel,
        grpc.insecure_channel(echo_target) as echo_channel,
    ):
        scheduler = Scheduler(channel)
        own_pid, echo_pid = children()[-2:]
        echo = echo_channel.unary_unary("/benchmarks.Echo/Unary")
        echo_stream = echo_channel.stream_stream("/benchmarks.Echo/Stream")

        def echoes() -> list[Samples]:
            samples: list[float] = []
            for _ in range(num_cycles * len(CALLS)):
                timed(samples, echo, b"")
            return [samples]

        def stream_echoes() -> list[Samples]:
            samples: list[float] = []
            stream = Stream(echo_stream)
            for _ in range(num_steps):
                timed(samples, stream.call, b"")
            stream.close()
            return [samples]

        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            yield from compare(
                [f"rpc: {name} of 1024 tokens (empty unary echo)" for name in CALLS],
                lambda: scheduler.cycles(num_cycles),
                lambda: echoes() * len(CALLS),
                settings,
                target=UNARY_TARGET,
            )
            yield from compare(
                ["rpc: a call of these, CPU time of the server (empty unary echo)"],
                server_cpu(own_pid, lambda: scheduler.cycles(num_cycles)),
                server_cpu(echo_pid, echoes),
                settings,
            )
            yield from compare(
                ["rpc: StepStream, empty Step (empty stream echo)"],
                lambda: empty_steps(scheduler, num_steps),
                stream_echoes,
                settings,
                target=1.3,
            )
            yield from compare(
                ["rpc: StepStream, empty Step, CPU time of the server (empty stream echo)"],
                server_cpu(own_pid, lambda: empty_steps(scheduler, num_steps)),
                server_cpu(echo_pid, stream_echoes),
                settings,
            )
            yield from compare(
                [f"rpc: StepStream, {DECODE_REQUESTS} requests decode (empty stream echo)"],
                lambda: decode_steps(scheduler, num_steps),
                stream_echoes,
                settings,
            )
        finally:
            gc.enable()
            gc.unfreeze()
