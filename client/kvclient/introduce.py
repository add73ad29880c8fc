"""A scheduler's request as the wire has it: its tokens, and what else enters the hashes.

Requests are vLLM's, or have the same attributes.
"""

from __future__ import annotations

import hashlib
from typing import Any

from kvclient.errors import InvalidArgument
from kvclient.values import Content, ExtraKeys, MultimodalItem, token_bytes


def introduction(request: Any, num_sent: int | None, block_size: int) -> Content | None:
    """What is new: all of a request that was never sent (None), else what follows ``num_sent``.

    None when that is nothing. Tokens that went away are cut off.
    """
    num_tokens = request.num_tokens
    if num_sent is not None:
        if num_tokens == num_sent:
            return None
        start = min(num_sent, num_tokens)
        return Content(token_bytes(request.all_token_ids[start:num_tokens]), token_offset=start)
    lora = getattr(request, "lora_request", None)
    return Content(
        token_bytes(request.all_token_ids[:num_tokens]),
        extra_keys=_extra_keys(request, lora, block_size),
        lora_id=None if lora is None else lora.lora_int_id,
        num_prompt_tokens=request.num_prompt_tokens,
        skip_reading_prefix_cache=bool(request.skip_reading_prefix_cache),
    )


def _extra_keys(request: Any, lora: Any, block_size: int) -> ExtraKeys | None:
    features = getattr(request, "mm_features", None) or ()
    embeds = getattr(request, "prompt_embeds", None)
    try:
        keys = ExtraKeys(
            lora_name=None if lora is None else lora.lora_name,
            cache_salt=getattr(request, "cache_salt", None),
            multimodal=tuple(
                MultimodalItem(item.identifier, item.mm_position.offset, item.mm_position.length)
                for item in features
            ),
            prompt_embeds_digest=() if embeds is None else _digests(embeds, block_size),
        )
    except ValueError as error:
        raise InvalidArgument(str(error), field="extra_keys") from None
    return None if keys == ExtraKeys() else keys


def _digests(embeds: Any, block_size: int) -> tuple[bytes, ...]:
    """The SHA-256 of each block's rows of a tensor."""
    import torch

    rows = embeds.contiguous().cpu().view(torch.uint8).numpy()
    return tuple(
        hashlib.sha256(rows[start : start + block_size].tobytes()).digest()
        for start in range(0, len(rows), block_size)
    )
