"""A real server in this process, on free ports, spoken to through real stubs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import Serve, Served, serving


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts servers; keywords are ServerConfig's. All stop when the test ends."""
    with serving(tmp_path) as start:
        yield start


@pytest.fixture
def served(serve: Serve) -> Served:
    """A server of 32 usable blocks of 4 tokens."""
    return serve()
