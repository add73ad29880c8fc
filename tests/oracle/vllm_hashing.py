"""vLLM's own block hashes of test_hashing_parity's cases; vllm_worker.py, the oracle, runs it."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    BlockHashListWithBlockSize,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.request import Request


def hash_cases(job: dict[str, Any]) -> list[list[list[str]]]:
    """Scheme by scheme, case by case: the hashes in hex, and those of blocks ``coarser`` times
    as large. Each case has a seed of its own: who goes on hashing calls init_none_hash anew.
    """
    answers = []
    seed = os.environ["PYTHONHASHSEED"]
    try:
        for scheme_name in job["scheme_names"]:
            hash_fn = get_hash_fn_by_name(scheme_name)
            for case in job["cases"]:
                os.environ["PYTHONHASHSEED"] = case["seed"]
                init_none_hash(hash_fn)
                size = case["block_size"]
                hashes = _request(case, hash_fn).block_hashes
                coarse = BlockHashListWithBlockSize(hashes, size, size * job["coarser"])
                answers.append([[h.hex() for h in hashes], [h.hex() for h in coarse]])
    finally:
        os.environ["PYTHONHASHSEED"] = seed
    return answers


def _request(case: dict[str, Any], hash_fn: Any) -> Request:
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=identifier,
            mm_position=PlaceholderRange(offset=offset, length=length),
        )
        for identifier, offset, length in case["images"]
    ]
    embeds, lora = case["embeds"], case["lora"]
    request = Request(
        request_id="r",
        prompt_token_ids=None if embeds else case["prompt"],
        prompt_embeds=torch.tensor(embeds, dtype=torch.float32) if embeds else None,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=features,
        cache_salt=case["salt"],
        lora_request=None if lora is None else LoRARequest(lora, 1, "/nowhere"),
        block_hasher=get_request_block_hasher(case["block_size"], hash_fn),
    )
    for tokens in case["appended"]:
        request.append_output_token_ids(tokens)
    return request
