"""A request's content: introduced, extended, cut off. Repeats change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from kvcore.operation import Content
from kvcore.request import NO_EXTRA_KEYS, TOKEN_BYTES, Request
from kvcore.session import Session

if TYPE_CHECKING:
    from kvcore.depot import Depot

HANDLE_MAX = (1 << 31) - 1
REQUEST_ID_BYTES_MAX = 1024


def find_request(
    depot: Depot, session: Session, request_id: str, content: Content | None
) -> Request:
    """The request, introduced or extended by ``content``."""
    request = session.requests.get(request_id)
    if request is not None:
        if content is not None:
            if content.extra is not None and content.extra != request.extra:
                raise AlreadyExists(
                    f"request {request_id!r} is in use with other extra keys",
                    reason="REQUEST_EXISTS",
                    field="content.extra_keys",
                )
            if content.token_offset == 0:
                _check_same_start(request, content)
            write_tokens(session, request, content.token_offset, content.tokens)
        return request
    if not request_id or len(request_id.encode()) > REQUEST_ID_BYTES_MAX:
        raise InvalidArgument(
            f"a request id has 1 to {REQUEST_ID_BYTES_MAX} bytes", field="request_id"
        )
    if content is None or content.token_offset != 0:
        raise NotFound(
            f"request {request_id!r} is not known; introduce it with its tokens",
            reason="UNKNOWN_REQUEST",
            field="request_id",
        )
    return _introduce(depot, session, request_id, content)


def _check_same_start(request: Request, content: Content) -> None:
    num_bytes = min(len(content.tokens), len(request.tokens))
    with memoryview(request.tokens) as held:
        if held[:num_bytes] != content.tokens[:num_bytes]:
            raise AlreadyExists(
                f"request {request.request_id!r} is in use with other tokens; free it first",
                reason="REQUEST_EXISTS",
                field="content.tokens",
            )


def _introduce(depot: Depot, session: Session, request_id: str, content: Content) -> Request:
    check_tokens(content.tokens)
    if not content.tokens:
        raise InvalidArgument("a request begins with a token", field="content.tokens")
    num_prompt_tokens = content.num_prompt_tokens
    if num_prompt_tokens is not None and not (
        0 < num_prompt_tokens <= depot.config.max_request_tokens
    ):
        raise InvalidArgument(
            f"num_prompt_tokens {num_prompt_tokens} is not in 1..{depot.config.max_request_tokens}",
            field="content.num_prompt_tokens",
        )
    if depot.last_handle == HANDLE_MAX:
        raise ResourceExhausted("no handles are left in this epoch", reason="NO_HANDLES")
    extra = NO_EXTRA_KEYS if content.extra is None else content.extra
    request = Request(
        request_id,
        hash_chain=(
            depot.scheme.chain(depot.config.hash_block_size, extra)
            if depot.config.enable_caching
            else None
        ),
        extra=extra,
        lora_id=content.lora_id,
        num_prompt_tokens=(
            len(content.tokens) // TOKEN_BYTES if num_prompt_tokens is None else num_prompt_tokens
        ),
        skip_reading_prefix_cache=content.skip_reading_prefix_cache,
        handle=depot.last_handle + 1,
    )
    session.require_room()
    write_tokens(session, request, 0, content.tokens)
    session.add(request)
    depot.last_handle += 1
    return request


def write_tokens(session: Session, request: Request, offset: int, tokens: bytes) -> None:
    """Put ``tokens`` at ``offset``; what the request held beyond their end is cut off.

    Tokens that are there already are left alone, so that a repeat changes nothing.
    """
    if len(tokens) % TOKEN_BYTES:
        check_tokens(tokens)
    end = offset + len(tokens) // TOKEN_BYTES
    if end > session.config.max_request_tokens:
        raise ResourceExhausted(
            f"a request holds at most {session.config.max_request_tokens} tokens, not {end}",
            reason="REQUEST_TOO_LONG",
            field="content.tokens",
        )
    if offset > request.num_tokens:
        raise InvalidArgument(
            f"token_offset {offset} is beyond the {request.num_tokens} tokens held",
            field="content.token_offset",
        )
    num_tokens_before = request.num_tokens
    if end > num_tokens_before:
        session.require_token_room(end - num_tokens_before)
    if offset == num_tokens_before:
        if tokens:
            request.append(tokens)
    else:
        _rewrite(session, request, offset, tokens)
    session.num_tokens += request.num_tokens - num_tokens_before


def _rewrite(session: Session, request: Request, offset: int, tokens: bytes) -> None:
    end = offset + len(tokens) // TOKEN_BYTES
    held = memoryview(request.tokens)[offset * TOKEN_BYTES : end * TOKEN_BYTES]
    if held == tokens[: len(held)]:
        kept = min(end, request.num_tokens)
    else:
        kept = offset + _num_common_tokens(bytes(held), tokens)
    held.release()
    if kept < request.num_tokens:
        _truncate(session, request, kept)
    if kept < end:
        request.append(tokens[(kept - offset) * TOKEN_BYTES :])


def _truncate(session: Session, request: Request, num_tokens: int) -> None:
    managers = session.manager.coordinator.managers
    pool = session.manager.block_pool
    holds, pins = pool.holds, pool.pins.counts
    num_computed = min(request.num_computed_tokens, num_tokens)
    for manager in managers:
        if manager.has_absorbed(request.request_id, num_tokens):
            raise FailedPrecondition(
                f"the {manager.spec.kind} state holds tokens from {num_tokens} on already; cut at "
                f"a multiple of {manager.block_size}, or free the request and introduce it again",
                reason="STATE_ADVANCED",
                field="content.token_offset",
            )
        if manager.has_released(request.request_id, num_computed, request.num_prompt_tokens):
            raise FailedPrecondition(
                f"what {manager.spec.kind} looks at from token {num_computed} on is released "
                "already; free the request and introduce it again",
                reason="WINDOW_RELEASED",
                field="content.token_offset",
            )
        table = manager.req_to_blocks.get(request.request_id, [])
        for block in table[num_tokens // manager.block_size :]:
            if (
                block.ref_cnt > 1
                or block.block_id in pins
                or holds.is_awaited_beside(block, session.view)
            ):
                raise FailedPrecondition(
                    f"tokens from {num_tokens} on lie in block {block.block_id}, which "
                    "another request or a transfer shares or still reads; free the request and "
                    "introduce it again",
                    reason="SHARED_BLOCK",
                    field="content.token_offset",
                )
    for manager in managers:
        table = manager.req_to_blocks.get(request.request_id, [])
        first = num_tokens // manager.block_size
        for block in table[first:]:
            session.manager.block_pool.forget(block)
        cached = manager.num_cached_blocks
        if cached.get(request.request_id, 0) > first:
            cached[request.request_id] = first
    request.num_confirmed_tokens = min(request.num_confirmed_tokens, num_tokens)
    request.truncate(num_tokens)
    request.num_computed_tokens = num_computed
    request.remembered_hit_tokens = 0


def check_tokens(tokens: bytes) -> None:
    """InvalidArgument unless ``tokens`` are whole little-endian uint32."""
    if len(tokens) % TOKEN_BYTES:
        raise InvalidArgument(
            f"tokens are little-endian uint32 each, so {len(tokens)} bytes are not a whole number",
            field="content.tokens",
        )


def _num_common_tokens(left: bytes, right: bytes) -> int:
    """Leading tokens that are equal, by bisection over equal prefixes."""
    low, high = 0, min(len(left), len(right)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if left[: middle * TOKEN_BYTES] == right[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
