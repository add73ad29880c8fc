"""The core and the client without torch, on every Python at hand that is not this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OTHERS = [
    name
    for name in ("python3.10", "python3.11", "python3.12", "python3.13")
    if name != f"python3.{sys.version_info.minor}"
]
NEEDED = "pytest pytest-timeout hypothesis cbor2 xxhash grpcio protobuf googleapis-common-protos"


def _works(python: str) -> bool:
    """Whether there is such an interpreter: a version manager's shim alone is none."""
    found = shutil.which(python)
    return (
        found is not None and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("python", OTHERS)
def test_core_and_client(tmp_path: Path, python: str) -> None:
    if not _works(python):
        pytest.skip(f"{python} is not at hand")
    venv = tmp_path / python
    subprocess.run([python, "-m", "venv", venv], check=True)
    pip = [venv / "bin/pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *NEEDED.split()], check=True)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("client", "proto", ".")),
    }
    for command in (
        ["-c", "import kvclient, kvclient.aio, kvclient.facade, kvclient.slots"],
        [
            "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kvcore",
            "--ignore=tests/kvcore/test_memory.py", f"--basetemp={tmp_path / 'basetemp'}",
        ],
    ):  # fmt: skip
        done = subprocess.run(
            [venv / "bin/python", *command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{python}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
