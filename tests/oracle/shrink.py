"""Shortens a failing list while it still fails (delta debugging)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Item = TypeVar("Item")


def shrink(items: list[Item], fails: Callable[[list[Item]], bool], trials: int) -> list[Item]:
    """A sub-list that fails; none of its elements can be left out, unless ``trials`` ran out.

    ``items`` must fail. Order is kept.
    """
    chunk = max(1, len(items) // 2)
    while items:
        start, removed = 0, False
        while start < len(items):
            if trials == 0:
                return items
            trials -= 1
            candidate = items[:start] + items[start + chunk :]
            if fails(candidate):
                items, removed = candidate, True
            else:
                start += chunk
        if chunk > 1:
            chunk //= 2
        elif not removed:
            break
    return items
