"""What somebody may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean ...?"`` with the closest of ``known``; empty if none is close."""
    close = get_close_matches(word, known, n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""
