"""Faults that engine-embedded and shared caches are known for, a story each.

The stories are of a scheduler A, and at times a second one, B, on a pool of 16 blocks of 4
tokens. A mark (s, c) says: this call is of step s, and the writes of step c have ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvclient import Client
from kvclient.client import Session
from kvclient.errors import (
    AlreadyExists,
    CacheLost,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
)
from kvclient.events import BlockRemoved, BlockStored
from kvclient.pool import Pool, map_pool
from kvclient.values import (
    BlockStatus,
    Cache,
    Content,
    ExtraKeys,
    Free,
    FreeMode,
    Grow,
    MultimodalItem,
    OperationKind,
    Outcome,
    ResetMode,
    SlotRequest,
    SlotResult,
    Step,
    StepMark,
)
from kvserver.mover.handle import MoverHandle
from manual_clock import ManualClock
from serving import TIMEOUT_SECONDS, Serve, Served

LEASE_SECONDS = 10.0
NUM_USABLE = 16
PROMPT = range(100, 110)
"""Two full blocks, and a half."""
OTHER = range(200, 210)
REFUSE, FORCE = ResetMode.REFUSE, ResetMode.FORCE


@dataclass
class Stage:
    """A server, and two schedulers on it."""

    served: Served
    client: Client
    clock: ManualClock
    a: Session
    b: Session

    @property
    def states(self) -> tuple[int, int, int, int]:
        """Live, cached, quarantined and free blocks; the audit must be clean."""
        self.served.assert_clean()
        blocks = self.served.stats().blocks
        return blocks.live, blocks.cached, blocks.quarantined, blocks.free

    def refs(self, block_id: int) -> int:
        """References of a block."""
        return self.served.server.node.depot.pool.blocks[block_id].ref_cnt

    def pass_time(self, seconds: float) -> None:
        """Nobody renews a lease meanwhile."""
        self.served.loop.call(lambda: self.clock.advance(seconds))

    def pool(self) -> Pool:
        """The bytes."""
        return map_pool(self.a.pool)


@pytest.fixture
def stage(serve: Serve) -> Iterator[Stage]:
    """Leases run by a clock that the test moves."""
    clock = ManualClock()
    served = serve(num_blocks=NUM_USABLE + 1, clock=clock, lease_ttl_seconds=LEASE_SECONDS)
    with Client(served.target, timeout_s=20) as client:
        yield Stage(served, client, clock, client.open_session("A"), client.open_session("B"))
        served.assert_clean()


def admit(session: Session, request_id: str, prompt: Any, *mark: int, **slots: Any) -> SlotResult:
    """Look up and allocate; the mark, if any, is (step, completed step)."""
    content = prompt if isinstance(prompt, Content) else Content(list(prompt))
    step = StepMark(*mark) if mark else None
    return session.allocate_slots(SlotRequest(request_id, content, lookup=True, **slots), mark=step)


def table(result: SlotResult) -> list[int]:
    """The block table after an admission."""
    assert result.outcome is Outcome.OK, result
    return [*result.hit_blocks[0], *result.new_blocks[0]]


def fill(session: Session, request_id: str, num_blocks: int, first: int = 5000) -> list[int]:
    """Take so many blocks for other content, and leave them in use."""
    return table(admit(session, request_id, range(first, first + 4 * num_blocks)))


def written(session: Session, request_id: str, prompt: Any = PROMPT) -> list[int]:
    """A prompt admitted, computed, confirmed, and over: its full blocks are hits for all."""
    blocks = table(admit(session, request_id, prompt))
    tokens = prompt.tokens if isinstance(prompt, Content) else prompt
    assert session.cache_blocks(request_id, len(tokens))
    assert session.free(request_id).known
    end_step(session)
    return blocks


def wait_for(condition: Callable[[], object]) -> None:
    """Until it is true, or raises."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def end_step(session: Session) -> None:
    """Blocks that were freed before are everybody's now."""
    assert not session.free("nobody").known


def test_abort_before_allocation(stage: Stage) -> None:
    """A request is aborted between its lookup and its allocation: the hit leaks no reference."""
    written(stage.b, "warm")
    hit = stage.a.get_computed_blocks("r", list(PROMPT))
    assert hit.num_computed_tokens == 8
    assert stage.a.free("r").known
    with pytest.raises(NotFound):
        stage.a.allocate_slots(SlotRequest("r", num_new_computed_tokens=8))
    assert stage.states == (0, 2, 0, 14)


def test_abort_of_a_refused_request(stage: Stage) -> None:
    """A request that never fitted is aborted: a refusal leaves no reference on its hit."""
    (first, second, _) = written(stage.b, "warm")
    fill(stage.b, "big", 14)
    refused = admit(stage.a, "r", range(100, 140))
    assert refused.outcome is Outcome.NO_FIT
    assert (stage.refs(first), stage.refs(second)) == (0, 0)
    assert stage.a.free("r").known
    assert stage.b.free("big").known


def test_abort_during_a_transfer(serve: Serve) -> None:
    """Blocks are freed while a peer pulls them: nobody is given them until it is done."""
    served = serve(
        num_blocks=257,
        num_layers=24,
        num_kv_heads=8,
        head_size=128,
        make_data_plane=MoverHandle,
    )
    with Client(served.target, timeout_s=60) as client, client.open_session("A") as a:
        pool = map_pool(a.pool)
        prompt = list(range(4 * 255))
        blocks = table(admit(a, "r", prompt))
        mark_blocks(pool, blocks, [index % 250 + 1 for index in range(255)])
        a.cache_blocks("r", len(prompt))
        hashes = stored_hashes(client)
        assert len(hashes) == 255
        answers = client.pull_blocks(hashes, checksums=True, timeout_s=60)
        pulled = [next(answers)]
        a.free("r")
        taken = fill(a, "other", 1)
        assert admit(a, "more", [1]).outcome is Outcome.NO_FIT
        mark_blocks(pool, taken, [255])
        served.assert_clean()
        pulled += answers
        assert [answer.block_hash for answer in pulled] == hashes
        for index, answer in enumerate(pulled):
            assert answer.status is BlockStatus.READY
            assert set(answer.data) == {index % 250 + 1}
        fill(a, "rest", 255)
        served.assert_clean()


def mark_blocks(pool: Pool, block_ids: list[int], values: list[int]) -> None:
    """Fill each block with a byte of its own."""
    for layer in pool.layer_names:
        view = pool.layer_bytes(layer)
        for block_id, value in zip(block_ids, values, strict=True):
            view[block_id] = value


def stored_hashes(client: Client) -> list[bytes]:
    """What everybody can read, parents first."""
    found: list[bytes] = []
    with client.stream_events(snapshot=True) as batches:
        for batch in batches:
            for event in batch.events:
                if isinstance(event, BlockStored):
                    found += event.block_hashes
            if batch.snapshot_end:
                break
    return found


def test_abort_while_a_peer_still_writes(stage: Stage) -> None:
    """A request that waits for KV from elsewhere is aborted: what arrives late is nobody's hit."""
    slots = SlotRequest(
        "r",
        Content(list(PROMPT)),
        num_external_computed_tokens=8,
        num_new_tokens=0,
        delay_cache_blocks=True,
    )
    assert stage.a.allocate_slots(slots, mark=StepMark(1, 0)).outcome is Outcome.OK
    assert stage.a.free("r", mark=StepMark(1, 0)).known
    # Step 1 may still write: the blocks are not B's yet.
    assert stage.states == (0, 0, 2, 14)
    assert admit(stage.b, "all", range(60)).outcome is Outcome.NO_FIT
    # The load says that it is done, after the abort.
    assert not stage.a.cache_blocks("r", 8, mark=StepMark(2, 1))
    assert stage.b.get_computed_blocks("same", list(PROMPT)).num_computed_tokens == 0
    assert admit(stage.b, "all2", range(60)).outcome is Outcome.OK


def test_duplicate_request_id(stage: Stage) -> None:
    """An id in use: the same content is the same request, other content is refused."""
    first = admit(stage.a, "r", PROMPT)
    again = stage.a.allocate_slots(
        SlotRequest("r", Content(list(PROMPT)), num_computed_tokens=10, num_new_tokens=1)
    )
    assert again.handle == first.handle
    assert again.new_blocks == ([],)
    with pytest.raises(AlreadyExists):
        admit(stage.a, "r", OTHER)
    salted = Content(list(PROMPT), extra_keys=ExtraKeys(cache_salt="salt"))
    with pytest.raises(AlreadyExists):
        admit(stage.a, "r", salted)
    # Another scheduler's ids are its own.
    assert admit(stage.b, "r", OTHER).handle != first.handle
    assert stage.a.free("r").known
    assert stage.client.stats().num_requests == 1


def test_double_free(stage: Stage) -> None:
    """A request is freed twice: another's references to the same blocks stay."""
    written(stage.a, "warm")
    shared = table(admit(stage.a, "r", PROMPT))[:2]
    assert table(admit(stage.b, "r", PROMPT))[:2] == shared
    assert stage.a.free("r").known
    assert not stage.a.free("r").known
    assert [stage.refs(block_id) for block_id in shared] == [1, 1]


def test_freed_by_free_and_by_close(stage: Stage) -> None:
    """Free, and then the end of the session: once is enough."""
    written(stage.b, "warm")
    shared = table(admit(stage.b, "r", PROMPT))[:2]
    table(admit(stage.a, "r", PROMPT))
    stage.a.free("r")
    assert stage.a.close() == 0
    assert [stage.refs(block_id) for block_id in shared] == [1, 1]
    assert stage.states[0] == 3


def test_freed_by_a_step_and_by_a_call(stage: Stage) -> None:
    """A Step frees a request that Free freed, and the other way round."""
    admit(stage.b, "stays", PROMPT)
    handles = [admit(stage.a, name, PROMPT).handle for name in ("r", "s")]
    assert stage.a.free("r").known
    step = Step(runs=[(OperationKind.FREE, 2)], free=Free(handles))
    assert list(stage.a.step(step).free_outcomes) == [Outcome.UNKNOWN_HANDLE, Outcome.OK]
    assert not stage.a.free("s").known
    assert stage.states[0] == 3


def test_freed_twice_in_one_step(stage: Stage) -> None:
    """A Step frees the same request twice, and grows it in between."""
    handle = admit(stage.a, "r", PROMPT).handle
    step = Step(
        runs=[(OperationKind.FREE, 1), (OperationKind.GROW, 1), (OperationKind.FREE, 1)],
        grow=Grow([handle], [10], [1]),
        free=Free([handle, handle]),
    )
    result = stage.a.step(step)
    unknown = Outcome.UNKNOWN_HANDLE
    assert list(result.free_outcomes) == [Outcome.OK, unknown]
    assert list(result.grow.outcomes) == [unknown]
    assert stage.states[0] == 0


def test_freed_by_the_lease_and_by_a_late_call(stage: Stage) -> None:
    """A scheduler that was gone too long frees what was freed for it: it is fenced."""
    written(stage.b, "warm")
    shared = table(admit(stage.b, "r", PROMPT))[:2]
    stale = stage.client.open_session("late", lease_ttl_s=1.0)
    stage.client._keeper.remove(stale)
    table(admit(stale, "r", PROMPT))
    stage.pass_time(1.1)
    with pytest.raises(CacheLost, match="lease"):
        stale.free("r")
    assert [stage.refs(block_id) for block_id in shared] == [1, 1]


def test_a_ticket_is_returned_twice(stage: Stage) -> None:
    """Detached blocks given back twice, and after the session gave all back."""
    ticket = _detached(stage.a, "r")
    assert stage.a.return_blocks(ticket) == 3
    with pytest.raises(NotFound):
        stage.a.return_blocks(ticket)
    with pytest.raises(NotFound):
        stage.b.return_blocks(_detached(stage.a, "s"))  # and by somebody else
    stage.a.close()
    assert stage.states == (0, 2, 0, 14)


def _detached(session: Session, request_id: str) -> int:
    admit(session, request_id, PROMPT)
    session.cache_blocks(request_id, 10)
    return session.free(request_id, FreeMode.DETACH).ticket


def test_tickets_of_a_dead_scheduler(stage: Stage) -> None:
    """Blocks detached for a transfer are not lost with the scheduler that owed them."""
    dead = stage.client.open_session("dead", lease_ttl_s=1.0)
    stage.client._keeper.remove(dead)
    assert _detached(dead, "r")
    assert stage.states[0] == 3
    stage.pass_time(1.1)
    assert stage.states == (0, 2, 0, 14)


def test_preempted_and_admitted_again_under_the_same_id(stage: Stage) -> None:
    """Tokens and hashes stay; what was written is a hit, what was not is computed again."""
    first = admit(stage.a, "r", PROMPT, 1, 0)
    stage.a.free("r", FreeMode.PREEMPT, did_not_run=True, mark=StepMark(1, 0))
    again = stage.a.allocate_slots(SlotRequest("r", lookup=True), mark=StepMark(2, 1))
    assert again.handle == first.handle
    assert again.num_new_computed_tokens == 0
    stage.a.cache_blocks("r", 10, mark=StepMark(2, 1))
    stage.a.free("r", FreeMode.PREEMPT, mark=StepMark(3, 2))
    again = stage.a.allocate_slots(SlotRequest("r", lookup=True), mark=StepMark(4, 3))
    assert again.num_new_computed_tokens == 8
    assert stage.client.stats().num_requests == 1


def test_detached_and_admitted_again_under_the_same_id(stage: Stage) -> None:
    """The late return of the first life's blocks does not touch those of the second."""
    ticket = _detached(stage.a, "r")
    second = table(admit(stage.a, "r", OTHER))
    assert stage.a.return_blocks(ticket) == 3
    assert [stage.refs(block_id) for block_id in second] == [1, 1, 1]


def test_a_late_step_names_the_handle_of_a_freed_request(stage: Stage) -> None:
    """An id is used again while the engine still speaks of its former life: handles tell."""
    old = admit(stage.a, "r", PROMPT).handle
    stage.a.free("r")
    new = admit(stage.a, "r", OTHER)
    step = Step(
        runs=[(OperationKind.GROW, 1), (OperationKind.CACHE, 1), (OperationKind.FREE, 1)],
        grow=Grow([old], [10], [1]),
        cache=Cache([old], [10]),
        free=Free([old]),
    )
    result = stage.a.step(step)
    unknown = bytes([Outcome.UNKNOWN_HANDLE])
    assert (result.grow.outcomes, result.cache_outcomes, result.free_outcomes) == (unknown,) * 3
    assert [stage.refs(block_id) for block_id in table(new)] == [1, 1, 1]


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


def test_content_of_another_adapter_or_salt(stage: Stage) -> None:
    """Equal tokens under another LoRA or salt are other content."""
    written(stage.a, "warm")
    for keys in (ExtraKeys(lora_name="adapter"), ExtraKeys(cache_salt="salt")):
        name = keys.lora_name or "salted"
        content = Content(list(PROMPT), extra_keys=keys)
        assert stage.a.get_computed_blocks(name, content).num_computed_tokens == 0


def _picture(identifier: str, offset: int = 1, length: int = 2) -> MultimodalItem:
    return MultimodalItem(identifier, offset, length)


CONFUSABLE = {
    "nothing": ExtraKeys(),
    "an adapter": ExtraKeys(lora_name="x"),
    "a salt": ExtraKeys(cache_salt="x"),
    "both": ExtraKeys(lora_name="x", cache_salt="x"),
    "a longer adapter": ExtraKeys(lora_name="xx"),
    "a longer salt": ExtraKeys(cache_salt="xx"),
    "a picture": ExtraKeys(multimodal=(_picture("x"),)),
    "another picture": ExtraKeys(multimodal=(_picture("y"),)),
    "the same one token later": ExtraKeys(multimodal=(_picture("x", 2),)),
    "one that ends alike": ExtraKeys(multimodal=(_picture("zzzzzzzzzzx"),)),
    "two in one block": ExtraKeys(multimodal=(_picture("x", 0, 1), _picture("y", 1, 1))),
    "the other way round": ExtraKeys(multimodal=(_picture("y", 0, 1), _picture("x", 1, 1))),
    "only the second alike": ExtraKeys(multimodal=(_picture("z", 0, 1), _picture("y", 1, 1))),
}


@pytest.mark.parametrize("name", CONFUSABLE)
def test_the_same_tokens_mean_something_else(stage: Stage, name: str) -> None:
    """Placeholders of pictures are all alike, names can be: one is never a hit for another."""
    keys = CONFUSABLE[name]
    written(stage.a, name, Content([7] * 10, extra_keys=keys))
    hits = {
        other: stage.b.get_computed_blocks(other, Content([7] * 10, extra_keys=asked))
        for other, asked in CONFUSABLE.items()
    }
    assert {other: hit.num_computed_tokens for other, hit in hits.items()} == {
        other: 8 if other == name else 0 for other in CONFUSABLE
    }


def test_an_adapter_is_loaded_anew_under_its_old_name(stage: Stage) -> None:
    """Its content goes with a reset of its name, though another adapter's is in use."""
    old, other = (Content(list(PROMPT), extra_keys=ExtraKeys(lora_name=n)) for n in ("a", "b"))
    written(stage.b, "old", old)
    written(stage.b, "other", other)
    admit(stage.b, "in use", other)
    admit(stage.a, "running", old, 1, 0)
    with pytest.raises(FailedPrecondition, match="session A request running"):
        stage.b.reset_prefix_cache(REFUSE, lora_name="a")
    stage.b.reset_prefix_cache(FORCE, lora_name="a")
    # What runs goes on with the old weights, and publishes none of it.
    stage.a.cache_blocks("running", 10, mark=StepMark(2, 1))
    stage.a.free("running", mark=StepMark(3, 2))
    assert stage.b.get_computed_blocks("r", old).num_computed_tokens == 0
    assert stage.b.get_computed_blocks("s", other).num_computed_tokens == 8


def test_blocks_whose_load_failed_are_shared_already(stage: Stage) -> None:
    """They are taken out of the cache: who holds them keeps them, nobody else hits them."""
    blocks = written(stage.a, "warm", range(100, 116))
    for session, name in ((stage.a, "r"), (stage.b, "s")):
        assert table(admit(session, name, range(100, 116)))[:3] == blocks[:3]
    with stage.client.stream_events() as events:
        assert stage.client.evict_blocks([blocks[1]]) == 1
        assert stage.client.evict_blocks([blocks[1]]) == 0
        batch = next(iter(events))
    assert [type(event) for event in batch.events] == [BlockRemoved]
    assert stage.refs(blocks[1]) == 2
    # Behind it nothing is reached, though it is there.
    assert (
        stage.client.open_session("C")
        .get_computed_blocks("t", list(range(100, 116)))
        .num_computed_tokens
        == 4
    )
    # Computed anew, under an id of its own, the way is open again.
    assert stage.a.free("r").known
    fresh = table(admit(stage.a, "r", range(100, 116)))
    assert fresh[0] == blocks[0] and fresh[1] != blocks[1]
    stage.a.cache_blocks("r", 16)
    assert stage.b.get_computed_blocks("u", list(range(100, 116))).num_computed_tokens == 12
    assert stage.b.free("s").known
    end_step(stage.b)
    assert stage.refs(blocks[1]) == 0


def test_lookups_pin_nothing(stage: Stage) -> None:
    """Hits that were found and never taken stand in nobody's way."""
    written(stage.a, "warm", range(100, 164))
    for number in range(50):
        for session in (stage.a, stage.b):
            hit = session.get_computed_blocks(f"{number}", list(range(100, 164)))
            assert hit.num_computed_tokens == 60
    assert len(fill(stage.b, "all", NUM_USABLE)) == NUM_USABLE


def test_content_that_a_dead_writer_had_begun(stage: Stage) -> None:
    """It is nobody's hit, and in nobody's way: the next who computes it publishes it."""
    dead = stage.client.open_session("dead", lease_ttl_s=1.0)
    stage.client._keeper.remove(dead)
    admit(dead, "r", PROMPT, 1, 0)
    stage.pass_time(1.1)
    written(stage.a, "r")
    assert stage.b.get_computed_blocks("r", list(PROMPT)).num_computed_tokens == 8


def test_a_load_that_is_never_reported_done(stage: Stage) -> None:
    """An aborted load's blocks are held while it may write, but not beyond its scheduler."""
    for number in range(4):
        slots = SlotRequest(
            f"{number}",
            Content(list(range(1000 * number, 1000 * number + 16))),
            num_external_computed_tokens=16,
            num_new_tokens=0,
            delay_cache_blocks=True,
        )
        assert stage.a.allocate_slots(slots, mark=StepMark(1, 0)).outcome is Outcome.OK
    for number in range(4):
        assert stage.a.free(f"{number}", mark=StepMark(1, 0)).known
    assert stage.states == (0, 0, NUM_USABLE, 0)
    assert admit(stage.b, "one", [1]).outcome is Outcome.NO_FIT
    stage.a.close()
    assert len(fill(stage.b, "all", NUM_USABLE)) == NUM_USABLE


def test_placeholders_become_tokens(stage: Stage) -> None:
    """A scheduler ahead of its model writes stand-ins, and the tokens over them."""
    admit(stage.a, "r", PROMPT, 1, 0)
    stand_ins = Content([0xFFFF_FFFF] * 3, token_offset=10)
    slots = SlotRequest("r", stand_ins, num_computed_tokens=10, num_new_tokens=3)
    assert stage.a.allocate_slots(slots, mark=StepMark(2, 1)).outcome is Outcome.OK
    known = Content([1, 2, 3], token_offset=10)
    slots = SlotRequest("r", known, num_computed_tokens=12, num_new_tokens=1)
    assert stage.a.allocate_slots(slots, mark=StepMark(3, 2)).outcome is Outcome.OK
    stage.a.cache_blocks("r", 13, mark=StepMark(4, 3))
    lies = [*PROMPT, *[0xFFFF_FFFF] * 3]
    assert stage.b.get_computed_blocks("lies", lies).num_computed_tokens == 8
    truth = [*PROMPT, 1, 2, 3]
    assert stage.b.get_computed_blocks("truth", truth).num_computed_tokens == 12


def test_a_load_into_a_cache_that_is_switched_off(serve: Serve) -> None:
    """Nothing is registered, so nothing stays registered on blocks that others are given."""
    served = serve(num_blocks=9, no_prefix_caching=True)
    with Client(served.target, timeout_s=20) as client, client.open_session("A") as a:
        for number in range(20):
            slots = SlotRequest(
                "r",
                Content(list(PROMPT)),
                num_external_computed_tokens=8,
                num_new_tokens=0 if number % 2 else 2,
                delay_cache_blocks=True,
            )
            assert a.allocate_slots(slots).outcome is Outcome.OK
            a.cache_blocks("r", 8)
            assert a.get_computed_blocks("s", list(PROMPT)).num_computed_tokens == 0
            assert a.free("r").known and a.free("s").known
            served.assert_clean()
        assert client.stats().blocks.free == 8


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


def test_a_preempted_prefill(stage: Stage) -> None:
    """Preempted after its first chunk: only whole blocks of that chunk are hits."""
    admit(stage.a, "r", range(100, 120), 1, 0, max_new_tokens=6)
    stage.a.free("r", FreeMode.PREEMPT, mark=StepMark(2, 1))
    again = stage.a.allocate_slots(SlotRequest("r", lookup=True), mark=StepMark(3, 2))
    assert again.num_new_computed_tokens == 4


def test_old_weights_published_after_a_reset(stage: Stage) -> None:
    """A step that ran before a forced reset ends after it: its blocks become nobody's hit."""
    admit(stage.a, "r", PROMPT, 1, 0)
    stage.b.reset_prefix_cache(FORCE)
    stage.a.cache_blocks("r", 10, mark=StepMark(2, 1))
    grown = Content([1, 2, 3], token_offset=10)
    slots = SlotRequest("r", grown, num_computed_tokens=10, num_new_tokens=3)
    stage.a.allocate_slots(slots, mark=StepMark(2, 1))
    stage.a.free("r", mark=StepMark(3, 2))
    for session in (stage.a, stage.b):
        found = session.get_computed_blocks("s", [*PROMPT, 1, 2, 3])
        assert found.num_computed_tokens == 0


def test_a_lookup_before_a_reset_allocated_after_it(stage: Stage) -> None:
    """A hit that was found under the old weights is not handed out under the new ones."""
    written(stage.a, "warm")
    assert stage.a.get_computed_blocks("r", list(PROMPT)).num_computed_tokens == 8
    stage.b.reset_prefix_cache(REFUSE)
    changed = stage.a.allocate_slots(SlotRequest("r", num_new_computed_tokens=8))
    assert (changed.outcome, changed.num_new_computed_tokens) == (Outcome.HIT_CHANGED, 0)


def test_a_reset_while_blocks_are_in_use(stage: Stage) -> None:
    """Refused, naming the holder, instead of pulling blocks from under a request."""
    admit(stage.a, "r", PROMPT)
    with pytest.raises(FailedPrecondition, match="session A request r") as caught:
        stage.b.reset_prefix_cache(REFUSE)
    assert caught.value.retryable
    assert stage.refs(1) == 1


def test_a_scheduler_ends_with_a_step_in_flight(stage: Stage) -> None:
    """It closes because it failed, its last step half written: that is no hit for anybody."""
    admit(stage.a, "r", PROMPT, 1, 0)
    stage.a.close()
    assert stage.b.get_computed_blocks("r", list(PROMPT)).num_computed_tokens == 0
    assert stored_hashes(stage.client) == []


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


def test_limits_are_told_apart_from_bugs(stage: Stage) -> None:
    """More tokens than were ever given are refused, and change nothing."""
    admit(stage.a, "r", PROMPT)
    for computed in (11, 1 << 30):
        with pytest.raises(InvalidArgument):
            stage.a.cache_blocks("r", computed)
    assert stage.states[0] == 3
    assert Path(stage.a.pool.mapping_path).exists()
