"""How tests wait on a machine that may be slow, or stand still for two seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvclient import Client
from kvclient.errors import Unavailable

TTL_S = 4.0
"""Of a lease that is to end soon, or not: it is renewed after a third of it."""


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits for what must come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_up(client: Client) -> bool:
    """Whether its server answers."""
    try:
        client.stats()
    except Unavailable:
        return False
    return True


@contextlib.contextmanager
def impatient(client: Any, *streams: Any, timeout_s: float = 0.4) -> Iterator[None]:
    """Calls within get little time, as their answers are lost; those before and after have theirs.

    ``streams``: StepStreams, which have a time of their own.
    """
    patience = client.timeout_s
    try:
        _set_time(timeout_s, client, streams)
        yield
    finally:
        _set_time(patience, client, streams)


def _set_time(timeout_s: float, client: Any, streams: Iterable[Any]) -> None:
    client.timeout_s = timeout_s
    for stream in streams:
        stream._timeout_s = timeout_s
