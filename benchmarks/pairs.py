"""Interleaved pairs: our side and the other in turn, never at once, never far apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

Samples = Sequence[float]
"""Seconds of one operation, once each."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How much to measure."""

    num_pairs: int = 11
    # Share of the samples that a full run takes.
    scale: float = 1.0

    @property
    def is_quick(self) -> bool:
        """Whether figures do not matter."""
        return self.scale < 1

    def samples(self, num_samples: int) -> int:
        """``num_samples``, scaled."""
        return max(4, int(num_samples * self.scale))


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the pairs: of the ratio of p50s, and of each side's p50 and p99."""

    name: str
    ratio: float
    target: float | None
    ours: float
    theirs: float
    unit: str
    ours_p99: float
    theirs_p99: float


UNITS = {"us": 1e6, "ms": 1e3, "B": 1, "x": 1}


def percentile(samples: Samples, share: float) -> float:
    """The smallest sample that ``share`` of them do not exceed."""
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]


def compare(
    names: Sequence[str],
    ours: Callable[[], Sequence[Samples]],
    theirs: Callable[[], Sequence[Samples]],
    settings: Settings,
    *,
    target: float | None = None,
    unit: str = "us",
) -> list[Row]:
    """One row a name. Each call measures one burst, with samples for every name."""
    bursts: tuple[list[Sequence[Samples]], ...] = ([], [])
    ours(), theirs()  # warm
    for pair in range(settings.num_pairs):
        sides = [(bursts[0], ours), (bursts[1], theirs)]
        for results, measure in sides if pair % 2 else reversed(sides):
            results.append(measure())
    rows = []
    for column, name in enumerate(names):
        p50s, p99s = (
            [[percentile(burst[column], share) for burst in side] for side in bursts]
            for share in (0.5, 0.99)
        )
        ratios = [mine / other for mine, other in zip(*p50s, strict=True)]
        figures = [median(side) * UNITS[unit] for side in (*p50s, *p99s)]
        rows.append(Row(name, median(ratios), target, figures[0], figures[1], unit, *figures[2:]))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| | ratio | target | p50 | of | p99 | of |",
        "|:--|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        target = "" if row.target is None else f"≤ {row.target:g}"
        times = (row.ours, row.theirs, row.ours_p99, row.theirs_p99)
        cells = [
            row.name,
            f"{row.ratio:.2f}",
            target,
            *(f"{time:.1f} {row.unit}" for time in times),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
