"""Block tables and slot mappings."""

from __future__ import annotations

import pytest

from kvclient.slots import block_table, slot_mapping

FIRST_ROUND = list(range(1, 64))
SECOND_ROUND = [*range(1, 63), 127]


@pytest.mark.parametrize(
    ("block_ids", "block_size", "start", "num_tokens", "slots"),
    [
        pytest.param(FIRST_ROUND, 16, 0, 997, list(range(16, 1013)), id="997-tokens"),
        pytest.param(SECOND_ROUND, 16, 992, 5, [2032, 2033, 2034, 2035, 2036], id="second-round"),
        pytest.param([10, 21], 4, 3, 2, [43, 84], id="across-a-boundary"),
        pytest.param([5], 4, 3, 1, [23], id="one-token"),
        pytest.param([5], 4, 4, 0, [], id="no-token"),
        pytest.param([], 4, 0, 0, [], id="no-block"),
    ],
)
def test_slots(
    block_ids: list[int], block_size: int, start: int, num_tokens: int, slots: list[int]
) -> None:
    assert slot_mapping(block_ids, block_size, start, num_tokens) == slots
    padded = slot_mapping(block_ids, block_size, start, num_tokens, pad_to=len(slots) + 3)
    assert padded == [*slots, -1, -1, -1]


def test_a_table_grows_at_the_boundary() -> None:
    """[10, 21] are cached, [45, 67] are new for 50 tokens of 16; 64 fill them, then comes 89."""
    table = [10, 21, 45, 67]
    assert slot_mapping(table, 16, 32, 18) == [*range(720, 736), 1072, 1073]
    assert slot_mapping(table, 16, 50, 1) == [1074]
    assert slot_mapping(table, 16, 63, 1) == [1087]
    with pytest.raises(ValueError, match="do not hold 65"):
        slot_mapping(table, 16, 64, 1)
    table.append(89)
    assert slot_mapping(table, 16, 64, 1) == [1424]


@pytest.mark.parametrize(
    ("tables", "width", "rows"),
    [
        pytest.param(
            [[10, 21, 45, 67], [89]], None, [[10, 21, 45, 67], [89, 0, 0, 0]], id="longest"
        ),
        pytest.param([[1, 2]], 4, [[1, 2, 0, 0]], id="width"),
        pytest.param([[], [3]], 1, [[0], [3]], id="empty-row"),
        pytest.param([], None, [], id="no-rows"),
    ],
)
def test_table(tables: list[list[int]], width: int | None, rows: list[list[int]]) -> None:
    assert block_table(tables, width) == rows


@pytest.mark.parametrize(
    "arguments",
    [(0, 0, 1), (4, -1, 1), (4, 0, -1), (4, 0, 5)],
    ids=["block-size", "start", "count", "too-many"],
)
def test_bad_arguments(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"must|hold"):
        slot_mapping([1], *arguments)


def test_padding_only_adds() -> None:
    with pytest.raises(ValueError, match="cannot be padded"):
        slot_mapping([1], 4, 0, 3, pad_to=2)
    with pytest.raises(ValueError, match="wider"):
        block_table([[1, 2]], 1)


def test_nothing_is_kept_where_the_null_block_stands() -> None:
    assert slot_mapping([0, 3, 0, 5], 4, 2, 12) == [-1, -1, *range(12, 16), *[-1] * 4, 20, 21]
