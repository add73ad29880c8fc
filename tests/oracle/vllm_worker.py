"""The oracle: the real vLLM 0.25.1, run by the oracle venv's Python as a process of its own.

Reads one JSON object a line, {"config", "ops", "full"}, builds a manager, runs the operations
and answers one line: {"digests": [...]}, or {"records": [...]} when ``full``. Prints
{"ready": true} first. Ends when its input does.

Environment (set by harness.py): PYTHONHASHSEED, the hash seed; and
VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0, whole hashes in events.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from digest import run_all

GROUP_ID_BYTES = 4
HASH = get_hash_fn_by_name("sha256_cbor")


class VllmBackend:
    """vLLM's side of interpreter.Backend."""

    def __init__(self, config: dict[str, Any]) -> None:
        block_size = config["block_size"]
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=16, dtype=torch.float16
        )
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=config["num_blocks"],
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            max_model_len=config["max_model_len"],
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            enable_caching=config["enable_caching"],
            log_stats=config["log_stats"],
            enable_kv_cache_events=config["events"],
            watermark=config["watermark"],
        )
        self.hasher = get_request_block_hasher(block_size, HASH)

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

    def blocks(self) -> tuple[list[int], list[str | None]]:
        blocks = self.manager.block_pool.blocks
        return [block.ref_cnt for block in blocks], [
            None if block.block_hash is None else block.block_hash[:-GROUP_ID_BYTES].hex()
            for block in blocks
        ]

    def events(self) -> list[list[Any]]:
        return [_event(event) for event in self.manager.take_events()]

    def stats(self) -> list[int] | None:
        stats = self.manager.make_prefix_cache_stats()
        if stats is None:
            return None
        return [
            stats.requests,
            stats.queries,
            stats.hits,
            stats.preempted_requests,
            stats.preempted_queries,
            stats.preempted_hits,
            int(stats.reset),
        ]

    def violations(self) -> list[str]:
        return []


def _event(event: BlockStored | BlockRemoved | AllBlocksCleared) -> list[Any]:
    if isinstance(event, AllBlocksCleared):
        return ["cleared"]
    hashes = [block_hash.hex() for block_hash in event.block_hashes]
    if isinstance(event, BlockRemoved):
        return ["removed", hashes, event.group_idx, event.medium]
    assert event.kv_cache_spec_sliding_window is None
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
        answer = run_all(VllmBackend(task["config"]), task["config"], task["ops"], task["full"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
