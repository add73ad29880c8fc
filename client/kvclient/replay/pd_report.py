"""What a prefill and a decode scheduler did, and what it adds up to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvclient.imports import ImportStatus
from kvclient.replay.handover import Decoded, Prefilled


@dataclass(slots=True)
class PrefillTally:
    """What the prefill scheduler did."""

    requests: int = 0
    tokens_written: int = 0
    released: int = 0
    overdue: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(slots=True)
class DecodeTally:
    """What the decode scheduler did; ``seconds`` by part, one a request."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    imported_tokens: int = 0
    output_tokens: int = 0
    tokens_written: int = 0
    blocks_imported: int = 0
    bytes_imported: int = 0
    blocks_verified: int = 0
    blocks_reread: int = 0
    paths: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    wrong_bytes: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, done: Decoded, prefilled: Prefilled, arrived_at: float) -> None:
        """One request, whose notice came at ``arrived_at``."""
        self.requests += 1
        self.prompt_tokens += done.num_prompt_tokens
        self.hit_tokens += done.num_hit_tokens
        self.imported_tokens += done.num_imported_tokens
        self.output_tokens += done.num_output_tokens
        waited = arrived_at - prefilled.began_at - prefilled.seconds
        parts = {"prefill": prefilled.seconds, "waiting": waited, **done.seconds}
        parts["first token"] = sum(parts.values())
        for part, seconds in parts.items():
            self.seconds.setdefault(part, []).append(seconds)
        if done.error is not None:
            self.failures.append(f"import of request {prefilled.index}: {done.error}")
        if done.result is None:
            return
        result = done.result
        self.blocks_imported += result.num_blocks
        self.bytes_imported += result.num_bytes
        if result.num_blocks:
            self.paths[result.path.name.lower()] += 1
        self.failures += [
            f"import of request {prefilled.index} by {failure.path.name.lower()}: {failure.reason}"
            for failure in result.failures
        ]
        if not result.is_complete:
            statuses = Counter(status for column in result.statuses.values() for status in column)
            told = ", ".join(
                f"{count} {ImportStatus(status).name}" for status, count in statuses.items()
            )
            self.failures.append(f"import of request {prefilled.index} is not whole: {told}")


@dataclass(frozen=True, slots=True)
class PDReport:
    """The outcome; ``failures`` is empty if all is well."""

    seconds: float
    prefill: PrefillTally
    decode: DecodeTally
    violations: dict[str, list[str]]
    """Of the audit, by side."""
    left: dict[str, str]
    """What a side still holds for somebody, in words."""

    @property
    def failures(self) -> list[str]:
        """Everything that is wrong."""
        return [
            *self.prefill.failures,
            *self.decode.failures,
            *[f"audit of {side}: {one}" for side, all_ in self.violations.items() for one in all_],
            *[f"{side} still holds {what}" for side, what in self.left.items() if what],
        ]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.failures

    def parts(self) -> dict[str, tuple[float, float]]:
        """Milliseconds, p50 and the most, of each part of the time to the first token."""
        return {
            part: (1e3 * float(np.median(seconds)), 1e3 * max(seconds))
            for part, seconds in self.decode.seconds.items()
        }

    def to_json(self) -> dict[str, Any]:
        """All figures under the names that ``--json`` prints."""
        prefill, decode = self.prefill, self.decode
        return {
            "ok": self.ok,
            "failures": self.failures,
            "seconds": round(self.seconds, 3),
            "requests": decode.requests,
            "prompt_tokens": decode.prompt_tokens,
            "hit_tokens": decode.hit_tokens,
            "imported_tokens": decode.imported_tokens,
            "prompt_tokens_computed": decode.prompt_tokens
            - decode.hit_tokens
            - decode.imported_tokens,
            "output_tokens": decode.output_tokens,
            "blocks_imported": decode.blocks_imported,
            "bytes_imported": decode.bytes_imported,
            "imports_by_path": dict(decode.paths),
            "first_token_ms": {
                part: {"p50": round(p50, 3), "max": round(most, 3)}
                for part, (p50, most) in self.parts().items()
            },
            "prompts_released": prefill.released,
            "prompts_overdue": prefill.overdue,
            "blocks_verified": decode.blocks_verified,
            "blocks_reread": decode.blocks_reread,
            "wrong_bytes": decode.wrong_bytes,
            "audit_violations": {side: len(found) for side, found in self.violations.items()},
        }
