"""What one scheduler process did, to be added up."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Tally:
    """Counts; hits are of each request's first admission, preempted ones apart."""

    requests: int = 0
    steps: int = 0
    operations: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    trace_blocks: int = 0
    hit_trace_blocks: int = 0
    preempted_query_tokens: int = 0
    preempted_hit_tokens: int = 0
    preemptions: int = 0
    refusals: int = 0
    hits_changed: int = 0
    reopened: int = 0
    """Sessions that were lost and opened anew."""
    readmitted: int = 0
    """Requests that ran in them, and were admitted again."""
    tokens_written: int = 0
    blocks_verified: int = 0
    blocks_in_windows: int = 0
    blocks_reread: int = 0
    latencies: dict[str, array[float]] = field(default_factory=dict)
    """Seconds of every call, by RPC."""
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def timed(self, rpc: str, num_operations: int = 1) -> Iterator[None]:
        """Times and counts one call."""
        began = time.perf_counter()
        yield
        self.operations += num_operations
        self.latencies.setdefault(rpc, array("d")).append(time.perf_counter() - began)

    def add(self, other: Tally) -> None:
        """Take in another process's."""
        for name in (item.name for item in fields(self)):
            if name == "latencies":
                for rpc, seconds in other.latencies.items():
                    self.latencies.setdefault(rpc, array("d")).extend(seconds)
            else:  # numbers, and the list of failures
                setattr(self, name, getattr(self, name) + getattr(other, name))
