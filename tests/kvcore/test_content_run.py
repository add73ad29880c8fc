"""What peers are told of blocks: one run for what follows each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from building import content, full, groups_config, make_depot, token_bytes, truth_events, window
from kvcore.content_run import ContentRun, content_runs
from kvcore.depot import Depot
from kvcore.feed import RUN_BLOCKS_MAX
from kvcore.hashing import ExtraKeys, MultimodalItem
from kvcore.import_job import Filled, Ready
from kvcore.operation import Content, FreeMode, SlotRequest
from kvcore.transfer import GroupHashes

SIZE = 4


def cached(depot: Depot, tokens: Sequence[int], extra: ExtraKeys | None = None) -> list[bytes]:
    """Compute, confirm and free a prompt; its hashes."""
    session = depot.open_session("")
    new = content(tokens)
    if extra is not None:
        new = Content(new.token_offset, new.tokens, extra)
    depot.allocate_slots(session, SlotRequest("a", new, lookup=True))
    depot.cache_blocks(session, "a", None, len(tokens))
    hashes = list(session.requests["a"].block_hashes)
    depot.free(session, "a", FreeMode.FINISH, False)
    return hashes


def told(depot: Depot, hashes: Iterable[bytes], group: int = 0) -> list[ContentRun]:
    """Of those that are ready."""
    transfer = depot.transfers.open_hashes("", [GroupHashes(group, list(hashes))])
    (asked,) = transfer.groups
    runs = list(content_runs(depot.pool, asked.blocks, asked.hashes))
    depot.transfers.close(transfer.transfer_id)
    assert sum(run.num_blocks for run in runs) == sum(map(bool, asked.block_ids))
    return runs


def test_a_prompt_is_one_run_however_it_was_registered() -> None:
    depot = make_depot(4 * RUN_BLOCKS_MAX)
    tokens = range(SIZE * (2 * RUN_BLOCKS_MAX + 3))
    half = len(tokens) // 2 // SIZE * SIZE
    cached(depot, tokens[:half])
    hashes = cached(depot, tokens)
    assert told(depot, hashes) == [ContentRun(len(hashes), None, token_bytes(tokens))]
    # From the middle on it has a parent.
    assert told(depot, hashes[5:]) == [
        ContentRun(len(hashes) - 5, hashes[4], token_bytes(tokens[5 * SIZE :]))
    ]


def test_what_does_not_follow_begins_a_run() -> None:
    depot = make_depot(32)
    first = cached(depot, range(12))
    branch = cached(depot, [*range(8), *range(50, 58)])
    assert told(depot, [*first, *branch[2:], b"?" * 32, first[1], first[1]]) == [
        ContentRun(3, None, token_bytes(range(12))),
        ContentRun(2, first[1], token_bytes(range(50, 58))),
        ContentRun(1, first[0], token_bytes(range(4, 8))),
        ContentRun(1, first[0], token_bytes(range(4, 8))),
    ]
    # Of blocks that are missing nothing is told: their children begin a run.
    depot.evict_blocks([2])
    assert [run.num_blocks for run in told(depot, first)] == [1, 1]


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(ExtraKeys(lora_name="A"), id="lora"),
        pytest.param(ExtraKeys(cache_salt="s"), id="salt"),
        pytest.param(ExtraKeys(lora_name="A", cache_salt="s"), id="both"),
        pytest.param(ExtraKeys(multimodal=(MultimodalItem("image", 5, 4),)), id="an image"),
    ],
)
def test_all_that_a_peer_is_told_makes_the_same_events_there(extra: ExtraKeys) -> None:
    there, here = make_depot(32), make_depot(32)
    tokens = list(range(12))
    hashes = cached(there, tokens, extra)
    plain = cached(there, tokens)
    runs = told(there, [*hashes, *plain])
    assert [run.num_blocks for run in runs] == [3, 3]
    assert runs[0].lora_name == extra.lora_name and runs[0].cache_salt == extra.cache_salt
    found = here.imports.begin_hashes("", [GroupHashes(0, [*hashes, *plain])])
    here.imports.take(found, {0: Ready(0, [True] * 6)})
    here.imports.fill(found, {0: Filled(0, bytes([1] * 6), runs)})
    here.imports.finish(found)
    assert truth_events(here) == truth_events(there)
    assert told(here, [*hashes, *plain]) == runs  # and can tell it on


def test_groups_of_coarser_blocks_and_windows() -> None:
    depot = Depot(groups_config(64, full(2 * SIZE), window(9, SIZE), max_model_len=64))
    hashes = cached(depot, range(24))
    assert told(depot, hashes[1::2]) == [ContentRun(3, None, token_bytes(range(24)))]
    runs = told(depot, hashes, group=1)
    tokens = b"".join(run.tokens for run in runs)
    assert runs[-1].num_blocks > 1 and tokens == token_bytes(range(24))[-len(tokens) :]


def test_blocks_of_which_nothing_is_known_are_a_run_of_their_own() -> None:
    depot = make_depot(9)
    hashes = cached(depot, range(20))
    for block_id in (2, 3):
        depot.pool.blocks[block_id].content = None
    assert told(depot, hashes) == [
        ContentRun(1, None, token_bytes(range(4))),
        ContentRun(2, None, b""),
        ContentRun(2, hashes[2], token_bytes(range(12, 20))),
    ]
