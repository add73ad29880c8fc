"""Between the wire's messages and the client's values."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from kvclient.errors import InvalidArgument
from kvclient.values import (
    BlockHolder,
    BlockTables,
    Column,
    Content,
    ExtraKeys,
    GrowResults,
    Hit,
    NoFit,
    NoFitReason,
    OperationError,
    Outcome,
    ResetMode,
    ResetResult,
    SessionHold,
    SlotRequest,
    SlotResult,
    Step,
    StepMark,
    StepResult,
    Tokens,
    int32_column,
    token_bytes,
)
from kvdepot.v1 import cache_pb2, types_pb2

# --- requests -------------------------------------------------------------------------


def uint32(value: int, field: str) -> int:
    """``value``, if the wire can carry it."""
    if not 0 <= value < 1 << 32:
        raise InvalidArgument(f"{field} must be in [0, 2**32), got {value}", field=field)
    return value


def uint64(value: int, field: str) -> int:
    """``value``, if the wire can carry it."""
    if not 0 <= value < 1 << 64:
        raise InvalidArgument(f"{field} must be in [0, 2**64), got {value}", field=field)
    return value


def tokens(values: Tokens) -> bytes:
    """Little-endian uint32."""
    try:
        return token_bytes(values)
    except (OverflowError, TypeError) as error:
        raise InvalidArgument(f"tokens: {error}", field="tokens") from None


def column(values: Column, field: str) -> bytes:
    """Little-endian int32."""
    try:
        return int32_column(values)
    except (OverflowError, TypeError) as error:
        raise InvalidArgument(f"{field}: {error}", field=field) from None


def set_context(
    context: types_pb2.CallContext,
    *,
    session_id: str,
    epoch: str,
    op_seq: int,
    mark: StepMark | None,
) -> None:
    """Says whose call it is and where it belongs."""
    context.session_id = session_id
    context.epoch = epoch
    context.op_seq = op_seq
    if mark is not None:
        context.step = uint64(mark.step, "step")
        context.completed_step = uint64(mark.completed_step, "completed_step")


def extra_keys(keys: ExtraKeys | None, lora_id: int | None) -> types_pb2.ExtraKeys | None:
    """What enters the hashes besides tokens."""
    if keys is None and lora_id is None:
        return None
    keys = keys or ExtraKeys()
    return types_pb2.ExtraKeys(
        lora_name=keys.lora_name,
        lora_id=None if lora_id is None else uint64(lora_id, "lora_id"),
        cache_salt=keys.cache_salt,
        multimodal=[
            types_pb2.MultimodalItem(
                identifier=item.identifier,
                offset=uint32(item.offset, "multimodal.offset"),
                length=uint32(item.length, "multimodal.length"),
            )
            for item in keys.multimodal
        ],
        prompt_embeds_digests=keys.prompt_embeds_digest,
    )


def content(value: Content | Tokens | None) -> cache_pb2.RequestContent | None:
    """What is new about a request; bare tokens introduce it."""
    if value is None:
        return None
    if not isinstance(value, Content):
        value = Content(tokens=value)
    return cache_pb2.RequestContent(
        token_offset=uint32(value.token_offset, "token_offset"),
        tokens=tokens(value.tokens),
        extra_keys=extra_keys(value.extra_keys, value.lora_id),
        num_prompt_tokens=(
            None
            if value.num_prompt_tokens is None
            else uint32(value.num_prompt_tokens, "num_prompt_tokens")
        ),
        skip_reading_prefix_cache=value.skip_reading_prefix_cache,
    )


_SLOT_COUNTS = (
    "num_computed_tokens",
    "num_new_tokens",
    "max_new_tokens",
    "new_tokens_alignment",
    "num_new_computed_tokens",
    "num_lookahead_tokens",
    "num_external_computed_tokens",
    "reserved_blocks",
    "num_encoder_tokens",
)


def slot_request(slots: SlotRequest) -> cache_pb2.SlotRequest:
    """The arguments of one allocation."""
    counts = {name: getattr(slots, name) for name in _SLOT_COUNTS}
    return cache_pb2.SlotRequest(
        request_id=slots.request_id,
        content=content(slots.content),
        lookup=slots.lookup,
        delay_cache_blocks=slots.delay_cache_blocks,
        full_sequence_must_fit=slots.full_sequence_must_fit,
        has_scheduled_reqs=slots.has_scheduled_reqs,
        **{name: uint32(value, name) for name, value in counts.items() if value is not None},
    )


def reset_request(
    mode: ResetMode,
    *,
    lora_name: str | None,
    cache_salt: str | None,
    deadline_s: float | None,
    drain_id: int,
) -> cache_pb2.ResetPrefixCacheRequest:
    """A reset of the whole pool, or of what has this LoRA name or salt."""
    scope = None
    if lora_name is not None or cache_salt is not None:
        scope = cache_pb2.ResetScope(lora_name=lora_name, cache_salt=cache_salt)
    return cache_pb2.ResetPrefixCacheRequest(
        mode=int(mode),  # type: ignore[arg-type]
        scope=scope,
        deadline_seconds=deadline_s if mode is ResetMode.DRAIN else None,
        drain_id=drain_id,
    )


def step_request(step: Step) -> cache_pb2.StepRequest:
    """A Step in columns."""
    request = cache_pb2.StepRequest(
        on_no_fit=(
            cache_pb2.ON_NO_FIT_STOP if step.on_no_fit_stop else cache_pb2.ON_NO_FIT_CONTINUE
        ),
        token_budget=(
            None if step.token_budget is None else uint32(step.token_budget, "token_budget")
        ),
        admissions=[slot_request(admission) for admission in step.admissions],
    )
    for kind, count in step.runs:
        request.runs.add(kind=int(kind), count=uint32(count, "runs.count"))
    if step.grow.handles:
        grow = request.grow
        grow.handles = column(step.grow.handles, "grow.handles")
        grow.num_computed_tokens = column(step.grow.num_computed_tokens, "grow.num_computed_tokens")
        grow.num_new_tokens = column(step.grow.num_new_tokens, "grow.num_new_tokens")
        grow.token_offsets = column(step.grow.token_offsets, "grow.token_offsets")
        grow.token_counts = column(step.grow.token_counts, "grow.token_counts")
        grow.tokens = tokens(step.grow.tokens)
        grow.num_lookahead_tokens = uint32(
            step.grow.num_lookahead_tokens, "grow.num_lookahead_tokens"
        )
    if step.cache.handles:
        request.cache.handles = column(step.cache.handles, "cache.handles")
        request.cache.num_computed_tokens = column(
            step.cache.num_computed_tokens, "cache.num_computed_tokens"
        )
    if step.free.handles:
        request.free.handles = column(step.free.handles, "free.handles")
        request.free.modes = bytes(step.free.modes)
        request.free.did_not_run = bytes(step.free.did_not_run)
    return request


# --- replies --------------------------------------------------------------------------


def block_tables(tables: Iterable[types_pb2.BlockIds]) -> BlockTables:
    """One list a KV cache group."""
    return tuple([list(table.ids) for table in tables])


def hit(reply: cache_pb2.GetComputedBlocksResponse) -> Hit:
    """The answer to a lookup."""
    return Hit(
        reply.num_computed_tokens,
        block_tables(reply.blocks),
        reply.handle,
        reply.num_uncached_common_prefix_tokens,
    )


def no_fit(refusal: cache_pb2.NoFit) -> NoFit:
    """Why an allocation was refused."""
    return NoFit(
        refusal.needed_blocks,
        refusal.free_blocks,
        refusal.reserved_blocks,
        refusal.watermark_blocks,
        NoFitReason(refusal.reason or NoFitReason.BLOCKS),
        session_holds(refusal.holders),
        refusal.pinned_blocks,
        refusal.in_transfer_blocks,
    )


def session_holds(holds: Iterable[cache_pb2.SessionHold]) -> tuple[SessionHold, ...]:
    """Who holds blocks."""
    return tuple(
        SessionHold(hold.session_id, hold.name, hold.num_blocks, hold.departed) for hold in holds
    )


def block_holders(holders: Iterable[cache_pb2.BlockHolder]) -> tuple[BlockHolder, ...]:
    """Who has blocks in use."""
    return tuple(
        BlockHolder(
            holder.session_id,
            holder.session_name,
            holder.request_id,
            holder.ticket,
            holder.num_blocks,
            holder.transfer,
        )
        for holder in holders
    )


def reset_result(reply: cache_pb2.ResetPrefixCacheResponse) -> ResetResult:
    """How a reset stands."""
    return ResetResult(
        generation=reply.generation,
        done=reply.done,
        holders=block_holders(reply.holders),
        drain_id=reply.drain_id,
        abandoned=reply.abandoned,
        num_blocks_cleared=reply.num_blocks_cleared,
    )


def slot_result(result: cache_pb2.SlotResult) -> SlotResult:
    """The answer to one allocation."""
    return SlotResult(
        outcome=Outcome(result.outcome),
        num_new_computed_tokens=result.num_new_computed_tokens,
        num_new_tokens=result.num_new_tokens,
        hit_blocks=block_tables(result.hit_blocks),
        new_blocks=block_tables(result.new_blocks),
        handle=result.handle,
        no_fit=no_fit(result.no_fit) if result.HasField("no_fit") else None,
    )


def step_result(reply: cache_pb2.StepResponse) -> StepResult:
    """The answer to a Step; its columns stay bytes."""
    new_blocks = reply.grow.new_blocks
    tickets = reply.free.tickets
    return StepResult(
        admissions=[slot_result(admission) for admission in reply.admissions],
        grow=GrowResults(
            outcomes=reply.grow.outcomes,
            counts=tuple(blocks.counts for blocks in new_blocks),
            ids=tuple(blocks.ids for blocks in new_blocks),
        ),
        cache_outcomes=reply.cache.outcomes,
        free_outcomes=reply.free.outcomes,
        free_tickets=struct.unpack(f"<{len(tickets) // 8}Q", tickets),
        no_fit=no_fit(reply.no_fit) if reply.HasField("no_fit") else None,
        errors=[
            OperationError(e.index, e.reason, e.message, e.code, e.field, e.retryable)
            for e in reply.errors
        ],
        free_blocks=reply.free_blocks,
    )
