"""vLLM's Scheduler, with its own cache manager or the facade: runs in the oracle's venv.

Reads one JSON object a line, a run's configuration (``Run``), and answers one: what was
decided in each step, what was generated, and what the manager's calls took. The model is
a function of the request and the position, so that every run generates the same.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import perf_counter, sleep
from typing import Any

# What libraries print, and some do when they are imported, must not get between the answers.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import vllm.platforms  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

vllm.platforms._current_platform = CpuPlatform()  # before vLLM's other modules look for one

import torch  # noqa: E402
from vllm.config import (  # noqa: E402
    CacheConfig,
    KVEventsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from kvclient import Client  # noqa: E402
from kvclient.facade import KVCacheManager as Facade  # noqa: E402

MODEL = Path(__file__).with_name("model")
VOCABULARY, FIRST_TOKEN, EOS = 151_936, 3, 2
STEPS_MAX = 100_000


@dataclass(frozen=True)
class Run:
    """One run. ``manager`` is "vllm", or the facade, which needs a target: "strict", "lazy", or
    "hinted": lazy, told the Scheduler's limits, and of each request when it is added.
    """

    manager: str
    num_requests: int
    num_blocks: int
    target: str = ""
    block_size: int = 16
    sliding_window: int = 0
    is_async: bool = False
    events: bool = False
    prompt_tokens: int = 100
    output_tokens: int = 12
    shared: float = 0.5
    max_num_seqs: int = 64
    max_batched_tokens: int = 2048
    max_model_len: int = 4096
    forward_s: float = 0.0
    seed: int = 0


def make_scheduler(run: Run) -> Any:
    """A Scheduler of one full attention group, or with a sliding window in a second one."""
    model = ModelConfig(
        model=str(MODEL), dtype="float16", skip_tokenizer_init=True, max_model_len=run.max_model_len
    )
    scheduling = SchedulerConfig(
        max_num_seqs=run.max_num_seqs,
        max_num_batched_tokens=run.max_batched_tokens,
        max_model_len=run.max_model_len,
        enable_chunked_prefill=True,
        async_scheduling=run.is_async,
        is_encoder_decoder=False,
    )
    cache = CacheConfig(block_size=run.block_size, enable_prefix_caching=True)
    options: dict[str, Any] = {}
    if run.events:
        options["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    config = VllmConfig(
        model_config=model,
        scheduler_config=scheduling,
        cache_config=cache,
        parallel_config=ParallelConfig(),
        **options,
    )
    shape = {
        "block_size": run.block_size,
        "num_kv_heads": 1,
        "head_size": 16,
        "dtype": torch.bfloat16,
    }
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
    if run.sliding_window:
        window = SlidingWindowSpec(**shape, sliding_window=run.sliding_window)
        groups.append(KVCacheGroupSpec(["window"], window))
    cache.num_gpu_blocks = run.num_blocks
    register_all_kvcache_specs(config)
    return (AsyncScheduler if run.is_async else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=run.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
        ),
        block_size=run.block_size,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )


def make_requests(run: Run) -> list[Any]:
    """Prompts that share beginnings, with the lengths of their outputs."""
    hash_function = get_hash_fn_by_name("sha256_cbor")
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(run.block_size, hash_function)
    random = Random(run.seed)
    vocabulary = range(FIRST_TOKEN, VOCABULARY)
    prefixes = [random.choices(vocabulary, k=2 * run.prompt_tokens) for _ in range(8)]
    requests = []
    for number in range(run.num_requests):
        length = random.randint(run.prompt_tokens // 2, 3 * run.prompt_tokens // 2)
        prompt = random.choice(prefixes)[: int(length * run.shared)]
        prompt += random.choices(vocabulary, k=length - len(prompt))
        sampling = SamplingParams(
            max_tokens=random.randint(1, 2 * run.output_tokens), ignore_eos=True
        )
        sampling.update_from_generation_config({}, EOS)
        requests.append(
            Request(
                request_id=f"r{number}",
                prompt_token_ids=prompt,
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=hasher,
            )
        )
    return requests


def sampled(request_id: str, position: int) -> int:
    """The model's token there."""
    draw = zlib.crc32(f"{request_id} {position}".encode())
    return FIRST_TOKEN + draw % (VOCABULARY - FIRST_TOKEN)


def model_output(scheduler: Any, scheduled: Any) -> Any:
    """One token for each request whose tokens are all computed."""
    request_ids = list(scheduled.num_scheduled_tokens)
    if not request_ids:
        return EMPTY_MODEL_RUNNER_OUTPUT
    cached = scheduled.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed.update((new.req_id, new.num_computed_tokens) for new in scheduled.scheduled_new_reqs)
    tokens = []
    for request_id in request_ids:
        end = computed[request_id] + scheduled.num_scheduled_tokens[request_id]
        request = scheduler.requests.get(request_id)
        ends = request is not None and end >= request.num_tokens
        tokens.append([sampled(request_id, end)] if ends else [])
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
        sampled_token_ids=tokens,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


class Timed:
    """Stands before a manager and adds up the seconds of its calls."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._manager, name)
        if not callable(value):
            return value

        def timed(*arguments: Any, **options: Any) -> Any:
            began = perf_counter()
            try:
                return value(*arguments, **options)
            finally:
                self.seconds += perf_counter() - began

        self.__dict__[name] = timed
        return timed


def decided(scheduled: Any) -> str:
    """What a step decided, in full."""
    cached = scheduled.scheduled_cached_reqs
    return repr(
        (
            sorted(scheduled.num_scheduled_tokens.items()),
            [
                (new.req_id, new.block_ids, new.num_computed_tokens)
                for new in scheduled.scheduled_new_reqs
            ],
            (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens),
            scheduled.num_common_prefix_blocks,
            sorted(scheduled.preempted_req_ids or ()),
            sorted(scheduled.finished_req_ids),
        )
    )


def drive(run: Run, scheduler: Any) -> dict[str, Any]:
    """Until every request has finished."""
    timed = scheduler.kv_cache_manager = Timed(scheduler.kv_cache_manager)
    for request in make_requests(run):
        if run.manager == "hinted":
            timed.prefetch(request)
        scheduler.add_request(request)
    gc.collect()
    gc.freeze()
    depth = 2 if run.is_async else 1
    steps: list[int] = []
    step_seconds: list[float] = []
    outputs: dict[str, list[int]] = {}
    finished: list[str] = []
    num_preempted = num_hits = 0
    in_flight: deque[Any] = deque()
    while scheduler.has_requests() or in_flight:
        before = timed.seconds
        while len(in_flight) < depth and scheduler.has_requests():
            scheduled = scheduler.schedule()
            steps.append(zlib.crc32(decided(scheduled).encode()))
            num_preempted += len(scheduled.preempted_req_ids or ())
            in_flight.append(scheduled)
            if scheduled.total_num_scheduled_tokens == 0:
                break
        assert len(steps) < STEPS_MAX
        if run.forward_s:
            sleep(run.forward_s)
        scheduled = in_flight.popleft()
        answers = scheduler.update_from_output(scheduled, model_output(scheduler, scheduled))
        for answer in answers.values():
            stats = answer.scheduler_stats
            if stats is not None and stats.prefix_cache_stats is not None:
                num_hits += stats.prefix_cache_stats.hits
            for output in answer.outputs:
                outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    finished.append(output.request_id)
        step_seconds.append(timed.seconds - before)
    gc.unfreeze()
    tokens = zlib.crc32(repr(sorted(outputs.items())).encode())
    return {
        "steps": steps,
        "step_seconds": step_seconds,
        "num_finished": len(finished),
        "num_output_tokens": sum(map(len, outputs.values())),
        "outputs": tokens,
        "num_preempted": num_preempted,
        "num_hit_tokens": num_hits,
        "manager_seconds": timed.seconds,
        "usage": scheduler.make_stats().kv_cache_usage,
    }


def answer(run: Run) -> dict[str, Any]:
    """One run, from its server's empty pool to its empty pool."""
    scheduler = make_scheduler(run)
    if run.manager == "vllm":
        return drive(run, scheduler)
    with Client(run.target) as client, client.open_session() as session:
        session.reset_prefix_cache()
        limits = {
            "max_num_batched_tokens": run.max_batched_tokens,
            "max_num_seqs": run.max_num_seqs,
        }
        facade = Facade(
            session,
            strict=run.manager == "strict",
            steps_in_flight=2 if run.is_async else 1,
            **(limits if run.manager == "hinted" else {}),
        )
        scheduler.kv_cache_manager = facade
        result = drive(run, scheduler)
        facade.settle()
        stats = client.stats()
        result |= {
            "violations": list(client.audit().violations),
            "num_requests_left": stats.num_requests,
            "num_live_blocks_left": stats.blocks.live,
        }
        facade.close()
    return result


def main() -> None:
    """Answer until the input ends."""
    print("null", file=ANSWERS, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(Run(**json.loads(line)))), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
