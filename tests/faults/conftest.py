"""Real servers in this process; others, and their clients, in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvclient import Client
from manual_clock import ManualClock
from processes import Processes, processes_in
from serving import Serve, serving
from stage import LEASE_SECONDS, NUM_USABLE, Stage


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


@pytest.fixture
def stage(serve: Serve) -> Iterator[Stage]:
    """Leases run by a clock that the test moves."""
    clock = ManualClock()
    served = serve(num_blocks=NUM_USABLE + 1, clock=clock, lease_ttl_seconds=LEASE_SECONDS)
    with Client(served.target, timeout_s=20) as client:
        yield Stage(served, client, clock, client.open_session("A"), client.open_session("B"))
        served.assert_clean()
