"""Faults that caches are known for, a story each: blocks that are free, held, hit or shared.

The stories are of a scheduler A, and at times a second one, B, on a pool of 16 blocks of 4
tokens. A mark (s, c) says: this call is of step s, and the writes of step c have ended.
"""

from __future__ import annotations

import pytest

from kvclient import Client
from kvclient.errors import CacheLost
from kvclient.events import BlockRemoved, BlockStored
from kvclient.values import Content, Outcome, SlotRequest, StepMark
from serving import Serve
from stage import (
    LEASE_SECONDS,
    NUM_USABLE,
    OTHER,
    PROMPT,
    Stage,
    admit,
    end_step,
    fill,
    mark_blocks,
    table,
    wait_for,
    written,
)


def test_a_block_in_use_in_the_free_list(stage: Stage) -> None:
    """A cached free block is hit: it leaves the free list, so nobody is given it."""
    hit = written(stage.b, "warm")[:2]
    assert table(admit(stage.a, "r", PROMPT))[:2] == hit
    rest = fill(stage.b, "rest", 13)
    assert not set(rest) & set(hit)
    assert stage.states == (NUM_USABLE, 0, 0, 0)
    assert admit(stage.b, "one", [1]).outcome is Outcome.NO_FIT


def test_a_held_block_in_the_free_list(stage: Stage) -> None:
    """Freed in a step that may still write: free for its scheduler, not for another."""
    held = table(admit(stage.a, "r", PROMPT, 1, 0))
    stage.a.free("r", mark=StepMark(1, 0))
    refused = admit(stage.b, "all", range(60))
    assert refused.outcome is Outcome.NO_FIT
    assert refused.no_fit is not None
    assert refused.no_fit.free_blocks == 13
    assert [(hold.name, hold.num_blocks) for hold in refused.no_fit.holders] == [("A", 3)]
    given = table(admit(stage.b, "most", range(1000, 1052)))
    assert not set(given) & set(held)
    assert set(table(admit(stage.a, "own", OTHER, 1, 0))) == set(held)


def test_a_held_block_that_is_hit_meanwhile(stage: Stage) -> None:
    """Freed in a step that still reads it, hit by another, freed again: it is still held."""
    blocks = table(admit(stage.a, "r", PROMPT, 1, 0))[:2]
    stage.a.cache_blocks("r", 10, mark=StepMark(2, 1))
    stage.a.free("r", mark=StepMark(2, 1))
    assert table(admit(stage.b, "r", PROMPT))[:2] == blocks
    stage.b.free("r")
    assert stage.states[2] == 3  # two of both, and A's half block
    assert admit(stage.b, "all", range(60)).outcome is Outcome.NO_FIT
    stage.a.free("nobody", mark=StepMark(3, 2))
    assert set(blocks) < set(table(admit(stage.b, "all again", range(64))))


def test_a_shared_block_whose_last_user_is_another(stage: Stage) -> None:
    """Freed in a step that still reads it, while another uses it, who then frees it, too."""
    blocks = table(admit(stage.a, "r", PROMPT, 1, 0))[:2]
    stage.a.cache_blocks("r", 10, mark=StepMark(2, 1))
    assert table(admit(stage.b, "r", PROMPT))[:2] == blocks
    stage.a.free("r", mark=StepMark(2, 1))
    stage.b.free("r")
    assert stage.states[2] == 3
    assert admit(stage.b, "all", range(60)).outcome is Outcome.NO_FIT
    stage.a.free("nobody", mark=StepMark(3, 2))
    assert set(blocks) < set(table(admit(stage.b, "all again", range(64))))


def test_an_idle_scheduler_keeps_nothing_from_the_others(stage: Stage) -> None:
    """Its last Free is its last call: what ran has ended, as it names no steps."""
    fill(stage.a, "all", NUM_USABLE)
    stage.a.free("all")
    assert stage.states[2] == 0
    fill(stage.b, "all", NUM_USABLE)


def test_a_hit_counts_once(stage: Stage) -> None:
    """The last free blocks are the hit: they are not counted as room for new tokens as well."""
    written(stage.a, "warm")
    fill(stage.b, "rest", 14)
    refused = admit(stage.a, "r", PROMPT)
    assert refused.outcome is Outcome.NO_FIT
    assert refused.no_fit is not None
    assert (refused.no_fit.needed_blocks, refused.no_fit.free_blocks) == (3, 2)


def test_a_stale_hash_after_eviction(stage: Stage) -> None:
    """A block is evicted and holds other content: its old hash is no hit, its new one is."""
    written(stage.a, "warm")
    fill(stage.b, "all", NUM_USABLE)
    stage.b.cache_blocks("all", 64)
    stage.b.free("all")
    assert stage.a.get_computed_blocks("r", list(PROMPT)).num_computed_tokens == 0
    assert stage.a.get_computed_blocks("s", list(range(5000, 5064))).num_computed_tokens == 60


def test_a_hit_that_is_evicted_before_its_allocation(stage: Stage) -> None:
    """Another scheduler takes the blocks of a hit meanwhile: that is said, nothing is allocated."""
    written(stage.a, "warm")
    assert stage.a.get_computed_blocks("r", list(PROMPT)).num_computed_tokens == 8
    fill(stage.b, "most", 15)
    changed = stage.a.allocate_slots(SlotRequest("r", num_new_computed_tokens=8))
    assert changed.outcome is Outcome.HIT_CHANGED
    assert changed.num_new_computed_tokens == 4
    assert stage.states == (15, 1, 0, 0)


def test_a_completion_after_the_abort(stage: Stage) -> None:
    """CacheBlocks of a request that was freed: told, and nothing comes back to life."""
    admit(stage.a, "r", PROMPT, 1, 0)
    stage.a.free("r", did_not_run=True, mark=StepMark(1, 0))
    assert not stage.a.cache_blocks("r", 10, mark=StepMark(2, 1))
    assert stage.a.get_computed_blocks("s", list(PROMPT)).num_computed_tokens == 0
    assert stage.states == (0, 0, 0, NUM_USABLE)


def test_a_block_that_was_never_written_is_no_hit(stage: Stage) -> None:
    """An aborted first step leaves no hit, also not in what was built on it in the same step."""
    admit(stage.a, "r", range(100, 112), 1, 0)
    child = admit(stage.a, "child", range(100, 116), 1, 0)
    assert child.num_new_computed_tokens == 12
    stage.a.free("r", did_not_run=True, mark=StepMark(1, 0))
    stage.a.free("child", mark=StepMark(2, 1))
    assert stage.b.get_computed_blocks("s", list(range(100, 120))).num_computed_tokens == 0


def test_another_never_reads_what_is_being_written(stage: Stage) -> None:
    """The same prompt on two engines at once: the second computes it for itself."""
    mine = table(admit(stage.a, "r", PROMPT, 1, 0))
    second = admit(stage.b, "r", PROMPT)
    assert second.num_new_computed_tokens == 0
    assert not set(table(second)) & set(mine)


def test_two_copies_of_a_block(stage: Stage) -> None:
    """The same prefix computed twice: one copy goes, the other is still there, and told so once."""
    with stage.client.stream_events() as events:
        first = table(admit(stage.a, "r", PROMPT, 1, 0))
        second = table(admit(stage.b, "r", PROMPT, 1, 0))
        assert not set(first) & set(second)
        stage.a.cache_blocks("r", 10, mark=StepMark(2, 1))
        stage.b.cache_blocks("r", 10, mark=StepMark(2, 1))
        stage.a.free("r", mark=StepMark(3, 2))
        stage.a.free("", mark=StepMark(4, 3))
        fill(stage.a, "all", 13)
        assert stage.a.get_computed_blocks("s", list(PROMPT)).num_computed_tokens == 8
        stage.b.free("r", mark=StepMark(3, 2))
        stage.b.free("", mark=StepMark(4, 3))
        fill(stage.a, "rest", 3, first=9000)
        told: list[tuple[type, bytes]] = []
        sequence = stage.client.stats().next_event_sequence
        for batch in events:
            for event in batch.events:
                if isinstance(event, BlockStored | BlockRemoved):
                    told += [(type(event), h) for h in event.block_hashes]
            if batch.next_sequence == sequence:
                break
    stored = [block_hash for kind, block_hash in told if kind is BlockStored][:2]
    for block_hash in stored:
        kinds = [kind for kind, other in told if other == block_hash]
        assert kinds == [BlockStored, BlockRemoved]


def test_a_prompt_that_is_cached_to_the_last_token(stage: Stage) -> None:
    """One token is left to compute, or there would be nothing to sample from."""
    written(stage.a, "warm", range(100, 112))
    again = admit(stage.a, "r", range(100, 112))
    assert (again.num_new_computed_tokens, again.num_new_tokens) == (8, 4)


def test_rejected_draft_tokens(stage: Stage) -> None:
    """Drafts that fill a block and are rejected: the block of the wrong tokens is no hit."""
    admit(stage.a, "r", PROMPT)
    drafts = Content([1, 2], token_offset=10)
    grown = SlotRequest("r", drafts, num_computed_tokens=10, num_new_tokens=2)
    assert stage.a.allocate_slots(grown).outcome is Outcome.OK
    right = Content([7], token_offset=10)
    stage.a.allocate_slots(SlotRequest("r", right, num_computed_tokens=10, num_new_tokens=1))
    stage.a.cache_blocks("r", 11)
    stage.a.free("r")
    drafted = [*PROMPT, 1, 2, 3]
    assert stage.b.get_computed_blocks("s", drafted).num_computed_tokens == 8


def test_lookahead_slots_are_no_content(stage: Stage) -> None:
    """Slots for drafts, and a half-full block, are never hits."""
    admit(stage.a, "r", PROMPT, num_lookahead_tokens=6)
    stage.a.cache_blocks("r", 10)
    stage.a.free("r")
    end_step(stage.a)
    assert stage.states == (0, 2, 0, 14)
    assert stage.b.get_computed_blocks("s", list(range(100, 120))).num_computed_tokens == 8


def test_lookups_pin_nothing(stage: Stage) -> None:
    """Hits that were found and never taken stand in nobody's way."""
    written(stage.a, "warm", range(100, 164))
    for number in range(50):
        for session in (stage.a, stage.b):
            hit = session.get_computed_blocks(f"{number}", list(range(100, 164)))
            assert hit.num_computed_tokens == 60
    assert len(fill(stage.b, "all", NUM_USABLE)) == NUM_USABLE


def test_a_window_takes_back_what_it_left(serve: Serve) -> None:
    """One request's table has the same block twice in its life, and null blocks: each block is
    freed once, the null block never."""
    served = serve(model="gemma-like", block_size=16, num_blocks=49, max_model_len=4096)
    with Client(served.target, timeout_s=20) as client, client.open_session("A") as a:
        null_block = served.server.node.depot.pool.null_block
        first = admit(a, "r", range(160))
        given = [*first.new_blocks[1]]
        for computed in range(160, 320, 16):
            more = Content(list(range(computed, computed + 16)), token_offset=computed)
            grown = a.allocate_slots(
                SlotRequest("r", more, num_computed_tokens=computed, num_new_tokens=16)
            )
            assert grown.outcome is Outcome.OK, (computed, grown.no_fit)
            given += grown.new_blocks[1]
            a.cache_blocks("r", computed)
            served.assert_clean()
        assert len(set(given)) < len(given)  # a block came back
        again = admit(a, "s", range(320))
        assert again.outcome is Outcome.OK
        assert 0 in again.hit_blocks[1]
        for name in ("r", "s", "r"):
            a.free(name)
            assert null_block.ref_cnt <= 1
            served.assert_clean()
        end_step(a)
        assert client.stats().blocks.live == 0


@pytest.mark.parametrize("completed", [0, 1], ids=["in flight", "completed"])
def test_blocks_of_a_session_whose_worker_lives_on(stage: Stage, completed: int) -> None:
    """The session ends, its worker still writes: nobody is given those blocks meanwhile."""
    worker = stage.client.attach_worker(stage.a.session_id, stage.a.epoch)
    held = table(admit(stage.a, "r", PROMPT, 1, completed))
    stage.client._keeper.remove(stage.a)
    stage.pass_time(LEASE_SECONDS / 2)
    stage.b.free("nobody")
    stage.pass_time(LEASE_SECONDS / 2)  # A's lease is over, B's is not
    with pytest.raises(CacheLost, match="session is over"):
        wait_for(worker.check)
    given = fill(stage.b, "most", 13)
    assert not set(given) & set(held)
    assert admit(stage.b, "one", [1]).outcome is Outcome.NO_FIT
    assert stage.states == (13, 0, 3, 0)
    worker.close()
    wait_for(lambda: not stage.client.stats().num_workers)
    assert admit(stage.b, "one", [1]).outcome is Outcome.OK


def test_a_session_ends_that_wrote_what_another_reads(stage: Stage) -> None:
    """Ready blocks outlive their writer, with their bytes."""
    blocks = written(stage.a, "warm")
    pool = stage.pool()
    mark_blocks(pool, blocks, [11, 12, 13])
    shared = table(admit(stage.b, "r", PROMPT))[:2]
    stage.a.close()
    assert shared == blocks[:2]
    fill(stage.b, "rest", 13)
    assert [int(pool.layer_bytes(0)[block_id].max()) for block_id in shared] == [11, 12]


def test_prefixes_outlive_their_tails(stage: Stage) -> None:
    """Of a cached prompt the last blocks are evicted first: what is left can be hit."""
    written(stage.a, "warm", range(100, 124))
    fill(stage.b, "some", 13)
    assert stage.a.get_computed_blocks("r", list(range(100, 124))).num_computed_tokens == 12
