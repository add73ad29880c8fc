"""``/metrics``: numbers read at scrape, text made in the scraping thread.

The event loop only copies the numbers; it never waits for a scrape.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvcore.residency import Eviction
from kvcore.spec import why_never_hit
from kvcore.stats import DepotStats
from kvserver.imports import OUTCOMES, PATHS
from kvserver.node import Node
from kvserver.rpc import DURATION_BOUNDS_SECONDS, Rpcs

_SCRAPE_TIMEOUT_SECONDS = 5.0
_RESIDENCY_BOUNDS_SECONDS = (
    *(0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0),
)


@dataclass(frozen=True, slots=True)
class _Transfers:
    """Outgoing ones and imports. Bytes and blocks by path."""

    num_out: int
    num_in: int
    out_ended: dict[str, int]
    out_blocks: int
    out_bytes: int
    in_outcomes: dict[str, int]
    in_blocks: dict[str, int]
    in_bytes: dict[str, int]
    failures: dict[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class _Reading:
    """A copy of every number, taken on the event loop."""

    stats: DepotStats
    rpcs: list[tuple[str, dict[str, int], list[int], float]]
    events: dict[str, int]
    subscribers: int
    cut_off: int
    transfers: _Transfers
    sessions_ended: dict[str, int]
    streams: int
    residencies: list[Eviction]


class _Histogram:
    """Seconds in buckets."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._buckets = [0] * (len(_RESIDENCY_BOUNDS_SECONDS) + 1)
        self._seconds_total = 0.0

    def add(self, seconds: float) -> None:
        self._buckets[bisect_left(_RESIDENCY_BOUNDS_SECONDS, seconds)] += 1
        self._seconds_total += seconds

    def family(self, name: str) -> HistogramMetricFamily:
        buckets = _cumulative(_RESIDENCY_BOUNDS_SECONDS, self._buckets)
        return HistogramMetricFamily(
            name, self._text, buckets=buckets, sum_value=self._seconds_total
        )


class DepotCollector(Collector):
    """Reads the server's numbers at every scrape, consistently with one another."""

    def __init__(self, node: Node, rpcs: Rpcs, loop: asyncio.AbstractEventLoop) -> None:
        self._node = node
        self._rpcs = rpcs
        self._loop = loop
        self._unreachable = why_never_hit(node.depot.config) is not None
        # Scrapes may overlap; each drains what the others have not.
        self._residency_lock = Lock()
        self._residency = {
            "lifetime": _Histogram("From a block's allocation to its eviction (sampled)."),
            "idle_before_eviction": _Histogram(
                "From a block's last use to its eviction (sampled)."
            ),
            "reuse_gap": _Histogram("Between uses of a block, told at its eviction (sampled)."),
        }

    def collect(self) -> Iterator[Metric]:
        """Called in a scraping thread."""
        reading = asyncio.run_coroutine_threadsafe(self._read(), self._loop)
        try:
            taken = reading.result(_SCRAPE_TIMEOUT_SECONDS)
        except FutureTimeoutError:
            reading.cancel()
            raise
        yield from _pool(taken.stats)
        yield _gauge(
            "prefix_cache_unreachable",
            "1 if no request can ever hit the prefix cache; the log says why.",
            self._unreachable,
        )
        yield from _work(taken)
        yield from _transfer_families(taken.transfers)
        yield from _rpc_families(taken)
        yield from self._residency_families(taken.residencies)

    def _residency_families(self, evictions: list[Eviction]) -> Iterator[Metric]:
        with self._residency_lock:
            for eviction in evictions:
                self._residency["lifetime"].add(eviction.lifetime_seconds)
                self._residency["idle_before_eviction"].add(eviction.idle_seconds)
                for gap in eviction.reuse_gaps_seconds:
                    self._residency["reuse_gap"].add(gap)
            for name, histogram in self._residency.items():
                yield histogram.family(f"kvdepot_block_{name}_seconds")

    async def _read(self) -> _Reading:
        publisher = self._node.publisher
        residency = self._node.depot.residency
        return _Reading(
            stats=self._node.depot.stats(),
            rpcs=[
                (counts.method, dict(counts.codes), list(counts.buckets), counts.seconds_total)
                for counts in self._rpcs.counts.values()
            ],
            events=dict(publisher.published),
            subscribers=publisher.num_subscribers,
            cut_off=publisher.cut_off,
            transfers=_read_transfers(self._node),
            sessions_ended=dict(self._node.sessions_ended),
            streams=self._rpcs.num_streams,
            residencies=[] if residency is None else residency.drain(),
        )


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvdepot_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvdepot_{name}", text, value=value)


def _pool(stats: DepotStats) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        "kvdepot_blocks", "Blocks by state, the null block in none.", labels=["state"]
    )
    for state in ("live", "cached", "pinned", "in_transfer", "quarantined", "free"):
        states.add_metric([state], getattr(stats, state))
    yield states
    yield _gauge("pool_blocks", "Blocks that can be handed out.", stats.num_blocks - 1)
    yield _gauge("pool_usage_ratio", "Share of blocks in use, 0 to 1.", stats.usage)
    yield _gauge("sessions", "Open sessions.", stats.num_sessions)
    yield _gauge(
        "departed_sessions",
        "Sessions that ended while workers attached under them remain.",
        stats.num_departed_sessions,
    )
    yield _gauge("workers", "Workers attached.", stats.num_workers)
    yield _gauge("requests", "Requests known, of all sessions.", stats.num_requests)
    yield _gauge("generation", "Resets of the prefix cache since the start.", stats.generation)
    yield _gauge(
        "reset_pending", "1 while a reset waits for blocks in use.", float(stats.reset_pending)
    )
    for name, text, value in (
        ("query", "Tokens looked up", stats.prefix_cache_queries),
        ("hit", "Tokens found", stats.prefix_cache_hits),
    ):
        yield _counter(f"prefix_cache_{name}_tokens", f"{text} in the prefix cache.", value)
    for name, text, value in (
        ("query", "Tokens looked up", stats.preempted_queries),
        ("hit", "Tokens found", stats.preempted_hits),
    ):
        yield _counter(
            f"prefix_cache_preempted_{name}_tokens",
            f"{text} in the prefix cache for requests that had been preempted.",
            value,
        )
    yield _counter("evictions", "Cached blocks taken for other content.", stats.evictions)
    yield _counter("allocation_refusals", "Allocations that did not fit.", stats.refusals)


def _work(taken: _Reading) -> Iterator[Metric]:
    events = CounterMetricFamily("kvdepot_events", "Events published.", labels=["kind"])
    for kind in ("stored", "removed", "cleared"):
        events.add_metric([kind], taken.events.get(kind, 0))
    yield events
    ended = CounterMetricFamily("kvdepot_sessions_ended", "Sessions ended.", labels=["cause"])
    for cause in ("closed", "expired"):
        ended.add_metric([cause], taken.sessions_ended.get(cause, 0))
    yield ended
    yield _gauge("streams", "Open streams, of all methods.", taken.streams)
    yield _gauge("event_subscribers", "Event streams being served.", taken.subscribers)
    yield _counter("event_subscribers_cut_off", "Event streams ended for lagging.", taken.cut_off)


def _read_transfers(node: Node) -> _Transfers:
    transfers, imports = node.transfers, node.imports
    return _Transfers(
        num_out=len(transfers),
        num_in=len(imports),
        out_ended=dict(transfers.num_ended),
        out_blocks=transfers.num_blocks,
        out_bytes=node.pulled_bytes,
        in_outcomes=dict(imports.outcomes),
        in_blocks=dict(imports.num_blocks),
        in_bytes=dict(imports.num_bytes),
        failures=dict(imports.failures),
    )


def _transfer_families(taken: _Transfers) -> Iterator[Metric]:
    is_open = GaugeMetricFamily(
        "kvdepot_transfers",
        'Open transfers: "out", by which peers read, and "in", imports.',
        labels=["direction"],
    )
    is_open.add_metric(["out"], taken.num_out)
    is_open.add_metric(["in"], taken.num_in)
    yield is_open
    moved = CounterMetricFamily(
        "kvdepot_transfer_bytes",
        'Bytes of blocks that came by imports ("in"), and that PullBlocks sent ("out"); what '
        "peers read by other paths is not known here.",
        labels=["direction", "path"],
    )
    for path in PATHS:
        moved.add_metric(["in", path], taken.in_bytes.get(path, 0))
    moved.add_metric(["out", "grpc"], taken.out_bytes)
    yield moved
    blocks = CounterMetricFamily(
        "kvdepot_transfer_blocks",
        'Blocks that came by imports ("in"), and that were kept for peers ("out").',
        labels=["direction"],
    )
    blocks.add_metric(["in"], sum(taken.in_blocks.values()))
    blocks.add_metric(["out"], taken.out_blocks)
    yield blocks
    ended = CounterMetricFamily(
        "kvdepot_transfers_ended",
        "Transfers that peers had open, by how they ended.",
        labels=["how"],
    )
    for how, count in taken.out_ended.items():
        ended.add_metric([how], count)
    yield ended
    outcomes = CounterMetricFamily("kvdepot_imports", "Imports that ended.", labels=["outcome"])
    for outcome in OUTCOMES:
        outcomes.add_metric([outcome], taken.in_outcomes.get(outcome, 0))
    yield outcomes
    failures = CounterMetricFamily(
        "kvdepot_transfer_failures",
        "Why bytes of imports did not come by a path that was tried.",
        labels=["path", "reason"],
    )
    for (path, reason), count in taken.failures.items():
        failures.add_metric([path, reason], count)
    yield failures


def _rpc_families(taken: _Reading) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "kvdepot_rpc_requests",
        "Calls answered, by status; of StepStream, messages.",
        labels=["method", "code"],
    )
    seconds = HistogramMetricFamily(
        "kvdepot_rpc_duration_seconds",
        "Time the server took for a call; of StepStream, for a message.",
        labels=["method"],
    )
    for method, codes, buckets, seconds_total in taken.rpcs:
        for code, count in codes.items():
            requests.add_metric([method, code], count)
        seconds.add_metric([method], _cumulative(DURATION_BOUNDS_SECONDS, buckets), seconds_total)
    yield requests
    yield seconds


def _cumulative(bounds: tuple[float, ...], buckets: list[int]) -> list[tuple[str, float]]:
    total = 0
    rows: list[tuple[str, float]] = []
    for bound, count in zip((*bounds, "+Inf"), buckets, strict=True):
        total += count
        rows.append((str(bound), total))
    return rows


class MetricsServer:
    """The HTTP server of ``/metrics``, in threads of its own."""

    def __init__(self, collector: Collector, host: str, port: int) -> None:
        # Else registering would scrape, on the loop that is scraped.
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        ProcessCollector(registry=registry)
        self._server: Any
        self._thread: Thread
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        self.port: int = self._server.server_address[1]

    def close(self) -> None:
        """Stop answering. Blocks; not to be called on the loop that is scraped."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
