"""The feed's entries, and the events they stand for."""

from __future__ import annotations

from building import content, make_depot, token_bytes
from kvcore.events import AllBlocksCleared, BlockStored
from kvcore.feed import RUN_BLOCKS_MAX, RemovedBlocks, StoredBlocks, events_of
from kvcore.hashing import ExtraKeys, MultimodalItem
from kvcore.operation import Content, FreeMode, SlotRequest

NUM_BLOCKS = RUN_BLOCKS_MAX + 3


def test_a_prompt_is_a_few_entries_and_an_event_a_block() -> None:
    depot = make_depot(64)
    session = depot.open_session("s")
    tokens = range(4 * NUM_BLOCKS)
    picture = MultimodalItem("picture", 4, 5)
    introduced = Content(
        tokens=token_bytes(tokens),
        extra=ExtraKeys(lora_name="adapter", multimodal=(picture,), cache_salt="salt"),
        lora_id=7,
    )
    session.begin(1, 0)
    depot.allocate_slots(session, SlotRequest("r", introduced))
    assert depot.take_feed() == []
    depot.cache_blocks(session, "r", None, len(tokens))
    entries = depot.take_feed()
    assert [len(entry) for entry in entries if isinstance(entry, StoredBlocks)] == [
        RUN_BLOCKS_MAX,
        NUM_BLOCKS - RUN_BLOCKS_MAX,
    ]
    hashes = session.requests["r"].block_hashes
    assert list(events_of(entries)) == [
        BlockStored(
            block_hashes=[block_hash],
            parent_block_hash=hashes[position - 1] if position else None,
            token_ids=token_bytes(tokens[4 * position : 4 * position + 4]),
            block_size=4,
            lora_id=7,
            lora_name="adapter",
            extra_keys=[introduced.extra.of_block(4 * position, 4 * position + 4, position)],
            group=0,
            spec_kind="full_attention",
            medium="CPU",
        )
        for position, block_hash in enumerate(hashes)
        if introduced.extra is not None
    ]


def test_a_part_of_an_entry_is_those_of_its_events() -> None:
    depot = make_depot(64)
    session = depot.open_session("s")
    depot.allocate_slots(session, SlotRequest("r", content(range(40))))
    (stored,) = depot.take_feed()
    assert isinstance(stored, StoredBlocks)
    events = list(stored.events())
    assert list(stored.part(2, 9).part(1, 4).events()) == events[3:6]
    removed = RemovedBlocks([b"a", b"b", b"c"], 0, "CPU", "evicted")
    assert list(removed.part(1, 3).events()) == list(removed.events())[1:]


def test_entries_keep_the_order_of_what_happened() -> None:
    depot = make_depot(9)
    session = depot.open_session("s")
    session.begin(1, 0)
    depot.allocate_slots(session, SlotRequest("r", content(range(28))))
    # What lost its hash before it was written is not in the feed.
    depot.pool.evict_blocks([3])
    session.begin(2, 1)
    depot.pool.evict_blocks([6, 5])
    depot.allocate_slots(session, SlotRequest("other", content(range(100, 104))))
    session.begin(3, 2)
    depot.pool.evict_blocks([8, 1])
    depot.free(session, "r", FreeMode.FINISH, did_not_run=False)
    depot.free(session, "other", FreeMode.FINISH, did_not_run=False)
    depot.reset_prefix_cache()
    assert [
        (type(entry), 1 if isinstance(entry, AllBlocksCleared) else len(entry))
        for entry in depot.take_feed()
    ] == [
        (StoredBlocks, 2),
        (StoredBlocks, 4),
        (RemovedBlocks, 2),
        (StoredBlocks, 1),
        (RemovedBlocks, 2),
        (AllBlocksCleared, 1),
    ]
    assert depot.take_feed() == []
