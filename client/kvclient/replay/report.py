"""What a replay found, as figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvclient.replay.processes import PeerResult
from kvclient.replay.settings import ReplaySettings
from kvclient.replay.tally import Tally
from kvclient.reports import Stats


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one RPC, as its caller sees it, in milliseconds."""

    calls: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a replay; ``failures`` is empty if all is well."""

    settings: ReplaySettings
    seconds: float
    tally: Tally
    peer: PeerResult
    stats: Stats
    violations: list[str]

    @property
    def failures(self) -> list[str]:
        """Everything that is wrong: bytes, the mirror, the audit."""
        return [
            *self.tally.failures,
            *self.peer.failures,
            *[f"mirror: {difference}" for difference in self.peer.differences or ()],
            *[f"audit: {violation}" for violation in self.violations],
        ]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.failures

    @property
    def mirror_equal(self) -> bool | None:
        """Whether the follower's index equals the server's; None: not compared."""
        differences = self.peer.differences
        return None if differences is None else not differences

    def latencies(self) -> dict[str, Latency]:
        """By RPC, in alphabetical order."""
        found = {}
        for rpc, seconds in sorted(self.tally.latencies.items()):
            milliseconds = 1e3 * np.frombuffer(seconds)
            p50, p90, p99 = np.percentile(milliseconds, (50, 90, 99))
            found[rpc] = Latency(
                len(seconds), float(p50), float(p90), float(p99), float(milliseconds.max())
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """All figures under the names that ``--json`` prints."""
        tally, peer = self.tally, self.peer
        return {
            "ok": self.ok,
            "failures": self.failures,
            "trace": self.settings.trace or "generated",
            "schedulers": self.settings.schedulers,
            "seconds": round(self.seconds, 3),
            "requests": tally.requests,
            "query_tokens": tally.query_tokens,
            "hit_tokens": tally.hit_tokens,
            "hit_rate_tokens": _ratio(tally.hit_tokens, tally.query_tokens),
            "trace_blocks": tally.trace_blocks,
            "hit_trace_blocks": tally.hit_trace_blocks,
            "hit_rate_blocks": _ratio(tally.hit_trace_blocks, tally.trace_blocks),
            "preempted_query_tokens": tally.preempted_query_tokens,
            "preempted_hit_tokens": tally.preempted_hit_tokens,
            "steps": tally.steps,
            "operations": tally.operations,
            "operations_per_second": _ratio(tally.operations, self.seconds),
            "latency_ms": {
                rpc: {
                    "calls": latency.calls,
                    "p50": round(latency.p50_ms, 4),
                    "p90": round(latency.p90_ms, 4),
                    "p99": round(latency.p99_ms, 4),
                    "max": round(latency.max_ms, 4),
                }
                for rpc, latency in self.latencies().items()
            },
            "preemptions": tally.preemptions,
            "refusals": tally.refusals,
            "hits_changed": tally.hits_changed,
            "sessions_reopened": tally.reopened,
            "requests_readmitted": tally.readmitted,
            "tokens_written": tally.tokens_written,
            "blocks_verified": tally.blocks_verified,
            "blocks_in_windows": tally.blocks_in_windows,
            "blocks_reread": tally.blocks_reread,
            "blocks_pulled": peer.blocks_pulled,
            "bytes_pulled": peer.bytes_pulled,
            "events": peer.events,
            "event_stream_resumed": peer.resumed,
            "event_stream_begun_anew": peer.begun_anew,
            "blocks_mirrored": peer.blocks_mirrored,
            "mirror_equal": self.mirror_equal,
            "evictions": self.stats.evictions,
            "num_blocks": self.stats.num_blocks,
            "audit_violations": len(self.violations),
        }


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 6) if whole else 0.0
