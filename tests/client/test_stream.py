"""Several Steps in flight on one stream, and what breaks meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("flavour", ["sync", "aio"])
def test_steps_in_flight(serve: Any, flavour: str) -> None:
    """Each flavour in a process of its own, as every event loop of grpc's."""
    told = subprocess.run(
        [sys.executable, Path(__file__).with_name("pipelining.py"), flavour, serve().target],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert told.returncode == 0, told.stderr
