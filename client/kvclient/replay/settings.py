"""What a replay does: one value, handed to every process of it."""

from __future__ import annotations

from dataclasses import dataclass

from kvclient.replay.trace import TraceRequest, generate_trace, read_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Options of a replay; the server's own are not among them."""

    trace: str | None = None
    """A trace file; None: a generated workload."""
    num_requests: int = 400
    """Of the generated workload."""
    limit: int | None = None
    seed: int = 0
    schedulers: int = 2
    token_budget: int = 8192
    """New tokens a step of one scheduler."""
    max_running: int = 64
    """Requests that one scheduler runs at a time."""
    steps_in_flight: int = 2
    """Steps scheduled before the first one's writes have ended; 1: none ahead."""
    decode: bool = True
    decode_stride: int = 1
    """Output tokens that a running request grows by in one step, never beyond its block."""
    unary_every: int = 8
    """Every so many requests one goes by unary calls instead of Steps; 0: none."""
    with_bytes: bool = True
    """Write and read the pool's bytes, and pull blocks."""
    pulls_at_end: bool = False
    """Pull only then: a block that is pulled is used, so that it is evicted later."""
    verify_sample: float = 1.0
    """Share of blocks that is read back."""
    follow: bool = True
    """Mirror the index from the event stream, and compare at the end."""

    reopen: bool = False
    """When a session is lost or the server away: open another one, and go on."""
    lease_ttl_s: float | None = None
    """Of the schedulers' sessions; None: the server's default."""

    def load_trace(self) -> list[TraceRequest]:
        """The requests. TraceError for a file that is no trace."""
        if self.trace is not None:
            return read_trace(self.trace, self.limit)
        return generate_trace(self.num_requests, self.seed)[: self.limit]
