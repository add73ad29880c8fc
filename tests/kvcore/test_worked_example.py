"""The published worked example, step by step, in the form that vLLM 0.25.1 gives it."""

from __future__ import annotations

from building import make_manager, make_request
from kvcore.check import check
from kvcore.manager import KVCacheManager
from kvcore.request import Request

SHARED = list(range(100, 112))


def admit(manager: KVCacheManager, request: Request, num_new_tokens: int) -> list[int]:
    """Look up and allocate; the new block ids."""
    hit, num_hit = manager.get_computed_blocks(request)
    blocks = manager.allocate_slots(request, num_new_tokens - num_hit, num_hit, hit)
    assert blocks is not None
    request.num_computed_tokens = num_new_tokens
    assert check(manager) == []
    return blocks.block_ids[0]


def test_eleven_blocks_of_four_tokens() -> None:
    manager = make_manager(num_blocks=11)
    queue = manager.block_pool.free_queue
    assert queue.block_ids() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]

    # Request 0: 15 tokens, of which 12 will be shared. Three full blocks, one of 3 tokens.
    first = make_request("0", [*SHARED, 1, 2, 3])
    assert admit(manager, first, 15) == [1, 2, 3, 4]
    assert [block.block_hash is not None for block in manager.get_blocks("0").blocks[0]] == [
        True,
        True,
        True,
        False,
    ]

    # It decodes: the 16th token fills block 4, the 17th needs block 5.
    for token in (4, 5):
        first.append(token.to_bytes(4, "little"))
        grown = manager.allocate_slots(first, 1)
        assert grown is not None
        first.num_computed_tokens += 1
    assert manager.get_block_ids("0") == ([1, 2, 3, 4, 5],)
    assert check(manager) == []

    # Request 1: 14 tokens, of which the first 10 are as request 0's: two blocks are hits.
    second = make_request("1", [*SHARED[:10], 7, 8, 9, 10])
    hit, num_hit = manager.get_computed_blocks(second)
    assert (hit.block_ids, num_hit) == (([1, 2],), 8)
    assert admit(manager, second, 14) == [6, 7]
    assert manager.get_block_ids("1") == ([1, 2, 6, 7],)

    # Freed tail first: blocks without a hash (5, 7) to the front, hashed ones to the back.
    manager.free(first)
    assert queue.block_ids() == [5, 8, 9, 10, 4, 3]
    manager.free(second)
    assert queue.block_ids() == [7, 5, 8, 9, 10, 4, 3, 6, 2, 1]
    assert check(manager) == []

    # Request 2: 29 tokens, 12 shared: blocks 1, 2, 3 from the middle and the end of the queue.
    third = make_request("2", [*SHARED, *range(200, 217)])
    hit, num_hit = manager.get_computed_blocks(third)
    assert (hit.block_ids, num_hit) == (([1, 2, 3],), 12)
    assert admit(manager, third, 29) == [7, 5, 8, 9, 10]
    assert manager.get_block_ids("2") == ([1, 2, 3, 7, 5, 8, 9, 10],)
    assert queue.block_ids() == [4, 6]
