"""The benchmarks run; whether their figures are good is not for a test to say."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.timeout(1600)
def test_every_row_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    parts = {"core", "rpc", "remote", "crowd", "bytes", "facade", "scheduler"}
    assert {row["name"].split(":")[0] for row in rows} == parts
    for row in rows:
        figures = [row["ratio"], row["ours"], row["theirs"]]
        assert all(math.isfinite(figure) and figure > 0 for figure in figures), row
        assert row["name"] in done.stdout
