"""Slots for one request: its hit, what is computed elsewhere, and what it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.errors import InvalidArgument
from kvcore.imports import import_running
from kvcore.manager import KVCacheBlocks
from kvcore.operation import BlockTables, Outcome, SlotRequest, SlotResult
from kvcore.request import Request, RequestStatus
from kvcore.session import Session

if TYPE_CHECKING:
    from kvcore.depot import Depot

# Reading a member off its enum costs 0.1 us and more on Python 3.11.
_OK, _RUNNING = Outcome.OK, RequestStatus.RUNNING


def admit(
    depot: Depot, session: Session, request: Request, slots: SlotRequest, budget: int | None
) -> SlotResult:
    """Slots for ``request``; see SlotRequest. ``budget``: tokens left to schedule, None: any.

    What does not fit, a changed hit, no budget and a pending reset are outcomes, and
    allocate nothing. InvalidArgument for counts that contradict what the request holds.
    """
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

    if request.importing is not None:
        raise import_running(request)

    if not running and depot.holds_off(request):
        return SlotResult(Outcome.RESETTING, handle=request.handle)

    hit: KVCacheBlocks | None = None
    if slots.lookup:
        hit, claimed = manager.get_computed_blocks(request)
    elif claimed:
        if claimed > request.remembered_hit_tokens or claimed % depot.config.scheduler_block_size:
            raise InvalidArgument(
                f"num_new_computed_tokens {claimed}: the last lookup answered "
                f"{request.remembered_hit_tokens}, and a hit is whole blocks",
                field="num_new_computed_tokens",
            )
        # A shorter hit is not a part of a longer one where attention has a window.
        hit, num_found = manager.find_computed_blocks(request, claimed)
        if num_found != claimed:
            request.remembered_hit_tokens = num_found
            return SlotResult(
                Outcome.HIT_CHANGED,
                num_new_computed_tokens=num_found,
                hit_blocks=hit.block_ids,
                handle=request.handle,
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
        num_encoder_tokens=slots.num_encoder_tokens,
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
    hit_ids = manager.empty_kv_cache_blocks.block_ids if hit is None else hit.block_ids
    new_ids = new_blocks.block_ids
    if num_external or (claimed and len(new_ids) > 1):
        # External tokens have blocks too, and move windows beyond blocks of the hit.
        hit_ids, new_ids = _split_tables(session, request, claimed)
    return SlotResult(
        _OK,
        num_new_computed_tokens=claimed,
        num_new_tokens=num_new,
        hit_blocks=hit_ids,
        new_blocks=new_ids,
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


def _split_tables(
    session: Session, request: Request, num_tokens: int
) -> tuple[BlockTables, BlockTables]:
    """The blocks of the first ``num_tokens`` tokens, and the rest of the tables."""
    tables = session.manager.get_block_ids(request.request_id)
    stops = [
        0 if manager.counts_encoder_tokens else num_tokens // manager.block_size
        for manager in session.manager.coordinator.managers
    ]
    return (
        tuple([table[:stop] for table, stop in zip(tables, stops, strict=True)]),
        tuple([table[stop:] for table, stop in zip(tables, stops, strict=True)]),
    )
