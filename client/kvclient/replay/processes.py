"""The processes of a replay: what each does with its end of a pipe.

Each sends ``Progress`` now and then and, last, its result. They stop when told to by the
event they share.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

from kvclient.client import Client
from kvclient.errors import KVDepotError
from kvclient.replay.errors import ReplayError
from kvclient.replay.follower import Follower
from kvclient.replay.puller import Puller
from kvclient.replay.settings import ReplaySettings
from kvclient.replay.site import AWAY, REOPEN_PAUSE_SECONDS, Site
from kvclient.replay.tally import Tally
from kvclient.replay.trace import first_tokens

_PULL_PAUSE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Progress:
    """Requests that one process has finished."""

    process: int
    requests: int


@dataclass(slots=True)
class PeerResult:
    """What the peer saw. ``differences`` None: the mirror was not compared."""

    events: int = 0
    resumed: int = 0
    begun_anew: int = 0  # of these, from a snapshot
    blocks_mirrored: int = 0
    blocks_pulled: int = 0
    blocks_gone: int = 0
    bytes_pulled: int = 0
    differences: list[str] | None = None
    failures: list[str] = field(default_factory=list)


def scheduler_process(
    connection: Connection[Any, Any],
    target: str,
    settings: ReplaySettings,
    number: int,
    stop: Event,
) -> None:
    """One of ``settings.schedulers``: every so many-th request of the trace."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the replay stops its processes itself
    tally = Tally()
    try:
        requests = settings.load_trace()[number :: settings.schedulers]
        with Client(target) as client:
            site = Site(
                client,
                settings,
                number,
                stop=stop,
                on_progress=lambda done: connection.send(Progress(number, done)),
            )
            site.schedule(requests, tally)
    except (KVDepotError, ReplayError, ValueError) as error:
        tally.failures.append(f"scheduler {number}: {error}")
    connection.send(tally)


def peer_process(
    connection: Connection[Any, Any], target: str, settings: ReplaySettings, stop: Event
) -> None:
    """Follows the events and pulls blocks, until told to stop; then compares its mirror."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    result = PeerResult()
    try:
        with Client(target) as client:
            follower = Follower(client, _roots(client, settings), persists=settings.reopen)
            try:
                follower.ready.wait(client.timeout_s)
                connection.send(Progress(-1, 0))
                _pull_until(stop, client, follower, settings, result)
                if not result.failures:
                    result.differences = follower.compare()
            finally:
                follower.stop()
            result.events = follower.num_events
            result.resumed = follower.num_resumed
            result.begun_anew = follower.num_begun_anew
            result.blocks_mirrored = sum(map(len, follower.mirror.blocks.values()))
    except KVDepotError as error:
        result.failures.append(f"peer: {error}")
    connection.send(result)


def _roots(client: Client, settings: ReplaySettings) -> set[bytes]:
    """What the first blocks of the trace's requests hold, in tokens, by group of any size."""
    return {
        first_tokens(request, block_size, settings.seed).tobytes()
        for block_size in set(client.describe_pool().table_block_sizes)
        for request in settings.load_trace()
    }


def _pull_until(
    stop: Event, client: Client, follower: Follower, settings: ReplaySettings, result: PeerResult
) -> None:
    if not settings.with_bytes:
        stop.wait()
        return
    puller = None
    while puller is None:
        try:
            puller = Puller(client, follower, client.describe_pool(), settings.seed)
        except AWAY:
            if not settings.reopen or stop.wait(REOPEN_PAUSE_SECONDS):
                raise
    while not stop.wait(_PULL_PAUSE_SECONDS):
        if settings.pulls_at_end:
            continue
        try:
            result.failures += puller.pull()
        except AWAY:
            if not settings.reopen:
                raise
        if result.failures:
            break
    else:  # once more, now that nothing moves
        result.failures += puller.pull()
    result.blocks_pulled = puller.blocks_pulled
    result.blocks_gone = puller.blocks_gone
    result.bytes_pulled = puller.bytes_pulled
