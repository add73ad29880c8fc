"""Real servers in this process; others, and their clients, in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import Processes, processes_in
from serving import Serve, serving


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts servers; keywords are ServerConfig's. All stop when the test ends."""
    with serving(tmp_path) as start:
        yield start


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts servers and clients; whatever still runs when the test ends is killed."""
    with processes_in(tmp_path) as made:
        yield made
