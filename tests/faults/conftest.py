"""Real servers in this process; others, and their clients, in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import Serve, serving


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts servers; keywords are ServerConfig's. All stop when the test ends."""
    with serving(tmp_path) as start:
        yield start
