"""How an import is divided."""

from __future__ import annotations

import pytest

from kvserver.mover.parts import Part, parts_of


@pytest.mark.parametrize(
    ("num_hashes", "hash_bytes", "limits", "expected"),
    [
        pytest.param([10], [1], (10, 10), [((0, 10),)], id="one"),
        pytest.param([10], [1], (4, 99), [((0, 3),), ((3, 6),), ((6, 10),)], id="by blocks"),
        pytest.param([10], [8], (99, 40), [((0, 5),), ((5, 10),)], id="by bytes"),
        pytest.param(
            [6, 2], [1, 1], (4, 99), [((0, 3), (0, 1)), ((3, 6), (1, 2))], id="groups side by side"
        ),
        pytest.param([0], [1], (4, 4), [((0, 0),)], id="nothing"),
    ],
)
def test_parts(
    num_hashes: list[int],
    hash_bytes: list[int],
    limits: tuple[int, int],
    expected: list[tuple[tuple[int, int], ...]],
) -> None:
    max_blocks, max_bytes = limits
    parts = parts_of(num_hashes, hash_bytes, max_blocks=max_blocks, max_bytes=max_bytes)
    assert [part.ranges for part in parts] == expected


@pytest.mark.parametrize("num_hashes", [[65_536], [1000, 7, 1], [3, 3, 3]])
@pytest.mark.parametrize("max_blocks", [1, 5, 4096])
def test_every_hash_is_in_one_part(num_hashes: list[int], max_blocks: int) -> None:
    parts = parts_of(num_hashes, [300] * len(num_hashes), max_blocks=max_blocks, max_bytes=1 << 20)
    for group, count in enumerate(num_hashes):
        edges = [part.ranges[group] for part in parts]
        assert [begin for begin, _ in edges] == [0, *(end for _, end in edges[:-1])]
        assert edges[-1][1] == count
    # Rounding adds at most one of each group.
    assert max(part.num_blocks for part in parts) <= max_blocks + len(num_hashes)


def test_halves() -> None:
    halves = Part(((0, 5), (2, 4))).halves()
    assert halves == (Part(((0, 2), (2, 3))), Part(((2, 5), (3, 4))))
    assert Part(((3, 4),)).halves() is None
