"""An import in parts, so that no answer of the peer is large, nor takes it long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Hashes that are asked for at once: of each group of the import, from which to which."""

    ranges: tuple[tuple[int, int], ...]

    @property
    def num_blocks(self) -> int:
        """Of all groups."""
        return sum(end - begin for begin, end in self.ranges)

    def halves(self) -> tuple[Part, Part] | None:
        """The first and the second half; None if there are none."""
        halves = [(begin, (begin + end) // 2, end) for begin, end in self.ranges]
        first = Part(tuple((begin, middle) for begin, middle, _ in halves))
        second = Part(tuple((middle, end) for _, middle, end in halves))
        return (first, second) if first.num_blocks and second.num_blocks else None


def parts_of(
    num_hashes: Sequence[int], hash_bytes: Sequence[int], *, max_blocks: int, max_bytes: int
) -> list[Part]:
    """Parts of equal size, of every group at the same time: a hit needs all groups.

    ``num_hashes`` of each group; ``hash_bytes``: of the peer's answer, for each of them. A part
    has ``max_blocks`` blocks, and its answer ``max_bytes``, or a little more.
    """
    num_bytes = sum(n * each for n, each in zip(num_hashes, hash_bytes, strict=True))
    count = max(1, -(-sum(num_hashes) // max_blocks), -(-num_bytes // max_bytes))
    return [
        Part(tuple((n * i // count, n * (i + 1) // count) for n in num_hashes))
        for i in range(count)
    ]
