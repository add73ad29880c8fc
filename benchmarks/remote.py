"""What a remote scheduler pays, against vLLM's manager in the scheduler's own process.

Both sides begin with a list of token ids and hash it; ours also builds the message and
reads the answer. Both prefix caches are empty before each burst. By the wall clock, on one
StepStream.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator
from random import Random
from time import perf_counter

import grpc

from benchmarks.core import vllm_worker
from benchmarks.pairs import Row, Samples, Settings, compare
from benchmarks.rpc import Scheduler, Stream, decode_steps
from benchmarks.workloads import DECODE_REQUESTS, LONG_TOKENS, PROMPT_TOKENS, VOCABULARY
from kvclient.replay.server import own_server
from kvdepot.v1 import cache_pb2 as pb

NUM_BLOCKS = 131_072
# Requests a Step; prompt tokens; whether all hit; samples; vLLM's workload; target; unit.
ADMISSIONS = (
    (1, PROMPT_TOKENS, False, 100, "hash and admit 0%", 3.0, "us"),
    (1, PROMPT_TOKENS, True, 100, "hash and admit 100%", 3.0, "us"),
    (16, PROMPT_TOKENS, False, 20, "hash and admit 0%", 1.0, "us"),
    (16, PROMPT_TOKENS, True, 20, "hash and admit 100%", 1.0, "us"),
    (1, LONG_TOKENS, False, 8, "hash and admit long", 1.0, "ms"),
)


def reset(scheduler: Scheduler) -> None:
    """Empty the prefix cache, so that nothing is evicted afterwards."""
    scheduler.stub.ResetPrefixCache(pb.ResetPrefixCacheRequest(context=scheduler.context()))


def reset_and_decode(scheduler: Scheduler, num_steps: int) -> list[Samples]:
    """See rpc.decode_steps."""
    reset(scheduler)
    return decode_steps(scheduler, num_steps)


def admission_steps(
    scheduler: Scheduler, num_steps: int, num_requests: int, num_tokens: int, *, hit: bool
) -> list[Samples]:
    """Seconds a request, in Steps that each end the requests of the one before."""
    random, samples = Random(), list[float]()
    reset(scheduler)
    stream = Stream(scheduler.stub.StepStream)
    same = random.choices(range(VOCABULARY), k=num_tokens)
    handles = array("i")
    # The first Step makes the hits; a last one would only free.
    for step in range(num_steps + 1):
        prompts = [
            same if hit else random.choices(range(VOCABULARY), k=num_tokens)
            for _ in range(num_requests)
        ]
        began = perf_counter()
        request = pb.StepRequest(
            context=scheduler.context(),
            runs=[
                pb.Run(kind=pb.OPERATION_KIND_FREE, count=len(handles)),
                pb.Run(kind=pb.OPERATION_KIND_ADMIT, count=num_requests),
            ],
            on_no_fit=pb.ON_NO_FIT_STOP,
            free=pb.FreeColumns(handles=handles.tobytes()),
            admissions=[
                pb.SlotRequest(
                    request_id=f"r{next(scheduler.numbers)}",
                    content=pb.RequestContent(tokens=array("I", prompt).tobytes()),
                    lookup=True,
                )
                for prompt in prompts
            ],
        )
        reply = stream.call(request)
        handles = array("i", [admission.handle for admission in reply.admissions])
        if step:
            samples.append((perf_counter() - began) / num_requests)
        assert all(one.outcome == pb.OUTCOME_OK for one in reply.admissions), reply
        assert not step or bool(reply.admissions[0].num_new_computed_tokens) is hit
    stream.close()
    scheduler.free(handles)
    return [samples]


def rows(settings: Settings) -> Iterator[Row]:
    """The rows, as they are measured."""
    with (
        vllm_worker() as theirs,
        own_server(["--no-memory", "--num-blocks", str(NUM_BLOCKS)]) as target,
        grpc.insecure_channel(target) as channel,
    ):
        scheduler = Scheduler(channel)
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            for num_requests, num_tokens, hit, full_samples, workload, limit, unit in ADMISSIONS:
                num_samples = settings.samples(full_samples)
                name = f"remote: hash, admit and free {num_tokens:,} tokens, "
                name += f"{100 if hit else 0}% hit, Steps of {num_requests} (in process)"
                yield from compare(
                    [name],
                    lambda r=num_requests, t=num_tokens, h=hit, n=num_samples: (  # type: ignore[misc]
                        admission_steps(scheduler, n, r, t, hit=h)
                    ),
                    lambda w=workload, n=num_samples: theirs.burst(w, n),  # type: ignore[misc]
                    settings,
                    target=limit,
                    unit=unit,
                )
            num_steps = settings.samples(64)
            yield from compare(
                [f"remote: append and decode, {DECODE_REQUESTS} requests a Step (in process)"],
                lambda: reset_and_decode(scheduler, num_steps),
                lambda: theirs.burst("append and decode", num_steps),
                settings,
                target=0.8,
            )
        finally:
            gc.enable()
            gc.unfreeze()
