"""Slots for one request: its hit, what is computed elsewhere, and what it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.errors import InvalidArgument
from kvcore.manager import KVCacheBlocks
from kvcore.operation import Outcome, SlotRequest, SlotResult
from kvcore.request import Request, RequestStatus
from kvcore.session import Session

if TYPE_CHECKING:
    from kvcore.depot import Depot

# Reading a member off its enum costs 0.1 us and more on Python 3.11.
_OK, _RUNNING = Outcome.OK, RequestStatus.RUNNING


def admit(
    depot: Depot, session: Session, request: Request, slots: SlotRequest, budget: int | None
) -> SlotResult:
    manager = session.manager
    running = session.holds_blocks(request)
    held_slots = session.num_slots(request) if running else 0
    if slots.num_computed_tokens > min(held_slots, request.num_tokens):
        raise InvalidArgument(
            f"num_computed_tokens {slots.num_computed_tokens}: the request has "
            f"{request.num_tokens} tokens and {held_slots} slots",
            field="num_computed_tokens",
        )
    claimed = slots.num_new_computed_tokens
    if running and (claimed or slots.lookup):
        raise InvalidArgument(
            "a request that holds blocks has no new hit",
            field="lookup" if slots.lookup else "num_new_computed_tokens",
        )

    if not running and depot.holds_off(request):
        return SlotResult(Outcome.RESETTING, handle=request.handle)

    hit: KVCacheBlocks | None = None
    if slots.lookup:
        hit, claimed = manager.get_computed_blocks(request)
    elif claimed:
        if claimed > request.remembered_hit_tokens or claimed % depot.config.block_size:
            raise InvalidArgument(
                f"num_new_computed_tokens {claimed}: the last lookup answered "
                f"{request.remembered_hit_tokens}, and a hit is whole blocks",
                field="num_new_computed_tokens",
            )
        hit, num_found = manager.find_computed_blocks(request)
        if num_found < claimed:
            request.remembered_hit_tokens = num_found
            return SlotResult(
                Outcome.HIT_CHANGED,
                num_new_computed_tokens=num_found,
                hit_blocks=hit.block_ids,
                handle=request.handle,
            )
        if num_found > claimed:
            hit = KVCacheBlocks(
                tuple(group[: claimed // depot.config.block_size] for group in hit.blocks)
            )

    num_external = slots.num_external_computed_tokens
    if running and num_external:
        raise InvalidArgument(
            "external tokens are given when the request is admitted",
            field="num_external_computed_tokens",
        )
    num_computed = slots.num_computed_tokens + claimed + num_external
    if num_computed > request.num_tokens:
        raise InvalidArgument(
            f"{num_computed} tokens computed, of {request.num_tokens}",
            field="num_external_computed_tokens",
        )
    num_new = _num_new_tokens(request, slots, num_computed, budget)
    if num_new is None:
        return SlotResult(Outcome.NO_BUDGET, num_new_computed_tokens=claimed, handle=request.handle)
    if num_computed + num_new > depot.config.max_model_len:
        raise InvalidArgument(
            f"{num_computed} + {num_new} tokens exceed max_model_len {depot.config.max_model_len}",
            field="num_new_tokens",
        )

    new_blocks = session.allocate(
        request,
        slots.num_computed_tokens,
        num_new,
        claimed,
        hit,
        num_lookahead_tokens=slots.num_lookahead_tokens,
        num_external_computed_tokens=num_external,
        delay_cache_blocks=slots.delay_cache_blocks,
        full_sequence_must_fit=slots.full_sequence_must_fit,
        reserved_blocks=slots.reserved_blocks,
        has_scheduled_reqs=slots.has_scheduled_reqs,
    )
    if new_blocks is None:
        depot.num_refusals += 1
        return SlotResult(
            Outcome.NO_FIT,
            num_new_computed_tokens=claimed,
            handle=request.handle,
            no_fit=manager.last_refusal,
        )
    request.num_computed_tokens = num_computed
    request.remembered_hit_tokens = 0
    if not slots.delay_cache_blocks:
        # Until external bytes are here the request still waits, as in vLLM.
        request.status = _RUNNING
    return SlotResult(
        _OK,
        num_new_computed_tokens=claimed,
        num_new_tokens=num_new,
        hit_blocks=manager.empty_kv_cache_blocks.block_ids if hit is None else hit.block_ids,
        # Of external tokens too: all that is new in the table.
        new_blocks=(
            _table_from(session, request, claimed) if num_external else new_blocks.block_ids
        ),
        handle=request.handle,
    )


def _num_new_tokens(
    request: Request, slots: SlotRequest, num_computed: int, budget: int | None
) -> int | None:
    """The tokens to compute; None if the budget leaves none."""
    if slots.num_new_tokens is not None:
        if slots.num_new_tokens == 0 and slots.num_external_computed_tokens == 0:
            raise InvalidArgument(
                "num_new_tokens must be greater than 0 without external tokens",
                field="num_new_tokens",
            )
        fits = budget is None or slots.num_new_tokens <= budget
        return slots.num_new_tokens if fits else None
    num_left = request.num_tokens - num_computed
    if num_left == 0 and slots.num_external_computed_tokens == 0:
        raise InvalidArgument("every token is computed already", field="num_computed_tokens")
    num_new = num_left
    for limit in (slots.max_new_tokens, budget):
        if limit is not None:
            num_new = min(num_new, limit)
    if num_new < num_left and slots.new_tokens_alignment > 1:
        num_new -= num_new % slots.new_tokens_alignment
    return num_new if num_new > 0 or num_left == 0 else None


def _table_from(session: Session, request: Request, num_tokens: int) -> tuple[list[int], ...]:
    first = num_tokens // session.config.block_size
    tables = session.manager.get_block_ids(request.request_id)
    return tuple([table[first:] for table in tables])
