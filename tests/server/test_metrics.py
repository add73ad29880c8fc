"""/metrics read as Prometheus reads it."""

from __future__ import annotations

from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from manual_clock import ManualClock
from serving import BLOCK_SIZE, Serve, Served, refused, tokens

PROMPT = tokens(*range(1, 11))


def scrape(served: Served) -> dict[str, dict[tuple[str, ...], float]]:
    """Samples by name, then by label values in order of label name."""
    with urlopen(f"http://127.0.0.1:{served.server.metrics_port}/metrics", timeout=60) as page:
        text = page.read().decode()
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            key = tuple(sample.labels[name] for name in sorted(sample.labels))
            samples.setdefault(sample.name, {})[key] = sample.value
    return samples


def test_a_scrape_tells_what_happened(serve: Serve) -> None:
    served = serve(no_metrics=False, metrics_port=0)
    scheduler = served.open()
    scheduler.admit("a", PROMPT)
    scheduler.free("a")
    scheduler.admit("b", PROMPT)
    refused(lambda: scheduler.free("b", 0), grpc.StatusCode.INVALID_ARGUMENT)

    seen = scrape(served)
    assert sum(seen["kvdepot_blocks"].values()) == seen["kvdepot_pool_blocks"][()] == 32
    assert seen["kvdepot_blocks"]["live",] == 3
    assert seen["kvdepot_pool_usage_ratio"][()] == 3 / 32
    assert seen["kvdepot_prefix_cache_query_tokens_total"][()] == 20
    assert seen["kvdepot_prefix_cache_hit_tokens_total"][()] == 8
    assert seen["kvdepot_sessions"][()] == seen["kvdepot_requests"][()] == 1
    assert seen["kvdepot_sessions_ended_total"] == {("closed",): 0, ("expired",): 0}
    calls = seen["kvdepot_rpc_requests_total"]
    assert calls["OK", "AllocateSlots"] == 2
    assert calls["INVALID_ARGUMENT", "Free"] == 1
    assert seen["kvdepot_rpc_duration_seconds_count"]["AllocateSlots",] == 2
    buckets = seen["kvdepot_rpc_duration_seconds_bucket"]
    assert buckets["+Inf", "AllocateSlots"] == 2
    assert seen["kvdepot_events_total"]["stored",] >= 1
    assert all(name.startswith(("kvdepot_", "process_")) for name in seen)


def test_a_session_that_expires_under_its_worker(serve: Serve) -> None:
    clock = ManualClock()
    served = serve(clock=clock, no_metrics=False, metrics_port=0)
    dies = served.open()
    served.open().close()
    worker = served.attach(dies)
    next(worker)
    dies.admit("a", PROMPT)
    seen = scrape(served)
    assert (seen["kvdepot_workers"][()], seen["kvdepot_streams"][()]) == (1, 1)

    served.loop.call(lambda: clock.advance(31))
    seen = scrape(served)
    assert seen["kvdepot_sessions_ended_total"] == {("closed",): 1, ("expired",): 1}
    assert (seen["kvdepot_sessions"][()], seen["kvdepot_departed_sessions"][()]) == (0, 1)
    assert seen["kvdepot_blocks"]["quarantined",] == 3
    assert sum(seen["kvdepot_blocks"].values()) == 32
    worker.cancel()


def test_a_refusal_is_counted(serve: Serve) -> None:
    served = serve(no_metrics=False, metrics_port=0, num_blocks=3)
    served.open().admit("large", PROMPT)
    assert scrape(served)["kvdepot_allocation_refusals_total"][()] == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({}, None, id="reachable"),
        pytest.param({"no_prefix_caching": True}, None, id="not wanted"),
        pytest.param({"max_model_len": BLOCK_SIZE}, "beyond max_model_len 4", id="too short"),
        pytest.param({"num_blocks": 2}, "the pool has 1", id="too small"),
        pytest.param(
            {"model": "gemma-like", "num_blocks": 5}, "the pool has 4", id="too small for groups"
        ),
    ],
)
def test_a_prefix_cache_that_cannot_be_hit_is_told(
    serve: Serve, caplog: pytest.LogCaptureFixture, options: dict[str, Any], said: str | None
) -> None:
    with caplog.at_level("WARNING", logger="kvserver"):
        served = serve(no_metrics=False, metrics_port=0, **options)
    told = [record.message for record in caplog.records]
    assert scrape(served)["kvdepot_prefix_cache_unreachable"][()] == (said is not None)
    assert len(told) == (said is not None)
    if said is not None:
        assert told[0].startswith("no request can ever hit the prefix cache: ")
        assert said in told[0]
