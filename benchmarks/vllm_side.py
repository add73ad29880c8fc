"""vLLM's side of the workloads. Runs in the oracle's virtual environment."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from benchmarks.workloads import BLOCK_SIZE, WINDOW_TOKENS


class VllmSide:
    """vLLM's manager, with its sha256_cbor hashes."""

    def __init__(self) -> None:
        hash_function = get_hash_fn_by_name("sha256_cbor")
        init_none_hash(hash_function)
        register_all_kvcache_specs(None)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)

    def make_manager(
        self, num_blocks: int, *, hybrid: bool = False, events: bool = False
    ) -> KVCacheManager:
        full = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=16, dtype=torch.bfloat16
        )
        window = SlidingWindowSpec(
            block_size=BLOCK_SIZE,
            num_kv_heads=1,
            head_size=16,
            dtype=torch.bfloat16,
            sliding_window=WINDOW_TOKENS,
        )
        groups = [KVCacheGroupSpec(["layer"], full)]
        if hybrid:
            groups.append(KVCacheGroupSpec(["window"], window))
        return KVCacheManager(
            KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=groups,
            ),
            max_model_len=131_072,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            enable_caching=True,
            enable_kv_cache_events=events,
            log_stats=True,
        )

    def make_request(self, request_id: str, tokens: list[int], *, hashed: bool = True) -> Request:
        return Request(
            request_id=request_id,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1024),
            pooling_params=None,
            block_hasher=self.hasher if hashed else None,
        )

    def set_running(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING

    def append_token(self, request: Request, token: int) -> None:
        request.append_output_token_ids(token)

    def make_hashing(self, tokens: list[int]) -> Callable[[], int]:
        request = self.make_request("hashed", tokens, hashed=False)
        return lambda: len(self.hasher(request))
