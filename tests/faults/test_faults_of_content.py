"""Faults that caches are known for, a story each: content that is another's, late, or old.

The stories are of a scheduler A, and at times a second one, B, on a pool of 16 blocks of 4
tokens. A mark (s, c) says: this call is of step s, and the writes of step c have ended.
"""

from __future__ import annotations

import pytest

from kvclient import Client
from kvclient.errors import FailedPrecondition
from kvclient.events import BlockRemoved
from kvclient.values import Content, ExtraKeys, MultimodalItem, Outcome, SlotRequest, StepMark
from serving import Serve
from stage import (
    FORCE,
    NUM_USABLE,
    PROMPT,
    REFUSE,
    Stage,
    admit,
    end_step,
    fill,
    table,
    written,
)


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
