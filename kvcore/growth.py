"""Growth of a running request by a few tokens: hundreds of them are a decode step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.block import KVCacheBlock
from kvcore.coordinator import Tables
from kvcore.operation import NoFit
from kvcore.request import Request

if TYPE_CHECKING:
    from kvcore.manager import KVCacheManager


class Later:
    """What growth leaves until its answer is sent: no answer to growth depends on it.

    ``taken``: blocks handed out, whose content is to be evicted. ``filled``: by handle, requests
    whose full blocks are to be hashed, and those up to so many tokens registered.
    """

    __slots__ = ("filled", "taken")

    def __init__(self) -> None:
        self.taken: list[KVCacheBlock] = []
        self.filled: dict[int, tuple[Request, int]] = {}


def grow(
    manager: KVCacheManager,
    request: Request,
    num_new_tokens: int,
    num_lookahead_tokens: int = 0,
    later: Later | None = None,
) -> Tables | None:
    """As allocate_slots, of a running request and without all that only others have.

    In pools that grow by table, it notes how far the request can grow until it has to
    be asked about again; what shortens a table or its hits, or ends it, forgets that.

    ``later``, for a coordinator that registers all full blocks: what is evicted, and what
    there is to register, is left there.
    """
    coordinator = manager.coordinator
    request_id, before = request.request_id, request.num_computed_tokens
    max_model_len = manager.max_model_len
    num_computed = before if before < max_model_len else max_model_len
    num_main = num_computed + num_new_tokens
    num_slots = num_main + num_lookahead_tokens
    if num_slots > max_model_len:
        num_slots = max_model_len
    num_tokens, num_to_cache = request.num_tokens, 0
    registers = manager.enable_caching and not request.outlived_reset
    if registers:
        num_to_cache = num_main if num_main < num_tokens else num_tokens
    if coordinator.recycling:
        coordinator.remove_skipped_blocks(request_id, num_computed, request.num_prompt_tokens)
    if not coordinator.grows_by_table:
        if is_settled(manager, request, before, num_new_tokens, num_lookahead_tokens):
            return manager.no_blocks
        num_needed = coordinator.get_num_blocks_to_allocate(
            request_id, num_slots, manager.no_blocks, before, num_main
        )
        if _does_not_fit(manager, num_needed):
            return None
        grown = coordinator.allocate_new_blocks(request_id, num_slots, num_main)
        if num_to_cache:
            coordinator.cache_blocks(request, num_to_cache)
        return grown

    # What most pools are made of: what there is to do is seen here, without calls.
    groups, num_needed, fills = coordinator.managers, 0, False
    for group in groups:
        size = group.block_size
        missing = -(-num_slots // size) - len(group.req_to_blocks.get(request_id, ()))
        if missing > 0:
            num_needed += missing
        if num_to_cache // size > group.num_cached_blocks.get(request_id, 0):
            fills = True
    new_blocks = manager.no_blocks
    if num_needed:
        if _does_not_fit(manager, num_needed):
            return None
        new_blocks = tuple([group.extend_table(request_id, num_slots, later) for group in groups])
    is_late = False
    if fills:
        if later is None:
            coordinator.cache_blocks(request, num_to_cache)
        else:
            is_late = True
            later.filled[request.handle] = (request, num_to_cache)
    elif num_needed and later is not None:
        # So that it is seen if the request grows again.
        later.filled.setdefault(request.handle, (request, 0))
    quiet_slots, quiet_end = max_model_len, manager.quiet_end_max
    if request.hash_chain is not None:
        hash_block_size = manager.config.hash_block_size
        before_next_hash = (num_tokens // hash_block_size + 1) * hash_block_size - 1
        if before_next_hash < quiet_end:
            quiet_end = before_next_hash
    for group in groups:
        size = group.block_size
        group_end = group_slots = len(group.req_to_blocks[request_id]) * size
        if registers:
            num_cached = group.num_cached_blocks.get(request_id, 0)
            group_end = ((num_to_cache // size if is_late else num_cached) + 1) * size - 1
        if group_slots < quiet_slots:
            quiet_slots = group_slots
        if group_end < quiet_end:
            quiet_end = group_end
    for group in coordinator.recycling:
        group_end = group.window_end(before)
        if group_end < quiet_end:
            quiet_end = group_end
    request.quiet_slots = quiet_slots
    request.quiet_end = quiet_end if quiet_end < quiet_slots else quiet_slots
    return new_blocks


def is_settled(
    manager: KVCacheManager,
    request: Request,
    num_computed_tokens: int,
    num_new_tokens: int,
    num_lookahead_tokens: int = 0,
) -> bool:
    """Whether growth would answer no blocks, and change and refuse nothing.

    Of a running request with ``num_computed_tokens``, without a hit. The usual
    decode step is so, and to know it costs little.
    """
    max_model_len = manager.max_model_len
    end = num_computed_tokens + num_new_tokens
    num_slots = end + num_lookahead_tokens
    if num_slots > max_model_len:
        if num_computed_tokens > max_model_len:
            return False
        num_slots = max_model_len
    num_to_cache = 0
    if manager.enable_caching and not request.outlived_reset:
        num_to_cache = end if end < request.num_tokens else request.num_tokens
    for group in manager.coordinator.managers:
        if not group.is_settled(request.request_id, num_computed_tokens, num_slots, num_to_cache):
            return False
    return True


def _does_not_fit(manager: KVCacheManager, num_needed: int) -> bool:
    num_free = manager.block_pool.num_free_blocks(manager.view)
    if num_needed <= num_free:
        return False
    manager.last_refusal = NoFit(num_needed, num_free, 0, 0)
    return True
