"""The dashboard's structure: what Grafana would show wrongly without a word."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

import pytest
import yaml

from dashboard import DASHBOARD, PANELS, QUERIES, ROOT, Query

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GRID_COLUMNS = 24


def _by_title(panel: dict[str, Any]) -> str:
    return f"{panel['type']}-{panel['title']}"


def _by_name(query: Query) -> str:
    return query.name


def test_dashboard_is_of_grafana_10_and_portable() -> None:
    assert DASHBOARD["schemaVersion"] >= 38  # Grafana 10
    assert DASHBOARD["uid"] == "kvdepot-pool"
    assert DASHBOARD.get("id") is None  # a number is one installation's own
    assert "__inputs" not in DASHBOARD  # provisioned dashboards cannot ask


def test_variables_are_the_data_source_then_the_servers() -> None:
    datasource, instance = DASHBOARD["templating"]["list"]
    assert (datasource["name"], datasource["type"]) == ("datasource", "datasource")
    assert datasource["query"] == "prometheus"
    assert (instance["name"], instance["type"]) == ("instance", "query")
    assert instance["datasource"] == DATASOURCE
    assert instance["multi"]
    assert instance["includeAll"]


@pytest.mark.parametrize("of", ["id", "title"])
def test_panels_are_told_apart(of: str) -> None:
    values = [panel[of] for panel in DASHBOARD["panels"] if of == "id" or panel["type"] != "row"]
    assert sorted(values) == sorted(set(values))


def test_panels_lie_in_the_grid_without_overlap() -> None:
    cells = {
        panel["title"]: {
            (x, y)
            for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
            for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
        }
        for panel in DASHBOARD["panels"]
    }
    assert all(0 <= x < GRID_COLUMNS for taken in cells.values() for x, _ in taken)
    overlaps = [(a, b) for a, b in combinations(cells, 2) if cells[a] & cells[b]]
    assert overlaps == []


@pytest.mark.parametrize("panel", PANELS, ids=_by_title)
def test_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == DATASOURCE
    assert panel["targets"]
    refs = [target["refId"] for target in panel["targets"]]
    assert refs == sorted(set(refs))
    for target in panel["targets"]:
        assert target["datasource"] == DATASOURCE
        assert target["legendFormat"]


@pytest.mark.parametrize("query", QUERIES, ids=_by_name)
def test_query_asks_the_chosen_servers_for_rates_of_counters(query: Query) -> None:
    selectors = re.findall(r"kvdepot_\w+(\{[^}]*\})?", query.expression)
    assert selectors
    assert all('instance=~"$instance"' in selector for selector in selectors)
    for metric in query.metrics:
        cumulative = metric.endswith(("_total", "_bucket", "_count", "_sum"))
        rated = f"rate({metric}{{" in query.expression
        assert cumulative == rated, metric
    assert query.expression.count("[") == query.expression.count("[$__rate_interval]")


@pytest.mark.parametrize(
    "shown",
    [
        "kvdepot_blocks",
        "kvdepot_pool_usage_ratio",
        "kvdepot_prefix_cache_hit_tokens_total",
        "kvdepot_prefix_cache_query_tokens_total",
        "kvdepot_evictions_total",
        "kvdepot_allocation_refusals_total",
        "kvdepot_rpc_requests_total",
        "kvdepot_rpc_duration_seconds_bucket",
        "kvdepot_events_total",
        "kvdepot_sessions",
        "kvdepot_sessions_ended_total",
        "kvdepot_departed_sessions",
        "kvdepot_requests",
        "kvdepot_transfer_bytes_total",
        "kvdepot_transfers",
        "kvdepot_imports_total",
    ],
)
def test_what_operators_watch_is_on_it(shown: str) -> None:
    assert any(shown in query.metrics for query in QUERIES)


def test_provisioning_fits_the_dashboard_and_the_scrape_interval() -> None:
    grafana = ROOT / "deploy/grafana/provisioning"
    (source,) = yaml.safe_load((grafana / "datasources/prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((grafana / "dashboards/kvdepot.yml").read_text())["providers"]
    scrapes = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    assert source["type"] == "prometheus"
    assert source["jsonData"]["timeInterval"] == scrapes["global"]["scrape_interval"]
    assert provider["type"] == "file"
    assert provider["options"]["path"]
