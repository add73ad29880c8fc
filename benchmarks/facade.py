"""A decode step of 256 requests on a remote cache, against vLLM's manager in its process.

Wall clock on both sides: what the scheduler's thread spends in the calls. The lazy facade's
message travels while a forward pass runs, of which FORWARD_SECONDS stand for one; the
composed Step is waited for at once.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random
from time import perf_counter, sleep
from typing import Any

from benchmarks.core import vllm_worker
from benchmarks.pairs import Row, Samples, Settings, compare
from benchmarks.workloads import BLOCK_SIZE, DECODE_REQUESTS, DECODE_TOKENS, VOCABULARY
from kvclient import Client
from kvclient.facade import KVCacheManager
from kvclient.replay.server import own_server
from kvclient.session import Session
from kvclient.values import Content, Free, Grow, OperationKind, SlotRequest, Step, StepMark

FORWARD_SECONDS = 0.005
NUM_STEPS = 96
LAZY_TARGET, STEP_TARGET = 0.3, 0.8


class Request:
    """What the facade reads of a vLLM Request; ``num_tokens`` is a property there, too."""

    num_preemptions = 0
    skip_reading_prefix_cache = False

    def __init__(self, request_id: str, tokens: list[int]) -> None:
        self.request_id = request_id
        self.all_token_ids = tokens
        self.num_prompt_tokens = len(tokens)
        self.num_computed_tokens = 0
        self.finished = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def is_finished(self) -> bool:
        return self.finished


def make_requests(random: Random) -> list[Request]:
    """Running requests of about 1000 tokens; in each step, one in 16 begins a block."""
    return [
        Request(
            f"r{index}", random.choices(range(VOCABULARY), k=DECODE_TOKENS + index % BLOCK_SIZE)
        )
        for index in range(DECODE_REQUESTS)
    ]


def lazy_steps(session: Session, num_steps: int) -> list[Samples]:
    """As a Scheduler calls it; a sampled token each after every step."""
    facade = KVCacheManager(session, steps_in_flight=1)
    requests = make_requests(Random(0))
    facade.new_step_starts()
    for request in requests:
        assert facade.allocate_slots(request, request.num_tokens) is not None
        request.num_computed_tokens = request.num_tokens
        request.all_token_ids.append(0)
    facade.get_num_common_prefix_blocks("r0")
    sleep(FORWARD_SECONDS)
    samples = []
    for _ in range(num_steps):
        began = perf_counter()
        facade.new_step_starts()
        allocate_slots = facade.allocate_slots
        for request in requests:
            assert allocate_slots(request, 1, num_lookahead_tokens=0) is not None
        facade.get_num_common_prefix_blocks("r0")
        seconds = perf_counter() - began
        sleep(FORWARD_SECONDS)
        for request in requests:
            request.num_computed_tokens += 1
            request.all_token_ids.append(0)
        began = perf_counter()
        facade.take_events()
        samples.append(seconds + perf_counter() - began)
    for request in requests:
        request.finished = True
        facade.free(request)
    facade.settle()
    facade.close()
    return [samples]


def composed_steps(session: Session, num_steps: int) -> list[Samples]:
    """All growth of a step in one Step, composed and waited for."""
    requests = make_requests(Random(0))
    stream = session.step_stream()
    handles = []
    for request in requests:
        slots = SlotRequest(request.request_id, Content(request.all_token_ids), lookup=True)
        handles.append(session.allocate_slots(slots, mark=StepMark(1, 0)).handle)
    computed = array("i", [request.num_tokens for request in requests])
    ones = array("i", [1] * len(requests)).tobytes()
    samples = []
    for number in range(2, num_steps + 2):
        began = perf_counter()
        step = Step(
            [(OperationKind.GROW, len(requests))],
            grow=Grow(
                handles=handles,
                num_computed_tokens=computed.tobytes(),
                num_new_tokens=ones,
                token_offsets=computed.tobytes(),
                token_counts=ones,
                tokens=array("I", range(len(requests))).tobytes(),
            ),
        )
        result = stream.call(step, mark=StepMark(number, number - 1))
        new_blocks = result.grow.new_blocks()
        samples.append(perf_counter() - began)
        assert not result.grow.outcomes and len(new_blocks) == len(requests)
        computed = array("i", [num_tokens + 1 for num_tokens in computed])
    stream.call(
        Step([(OperationKind.FREE, len(handles))], free=Free(handles)),
        mark=StepMark(num_steps + 2, num_steps + 1),
    )
    stream.close()
    return [samples]


def rows(settings: Settings) -> Iterator[Row]:
    """The rows, as they are measured."""
    num_steps = settings.samples(NUM_STEPS)
    with ExitStack() as stack:
        theirs = stack.enter_context(vllm_worker())
        target = stack.enter_context(own_server(["--no-memory", "--num-blocks", "65536"]))
        client = stack.enter_context(Client(target))

        def in_session(steps: Any) -> list[Samples]:
            with client.open_session() as session:
                session.reset_prefix_cache()
                samples: list[Samples] = steps(session, num_steps)
            return samples

        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            for name, steps, bound in (
                ("decode step of 256, remote, lazy, StepStream", lazy_steps, LAZY_TARGET),
                ("decode step of 256, one composed strict Step", composed_steps, STEP_TARGET),
            ):
                yield from compare(
                    [f"facade: {name} (vLLM in process)"],
                    lambda s=steps: in_session(s),  # type: ignore[misc]
                    lambda: theirs.burst("decode wall", num_steps),
                    settings,
                    target=bound,
                )
        finally:
            gc.enable()
            gc.unfreeze()
