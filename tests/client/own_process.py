"""Python in a process of its own, as each of gRPC's event loops needs one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_SECONDS = 150.0


def environment() -> dict[str, str]:
    """This process's, without the server's variables, and with its import path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVDEPOT_")}
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def run_python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs Python to its end; what it printed is text."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
        env=environment(),
    )


def told_by(script: str, *arguments: str) -> str:
    """What a script beside this file prints. It must end well."""
    ran = run_python(Path(__file__).with_name(script), *arguments)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
