"""What leaves a request's tables on this side, as it does at the server."""

from __future__ import annotations

import pytest

from kvclient.tables import RequestTables, num_blocks_held, num_skipped_tokens
from pools import Group, chunked, describe, full, mamba, rswa, window


@pytest.mark.parametrize(
    ("group", "num_computed", "num_skipped"),
    [
        pytest.param(full(1), 100, 0, id="full"),
        pytest.param(window(1, 4), 7, 4, id="window"),
        pytest.param(window(1, 4), 3, 0, id="inside the window"),
        pytest.param(chunked(8), 13, 8, id="chunk"),
        pytest.param(chunked(8), 8, 8, id="a chunk's end"),
        pytest.param(chunked(8), 7, 0, id="the first chunk"),
        pytest.param(mamba("all"), 9, 8, id="state"),
        pytest.param(mamba("none"), 0, 0, id="no state yet"),
        pytest.param(rswa(4), 100, 0, id="the prompt is always seen"),
    ],
)
def test_skipped_tokens(group: Group, num_computed: int, num_skipped: int) -> None:
    assert num_skipped_tokens(group[0], num_computed) == num_skipped


@pytest.mark.parametrize(
    ("group", "num_computed", "table"),
    [
        pytest.param(full(1), 16, [1, 2, 3, 4, 5], id="full"),
        # Tokens 11 to 16 are looked at: the third block is, in part.
        pytest.param(window(1, 6), 16, [0, 0, 3, 4, 5], id="window"),
        pytest.param(chunked(8), 16, [0, 0, 0, 0, 5], id="chunk"),
        pytest.param(chunked(8), 15, [0, 0, 3, 4, 5], id="within a chunk"),
        pytest.param(mamba("all"), 16, [0, 0, 0, 4, 5], id="state"),
        pytest.param(mamba("all", 4), 16, [0, 0, 3, 4, 5], id="state before drafts"),
        # Six tokens of prompt; of what is generated, 14 and 15.
        pytest.param(rswa(2), 16, [1, 2, 0, 4, 5], id="gap"),
        pytest.param(rswa(20), 16, [1, 2, 3, 4, 5], id="no gap yet"),
    ],
)
def test_blocks_that_leave(group: Group, num_computed: int, table: list[int]) -> None:
    left: list[tuple[int, int]] = []
    tables = RequestTables(describe(group), 6, lambda *block: left.append(block))
    tables.admit((), ([1, 2, 3, 4, 5],), 0)
    tables.skip(num_computed)
    assert tables.blocks == (table,)
    assert sorted(left) == [(0, block) for block in (1, 2, 3, 4, 5) if block not in table]
    tables.skip(num_computed)
    assert len(left) == table.count(0)


def test_a_hit_begins_behind_the_window() -> None:
    tables = RequestTables(describe(full(1), window(1, 5)), 20)
    tables.admit(([1, 2, 3], [4, 5, 6]), ([7], [8]), 12)
    assert tables.blocks == ([1, 2, 3, 7], [0, 0, 6, 8])
    # Tokens computed elsewhere move the window beyond blocks of the hit.
    tables = RequestTables(describe(full(1), window(1, 5)), 20)
    tables.admit(([1], [4]), ([2, 3, 7], [0, 6, 8]), 12, num_external_tokens=8)
    assert tables.blocks == ([1, 2, 3, 7], [0, 0, 6, 8])


def test_states_move_along_where_steps_end() -> None:
    """A running state and a spare one, as the server sends them (vLLM's align mode)."""
    tables = RequestTables(describe(mamba("align", 1)), 40)
    tables.admit((), ([0, 1, 2],), 0)  # 8 tokens: the state, and one for a draft
    tables.skip(8)
    tables.grow(([0, 0, 2, 3],))  # 8 more blocks of tokens; the spare one is used
    assert tables.blocks == ([0, 1, 0, 0, 0, 2, 3],)
    tables.skip(24)  # the state before is copied on by now
    assert tables.blocks == ([0, 0, 0, 0, 0, 2, 3],)


def test_the_most_that_a_request_holds() -> None:
    pool = describe(full(1), window(1, 8), mamba("all"))
    assert num_blocks_held(pool, 400, max_step_tokens=16) == 100 + 7 + 6
    assert num_blocks_held(pool, 8, max_step_tokens=16) == 6
