"""Between the wire's messages and the core's values. Checks what only the wire can break."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Any

from kvcore.errors import InvalidArgument
from kvcore.hashing import ExtraKeys, MultimodalItem
from kvcore.holders import BlockHolder
from kvcore.operation import (
    NO_CACHE,
    NO_FREE,
    NO_GROW,
    BlockTables,
    Cache,
    Content,
    Free,
    FreeMode,
    Grow,
    NoFit,
    SlotRequest,
    SlotResult,
    Step,
    StepResult,
)
from kvcore.reset import ResetMode, ResetResult, ResetScope
from kvdepot.v1 import cache_pb2, types_pb2
from kvserver.errors import code_of

_FREE_MODES = {int(mode): mode for mode in FreeMode}
# A key is in the hash, and in the event, of each block that it covers.
EXTRA_KEY_LENGTH_MAX = 512
MULTIMODAL_ITEMS_MAX = 1 << 16
MULTIMODAL_OVERLAP_MAX = 8

# --- requests -------------------------------------------------------------------------


def extra_keys(message: types_pb2.ExtraKeys) -> ExtraKeys:
    """Raises InvalidArgument for what cannot enter a hash, or would enter too many."""
    if len(message.multimodal) > MULTIMODAL_ITEMS_MAX:
        raise InvalidArgument(
            f"a request has at most {MULTIMODAL_ITEMS_MAX} multimodal items",
            field="content.extra_keys.multimodal",
        )
    texts = [message.lora_name, message.cache_salt]
    texts += [item.identifier for item in message.multimodal]
    if max(map(len, texts)) > EXTRA_KEY_LENGTH_MAX:
        raise InvalidArgument(
            f"an identifier, LoRA name or cache salt has at most {EXTRA_KEY_LENGTH_MAX} characters",
            field="content.extra_keys",
        )
    if _overlap(message.multimodal) > MULTIMODAL_OVERLAP_MAX:
        raise InvalidArgument(
            f"more than {MULTIMODAL_OVERLAP_MAX} multimodal items overlap one another",
            field="content.extra_keys.multimodal",
        )
    try:
        return ExtraKeys(
            lora_name=message.lora_name if message.HasField("lora_name") else None,
            cache_salt=message.cache_salt if message.HasField("cache_salt") else None,
            multimodal=tuple(
                MultimodalItem(item.identifier, item.offset, item.length)
                for item in message.multimodal
            ),
            prompt_embeds_digest=tuple(message.prompt_embeds_digests),
        )
    except ValueError as error:
        raise InvalidArgument(str(error), field="content.extra_keys") from None


def _overlap(items: Iterable[types_pb2.MultimodalItem]) -> int:
    """How many items, which begin in order, lie over one token at most."""
    ends: list[int] = []
    most = 0
    for item in items:
        while ends and ends[0] <= item.offset:
            heappop(ends)
        heappush(ends, item.offset + item.length)
        most = max(most, len(ends))
    return most


def content(message: cache_pb2.RequestContent) -> Content:
    """What is new about a request."""
    extra = message.extra_keys if message.HasField("extra_keys") else None
    return Content(
        token_offset=message.token_offset,
        tokens=message.tokens,
        extra=None if extra is None else extra_keys(extra),
        lora_id=extra.lora_id if extra is not None and extra.HasField("lora_id") else None,
        num_prompt_tokens=(
            message.num_prompt_tokens if message.HasField("num_prompt_tokens") else None
        ),
        skip_reading_prefix_cache=message.skip_reading_prefix_cache,
    )


def slot_request(message: cache_pb2.SlotRequest) -> SlotRequest:
    """The arguments of one allocation."""
    has = message.HasField
    return SlotRequest(
        request_id=message.request_id,
        content=content(message.content) if has("content") else None,
        num_computed_tokens=message.num_computed_tokens,
        num_new_tokens=message.num_new_tokens if has("num_new_tokens") else None,
        max_new_tokens=message.max_new_tokens if has("max_new_tokens") else None,
        new_tokens_alignment=message.new_tokens_alignment,
        num_new_computed_tokens=message.num_new_computed_tokens,
        lookup=message.lookup,
        num_lookahead_tokens=message.num_lookahead_tokens,
        num_external_computed_tokens=message.num_external_computed_tokens,
        delay_cache_blocks=message.delay_cache_blocks,
        full_sequence_must_fit=message.full_sequence_must_fit,
        reserved_blocks=message.reserved_blocks,
        has_scheduled_reqs=message.has_scheduled_reqs if has("has_scheduled_reqs") else True,
        num_encoder_tokens=message.num_encoder_tokens,
    )


def free_mode(value: int) -> FreeMode:
    """Raises InvalidArgument for FREE_MODE_UNSPECIFIED and unknown numbers."""
    mode = _FREE_MODES.get(value)
    if mode is None:
        raise InvalidArgument(f"mode {value} is not a FreeMode", field="mode")
    return mode


def reset_mode(value: int) -> ResetMode:
    """REFUSE for RESET_MODE_UNSPECIFIED; raises InvalidArgument for unknown numbers."""
    try:
        return ResetMode(value) if value else ResetMode.REFUSE
    except ValueError:
        raise InvalidArgument(f"mode {value} is not a ResetMode", field="mode") from None


def reset_scope(message: cache_pb2.ResetScope) -> ResetScope:
    """Raises InvalidArgument for one that names nothing."""
    has = message.HasField
    return ResetScope(
        lora_name=message.lora_name if has("lora_name") else None,
        cache_salt=message.cache_salt if has("cache_salt") else None,
    )


def step(message: cache_pb2.StepRequest) -> Step:
    """A Step; its columns stay bytes."""
    has = message.HasField
    if message.on_no_fit not in (0, cache_pb2.ON_NO_FIT_STOP, cache_pb2.ON_NO_FIT_CONTINUE):
        raise InvalidArgument(f"{message.on_no_fit} is not an OnNoFit", field="on_no_fit")
    grow, cache, free = NO_GROW, NO_CACHE, NO_FREE
    if has("grow"):
        columns = message.grow
        grow = Grow(
            handles=columns.handles,
            num_computed_tokens=columns.num_computed_tokens,
            num_new_tokens=columns.num_new_tokens,
            token_offsets=columns.token_offsets,
            token_counts=columns.token_counts,
            tokens=columns.tokens,
            num_lookahead_tokens=columns.num_lookahead_tokens,
        )
    if has("cache"):
        cache = Cache(message.cache.handles, message.cache.num_computed_tokens)
    if has("free"):
        free = Free(message.free.handles, message.free.modes, message.free.did_not_run)
    return Step(
        runs=[(run.kind, run.count) for run in message.runs],
        on_no_fit_stop=message.on_no_fit != cache_pb2.ON_NO_FIT_CONTINUE,
        token_budget=message.token_budget if has("token_budget") else None,
        admissions=[slot_request(admission) for admission in message.admissions],
        grow=grow,
        cache=cache,
        free=free,
    )


# --- replies --------------------------------------------------------------------------


# What a message is made with is copied into it: replies are filled in place.


def fill_block_tables(messages: Any, tables: BlockTables) -> None:
    """One BlockIds a KV cache group, added to a repeated field."""
    for ids in tables:
        messages.add(ids=ids)


def no_fit(refusal: NoFit) -> cache_pb2.NoFit:
    """Why an allocation was refused."""
    return cache_pb2.NoFit(
        needed_blocks=refusal.needed_blocks,
        free_blocks=refusal.free_blocks,
        reserved_blocks=refusal.reserved_blocks,
        watermark_blocks=refusal.watermark_blocks,
        reason=int(refusal.reason),  # type: ignore[arg-type]
        holders=[
            cache_pb2.SessionHold(
                session_id=hold.session_id,
                name=hold.name,
                num_blocks=hold.num_blocks,
                departed=hold.departed,
            )
            for hold in refusal.holders
        ],
        pinned_blocks=refusal.pinned_blocks,
        in_transfer_blocks=refusal.in_transfer_blocks,
    )


def block_holders(holders: Iterable[BlockHolder]) -> list[cache_pb2.BlockHolder]:
    """Who has blocks in use."""
    return [
        cache_pb2.BlockHolder(
            session_id=holder.session_id,
            session_name=holder.session_name,
            request_id=holder.request_id,
            ticket=holder.ticket,
            num_blocks=holder.num_blocks,
            transfer=holder.transfer,
        )
        for holder in holders
    ]


def reset_response(result: ResetResult, *, epoch: str) -> cache_pb2.ResetPrefixCacheResponse:
    """How a reset stands."""
    return cache_pb2.ResetPrefixCacheResponse(
        generation=result.generation,
        epoch=epoch,
        done=result.done,
        holders=block_holders(result.holders),
        drain_id=result.drain_id,
        abandoned=result.abandoned,
        num_blocks_cleared=result.num_blocks_cleared,
    )


def fill_slot_result(message: cache_pb2.SlotResult, result: SlotResult) -> None:
    """The answer to one allocation, into an empty message."""
    message.outcome = int(result.outcome)  # type: ignore[assignment]
    message.num_new_computed_tokens = result.num_new_computed_tokens
    message.num_new_tokens = result.num_new_tokens
    message.handle = result.handle
    fill_block_tables(message.hit_blocks, result.hit_blocks)
    fill_block_tables(message.new_blocks, result.new_blocks)
    if result.no_fit is not None:
        message.no_fit.CopyFrom(no_fit(result.no_fit))


def step_response(result: StepResult, *, op_seq: int | None, epoch: str) -> cache_pb2.StepResponse:
    """The answer to a Step; its columns stay bytes."""
    response = cache_pb2.StepResponse(
        op_seq=op_seq,
        no_fit=None if result.no_fit is None else no_fit(result.no_fit),
        epoch=epoch,
        free_blocks=result.free_blocks,
    )
    for admission in result.admissions:
        fill_slot_result(response.admissions.add(), admission)
    grow = response.grow
    grow.outcomes = result.grow_outcomes
    for counts, ids in zip(result.grow_counts, result.grow_ids, strict=True):
        grow.new_blocks.add(counts=counts, ids=ids)
    if result.cache_outcomes:
        response.cache.outcomes = result.cache_outcomes
    if result.free_outcomes or result.free_tickets:
        response.free.outcomes = result.free_outcomes
        response.free.tickets = result.free_tickets
    for failed in result.errors:
        error = failed.error
        response.errors.add(
            index=failed.index,
            reason=error.reason,
            message=error.message,
            code=code_of(error).value[0],
            field=error.field,
            retryable=error.retryable,
        )
    return response
