"""The committed dashboard, as Grafana would read it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATH = ROOT / "deploy/grafana/dashboards/kvdepot-pool.json"
DASHBOARD: dict[str, Any] = json.loads(PATH.read_text())
# Panels that show data; the others are rows.
PANELS: list[dict[str, Any]] = [p for p in DASHBOARD["panels"] if p["type"] != "row"]


@dataclass(frozen=True, slots=True)
class Query:
    """One target of a panel."""

    name: str
    expression: str

    @property
    def metrics(self) -> set[str]:
        """The series names it reads."""
        return set(re.findall(r"\bkvdepot_\w+", self.expression))

    def promql(self, *, rate_interval: str) -> str:
        """The expression with Grafana's variables filled in, for every instance."""
        filled = self.expression.replace("$__rate_interval", rate_interval)
        return filled.replace("$instance", ".*")


QUERIES = [
    Query(f"{panel['title']}/{target['refId']}", target["expr"])
    for panel in PANELS
    for target in panel["targets"]
]
