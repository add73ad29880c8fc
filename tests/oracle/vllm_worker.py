"""The oracle: the real vLLM 0.25.1, run by the oracle venv's Python as a process of its own.

Reads one JSON object a line, {"config", "ops", "full"}, builds a manager, runs the operations
and answers one line: {"digests": [...]}, or {"records": [...]} when ``full``. Or reads
{"config", "specs"} and answers {"specs": [...]}, what each says of itself; or {"hashing"}, for
vllm_hashing.py, and answers {"hashes"}. Prints {"ready": true} first. Ends when its input does.

Environment (set by harness.py): PYTHONHASHSEED, the hash seed; and
VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0, whole hashes in events.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.request import Request, RequestStatus

from backend import hash_names, sort_removals, stats_column
from digest import run_all
from vllm_hashing import hash_cases

GROUP_ID_BYTES = 4
HASH = get_hash_fn_by_name("sha256_cbor")


RETENTION = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
NO_GROUPS_BLOCK_SIZE = 16


def make_spec(values: dict[str, Any]) -> KVCacheSpec:
    """A spec from its class name ("kind") and fields, dtypes and quantisation modes by name."""
    fields = dict(values)
    spec_class = getattr(kv_cache_interface, fields.pop("kind"))
    if spec_class is UniformTypeKVCacheSpecs:
        layers = {name: make_spec(spec) for name, spec in fields["kv_cache_specs"].items()}
        uniform = UniformTypeKVCacheSpecs.from_specs(layers)
        if uniform is None:
            raise ValueError("the layers are not of one type")
        return uniform
    if "dtype" in fields:
        fields["dtype"] = getattr(torch, fields["dtype"])
    if "kv_quant_mode" in fields:
        fields["kv_quant_mode"] = KVQuantMode[fields["kv_quant_mode"].upper()]
    if "shapes" in fields:
        fields["shapes"] = tuple(tuple(shape) for shape in fields["shapes"])
        fields["dtypes"] = tuple(getattr(torch, name) for name in fields["dtypes"])
    spec: KVCacheSpec = spec_class(**fields)
    return spec


def describe_spec(spec: KVCacheSpec, config: dict[str, Any]) -> dict[str, Any]:
    """What a spec says of itself, under a configuration's lengths."""
    managed = spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        managed = next(iter(spec.kv_cache_specs.values()))
    cap = getattr(managed, "max_admission_blocks_per_request", None)
    max_model_len = config["max_model_len"]
    max_num_batched_tokens = config["max_num_batched_tokens"] or max_model_len
    engine = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_encoder_input_tokens=config["encoder_max"],
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=config["dcp_world_size"],
            prefill_context_parallel_size=config["pcp_world_size"],
        ),
        cache_config=SimpleNamespace(mamba_cache_mode=getattr(managed, "mamba_cache_mode", None)),
    )
    return {
        "page_size_bytes": spec.page_size_bytes,
        "storage_block_size": spec.storage_block_size,
        "kind": get_kv_cache_spec_kind(spec).value,
        "sliding_window": get_kv_cache_spec_sliding_window(spec),
        "max_admission_blocks_per_request": None
        if cap is None
        else cap(max_num_batched_tokens, max_model_len),
        "max_memory_usage_bytes": spec.max_memory_usage_bytes(engine),
    }


def try_spec(values: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The description of a spec, or {"raised"}."""
    try:
        return describe_spec(make_spec(values), config)
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"}


def resolve_block_sizes(config: dict[str, Any], kv_cache: KVCacheConfig) -> tuple[int, int]:
    """Scheduler and hash block size, as the engine works them out before it makes a scheduler."""
    sizes = [group.kv_cache_spec.block_size for group in kv_cache.kv_cache_groups]
    engine = SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=min(sizes, default=NO_GROUPS_BLOCK_SIZE),
            hash_block_size=config["hash_block_size"],
            enable_prefix_caching=config["enable_caching"],
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=config["dcp_world_size"],
            prefill_context_parallel_size=config["pcp_world_size"],
        ),
        kv_transfer_config=None,
    )
    sizes_found: tuple[int, int] = resolve_kv_cache_block_sizes(kv_cache, engine)
    return sizes_found


class VllmBackend:
    """vLLM's side of backend.Backend."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        groups = [
            KVCacheGroupSpec(group["layers"], make_spec(group["spec"]), group["eagle"])
            for group in config["groups"]
        ]
        self.specs = [group.kv_cache_spec for group in groups]
        kv_cache = generate_scheduler_kv_cache_config(
            [KVCacheConfig(config["num_blocks"], [], groups)]
        )
        scheduler_block_size, hash_block_size = resolve_block_sizes(config, kv_cache)
        os.environ.pop(RETENTION, None)
        if config["retention_interval"] is not None:
            os.environ[RETENTION] = str(config["retention_interval"])
        self.manager = KVCacheManager(
            kv_cache,
            max_model_len=config["max_model_len"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            scheduler_block_size=scheduler_block_size,
            hash_block_size=hash_block_size,
            enable_caching=config["enable_caching"],
            use_eagle=config["use_eagle"],
            log_stats=config["log_stats"],
            enable_kv_cache_events=config["events"],
            dcp_world_size=config["dcp_world_size"],
            pcp_world_size=config["pcp_world_size"],
            watermark=config["watermark"],
        )
        self.hasher = get_request_block_hasher(hash_block_size, HASH)
        self.partial = config["partial"]

    def describe(self) -> dict[str, Any]:
        coordinator = self.manager.coordinator
        return {
            "scheduler_block_size": coordinator.scheduler_block_size,
            "hash_block_size": self.manager.block_pool.hash_block_size,
            "watermark_blocks": self.manager.watermark_blocks,
            "groups": [
                {
                    **describe_spec(spec, self.config),
                    "block_size": manager.block_size,
                    "use_eagle": number in coordinator.eagle_group_ids,
                }
                for number, (spec, manager) in enumerate(
                    zip(self.specs, coordinator.single_type_managers, strict=True)
                )
            ],
        }

    def make_request(
        self,
        request_id: str,
        tokens: list[int],
        *,
        lora: tuple[str, int] | None,
        salt: str | None,
        skip_reading: bool,
    ) -> Request:
        return Request(
            request_id=request_id,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1024, skip_reading_prefix_cache=skip_reading),
            pooling_params=None,
            lora_request=None if lora is None else LoRARequest(lora[0], lora[1], "/adapter"),
            cache_salt=salt,
            block_hasher=self.hasher,
        )

    def append(self, request: Request, tokens: list[int]) -> None:
        request.append_output_token_ids(tokens)

    def set_status(self, request: Request, name: str) -> None:
        request.status = RequestStatus[name]

    def return_blocks(self, blocks: list[Any]) -> None:
        self.manager.block_pool.free_blocks(reversed(blocks))

    def free_queue(self) -> list[int]:
        queue = self.manager.block_pool.free_block_queue
        ids = []
        block = queue.fake_free_list_head.next_free_block
        while block is not queue.fake_free_list_tail:
            ids.append(block.block_id)
            block = block.next_free_block
        assert len(ids) == queue.num_free_blocks
        return ids

    def hits_per_group(self, request: Request) -> tuple[KVCacheBlocks, list[int]]:
        manager = self.manager
        blocks, lengths = manager.coordinator.find_longest_cache_hit_per_group(
            request.block_hashes, request.num_tokens - 1
        )
        if manager.log_stats:
            manager.prefix_cache_stats.record(
                num_tokens=request.num_tokens,
                num_hits=max(lengths),
                preempted=request.num_preemptions > 0,
            )
        return manager.create_kv_cache_blocks(blocks), list(lengths)

    def num_uncached_common_prefix_tokens(self) -> int:
        return getattr(self.manager.coordinator, "num_uncached_common_prefix_tokens", 0)

    def cache_partial_block(
        self, request: Request, block: KVCacheBlock, num_tokens: int, group: int
    ) -> str | None:
        block_hash = self.manager.block_pool.cache_partial_block(
            request=request,
            block=block,
            num_tokens=num_tokens,
            kv_cache_group_id=group,
            block_size=self.specs[group].block_size,
        )
        return None if block_hash is None else block_hash[:-GROUP_ID_BYTES].hex()

    def remaining_blocks(self, request: Request) -> int:
        num_tokens = min(request.num_tokens, self.manager.max_model_len)
        num_blocks: int = self.manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=num_tokens,
            new_computed_blocks=self.manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=request.num_computed_tokens,
            num_tokens_main_model=num_tokens,
            apply_admission_cap=True,
        )
        return num_blocks

    def blocks(self) -> tuple[list[int], list[str | None]]:
        pool = self.manager.block_pool
        refs = [block.ref_cnt for block in pool.blocks]
        refs[0] = 0  # counted, but it means nothing
        others = pool.cached_block_hashes_by_block
        return refs, [
            None
            if block.block_hash is None
            else hash_names(
                block.block_hash[:-GROUP_ID_BYTES],
                int.from_bytes(block.block_hash[-GROUP_ID_BYTES:], "big"),
                others.get(block.block_id, ()),
            )
            for block in pool.blocks
        ]

    def events(self) -> list[list[Any]]:
        events = [_event(event) for event in self.manager.take_events()]
        return sort_removals(events) if self.partial else events

    def stats(self) -> list[int] | None:
        return stats_column(self.manager.make_prefix_cache_stats())

    def violations(self) -> list[str]:
        return []


def _event(event: BlockStored | BlockRemoved | AllBlocksCleared) -> list[Any]:
    if isinstance(event, AllBlocksCleared):
        return ["cleared"]
    hashes = [block_hash.hex() for block_hash in event.block_hashes]
    if isinstance(event, BlockRemoved):
        return ["removed", hashes, event.group_idx, event.medium]
    return [
        "stored",
        hashes,
        None if event.parent_block_hash is None else event.parent_block_hash.hex(),
        list(event.token_ids),
        event.block_size,
        event.lora_id,
        event.lora_name,
        None
        if event.extra_keys is None
        else [None if keys is None else list(keys) for keys in event.extra_keys],
        event.group_idx,
        event.kv_cache_spec_kind,
        event.kv_cache_spec_sliding_window,
        event.medium,
    ]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints must not get between the answers
    init_none_hash(HASH)
    register_all_kvcache_specs(None)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        if "specs" in task:
            answer = {"specs": [try_spec(spec, task["config"]) for spec in task["specs"]]}
        elif "hashing" in task:
            answer = {"hashes": hash_cases(task["hashing"])}
            init_none_hash(HASH)
        else:
            answer = run_all(VllmBackend, task["config"], task["ops"], task["full"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
