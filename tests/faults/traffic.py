"""Random calls that a scheduler might make, right ones mostly, planned on the model's state."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from random import Random
from typing import Any

from kvdepot.v1 import cache_pb2 as pb
from kvdepot.v1 import types_pb2
from model import Model
from model_state import Request, Session

REQUEST_IDS = ("a", "b", "c", "d")
SALTS = ("", "", "", "salt")
NUM_STORIES = 3
"""Prompts begin alike: each is the beginning of one of so many texts."""


@dataclass(frozen=True)
class Planned:
    """A call without its context; ``mark`` is (step, completed step), or None."""

    method: str
    request: Any
    mark: tuple[int, int] | None


def plan(
    chance: Random, model: Model, session: Session, *, pipelines: bool, hurries: bool = True
) -> Planned:
    """The session's next call.

    ``pipelines``: it says which steps are in flight; ``hurries``: its drains have deadlines.
    """
    mark = None
    if pipelines:
        step = session.step + chance.choice((0, 1, 1))
        mark = (step, chance.randint(max(session.completed, step - 2), step))
    make = _reset
    if chance.random() > 0.04:
        make = chance.choice(
            [_lookup, _return] + [_admit, _claim, _cache] * 2 + [_grow, _free, _step] * 3
        )
    method, request = make(chance, model, session)
    if not hurries and method == "ResetPrefixCache":
        request.ClearField("deadline_seconds")
    return Planned(method, request, mark)


def columns(values: list[int], code: str = "i") -> bytes:
    """Numbers as they travel."""
    return struct.pack(f"<{len(values)}{code}", *values)


def prompt(chance: Random, model: Model) -> list[int]:
    """The beginning of one of the stories."""
    story = chance.randrange(NUM_STORIES)
    return [1000 * story + i for i in range(chance.randint(1, 4 * model.block_size + 1))]


def _pick(chance: Random, session: Session, *, holding: bool | None = None) -> Request | None:
    found = [r for r in session.requests.values() if holding is None or r.holds == holding]
    return chance.choice(found) if found else None


def _content(chance: Random, model: Model, request: Request | None) -> Any:
    """The introduction of a new request; of one that is there, at times a repeat."""
    if request is not None:
        if chance.random() < 0.8:
            return None
        return pb.RequestContent(tokens=columns(request.tokens, "I"))
    salt = chance.choice(SALTS)
    content = pb.RequestContent(tokens=columns(prompt(chance, model), "I"))
    if salt:
        content.extra_keys.cache_salt = salt
    return content


def _lookup(chance: Random, model: Model, session: Session) -> tuple[str, Any]:
    request_id = chance.choice(REQUEST_IDS)
    content = _content(chance, model, session.requests.get(request_id))
    return "GetComputedBlocks", pb.GetComputedBlocksRequest(request_id=request_id, content=content)


def _slots(chance: Random, model: Model, session: Session) -> pb.SlotRequest:
    """An admission that looks up, or of tokens computed elsewhere."""
    request_id = chance.choice(REQUEST_IDS)
    request = session.requests.get(request_id)
    slots = pb.SlotRequest(request_id=request_id, content=_content(chance, model, request))
    kind = chance.random()
    if kind < 0.15:
        slots.num_external_computed_tokens = model.block_size
        slots.num_new_tokens = chance.choice((0, 1))
        slots.delay_cache_blocks = True
    else:
        slots.lookup = True
        if kind < 0.5:
            slots.max_new_tokens = chance.randint(1, 2 * model.block_size)
            slots.new_tokens_alignment = chance.choice((0, 2))
    if chance.random() < 0.2:
        slots.num_lookahead_tokens = chance.randint(1, model.block_size)
    if chance.random() < 0.2:
        slots.full_sequence_must_fit = True
        slots.reserved_blocks = chance.randint(0, 3)
    if chance.random() < 0.3:
        slots.has_scheduled_reqs = chance.random() < 0.5
    return slots


def _admit(chance: Random, model: Model, session: Session) -> tuple[str, Any]:
    return "AllocateSlots", pb.AllocateSlotsRequest(slots=_slots(chance, model, session))


def _claim(chance: Random, model: Model, session: Session) -> tuple[str, Any]:
    """Allocation after a lookup; it may have changed meanwhile."""
    request = _pick(chance, session, holding=False)
    if request is None:
        return _lookup(chance, model, session)
    slots = pb.SlotRequest(request_id=request.request_id)
    slots.num_new_computed_tokens = request.remembered
    if request.remembered and chance.random() < 0.2:
        slots.num_new_computed_tokens -= model.block_size
    return "AllocateSlots", pb.AllocateSlotsRequest(slots=slots)


def _growth(chance: Random, model: Model, request: Request) -> tuple[int, int, int, list[int]]:
    """Computed tokens, new tokens, and an offset with tokens written there."""
    computed = min(len(request.tokens), len(request.table) * model.block_size)
    if chance.random() < 0.15:
        computed = chance.randint(0, computed)
    written: list[int] = []
    offset = len(request.tokens)
    if chance.random() < 0.7:
        written = [7, 8][: chance.randint(1, 2)]
        if chance.random() < 0.2:  # rejected drafts: others in their place
            offset = max(1, offset - chance.randint(1, 3))
            computed = min(computed, offset)
    new = chance.randint(1, 3)
    return computed, new, offset, written


def _grow(chance: Random, model: Model, session: Session) -> tuple[str, Any]:
    request = _pick(chance, session, holding=True)
    if request is None:
        return _admit(chance, model, session)
    computed, new, offset, written = _growth(chance, model, request)
    content = None
    if written:
        content = pb.RequestContent(token_offset=offset, tokens=columns(written, "I"))
    slots = pb.SlotRequest(
        request_id=request.request_id,
        content=content,
        num_computed_tokens=computed,
        num_new_tokens=new,
        num_lookahead_tokens=chance.choice((0, 0, 2)),
    )
    return "AllocateSlots", pb.AllocateSlotsRequest(slots=slots)


def _num_cached(chance: Random, model: Model, request: Request) -> int:
    most = min(len(request.tokens), len(request.table) * model.block_size)
    return most + 1 if chance.random() < 0.05 else chance.randint(most // 2, most)


def _cache(chance: Random, model: Model, session: Session) -> tuple[str, Any]:
    request = _pick(chance, session)
    request_id = chance.choice(REQUEST_IDS) if request is None else request.request_id
    count = 0 if request is None else _num_cached(chance, model, request)
    return "CacheBlocks", pb.CacheBlocksRequest(request_id=request_id, num_computed_tokens=count)


def _free(chance: Random, model: Model, session: Session) -> tuple[str, Any]:
    call = pb.FreeRequest(
        request_id=chance.choice(REQUEST_IDS),
        mode=chance.choice((1, 1, 2, 3)),
        did_not_run=chance.random() < 0.3,
    )
    return "Free", call


def _return(chance: Random, model: Model, session: Session) -> tuple[str, Any]:
    ticket = chance.choice([*session.tickets, 99])
    return "ReturnBlocks", pb.ReturnBlocksRequest(ticket=ticket)


def _reset(chance: Random, model: Model, session: Session) -> tuple[str, Any]:
    """Of the pool or of a salt, in any mode; or a question about a drain."""
    call = pb.ResetPrefixCacheRequest(mode=chance.choice((0, 1, 2, 2, 3)))
    if chance.random() < 0.4:
        call.scope.cache_salt = chance.choice(("", "salt"))
    if chance.random() < 0.5:
        call.deadline_seconds = chance.choice((0.0, 0.05, 0.5))
    if chance.random() < 0.3:
        call.drain_id = chance.randint(1, 3)
    return "ResetPrefixCache", call


def _step(chance: Random, model: Model, session: Session) -> tuple[str, Any]:
    """Frees, growth, confirmations and admissions, in any order."""
    step = pb.StepRequest(on_no_fit=chance.choice((0, 1, 2)))
    if chance.random() < 0.4:
        step.token_budget = chance.randint(1, 5 * model.block_size)
    step.grow.num_lookahead_tokens = chance.choice((0, 0, 2))
    grown: list[tuple[int, tuple[int, int, int, list[int]]]] = []
    cached: list[tuple[int, int]] = []
    freed: list[tuple[int, int, int]] = []
    for _ in range(chance.randint(1, 5)):
        kind = chance.randint(1, 4)
        request = _pick(chance, session)
        if kind == pb.OPERATION_KIND_ADMIT or request is None:
            kind = pb.OPERATION_KIND_ADMIT
            step.admissions.append(_slots(chance, model, session))
        elif kind == pb.OPERATION_KIND_GROW:
            grown.append((request.handle, _growth(chance, model, request)))
        elif kind == pb.OPERATION_KIND_CACHE:
            cached.append((request.handle, _num_cached(chance, model, request)))
        else:
            freed.append((request.handle, chance.choice((1, 1, 2, 3)), chance.randint(0, 1)))
        step.runs.add(kind=kind, count=1)
    if grown:
        step.grow.handles = columns([handle for handle, _ in grown])
        step.grow.num_computed_tokens = columns([growth[0] for _, growth in grown])
        step.grow.num_new_tokens = columns([growth[1] for _, growth in grown])
        step.grow.token_offsets = columns([growth[2] for _, growth in grown])
        step.grow.token_counts = columns([len(growth[3]) for _, growth in grown])
        step.grow.tokens = columns([token for _, growth in grown for token in growth[3]], "I")
    step.cache.handles = columns([handle for handle, _ in cached])
    step.cache.num_computed_tokens = columns([count for _, count in cached])
    step.free.handles = columns([handle for handle, _, _ in freed])
    step.free.modes = bytes([mode for _, mode, _ in freed])
    step.free.did_not_run = bytes([did_not_run for _, _, did_not_run in freed])
    return "Step", step


def context_of(planned: Planned, opened: Any, op_seq: int | None) -> types_pb2.CallContext:
    """The context of the planned call."""
    context = types_pb2.CallContext(session_id=opened.session_id, epoch=opened.epoch, op_seq=op_seq)
    if planned.mark is not None:
        context.step, context.completed_step = planned.mark
    return context
