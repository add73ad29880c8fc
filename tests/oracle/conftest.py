from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from harness import Oracle


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    """The real vLLM 0.25.1 in its own process; it takes some ten seconds to start."""
    with closing(Oracle()) as process:
        yield process
