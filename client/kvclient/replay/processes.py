"""The processes of a replay: what each does with its end of a pipe.

Each sends ``Progress`` now and then and, last, its result. They stop when told to by the
event they share.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np

from kvclient.client import Client, Session
from kvclient.errors import KVDepotError
from kvclient.pool import map_pool
from kvclient.replay.follower import Follower
from kvclient.replay.job import make_job
from kvclient.replay.puller import Puller
from kvclient.replay.scheduler import ReplayError, Scheduler
from kvclient.replay.settings import ReplaySettings
from kvclient.replay.tally import Tally
from kvclient.replay.trace import TraceRequest
from kvclient.replay.worker import Worker, WrongBytes
from kvcore.hashing import ExtraKeys, make_scheme

_PROGRESS_SECONDS = 0.2
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
        with Client(target) as client, client.open_session(f"replay-{number}") as session:
            _schedule(connection, session, settings, number, requests, tally, stop)
    except (KVDepotError, ReplayError, ValueError) as error:
        tally.failures.append(f"scheduler {number}: {error}")
    connection.send(tally)


def _schedule(
    connection: Connection[Any, Any],
    session: Session,
    settings: ReplaySettings,
    number: int,
    requests: list[TraceRequest],
    tally: Tally,
    stop: Event,
) -> None:
    worker = None
    if settings.with_bytes:
        worker = Worker(
            map_pool(session.pool), verify_sample=settings.verify_sample, seed=settings.seed
        )
    reported = 0.0

    def on_step() -> bool:
        nonlocal reported
        now = time.monotonic()
        if now - reported > _PROGRESS_SECONDS:
            reported = now
            connection.send(Progress(number, tally.requests))
        return not stop.is_set()

    try:
        Scheduler(session, worker, iter(requests), settings, tally).run(on_step)
        if worker is not None:
            worker.check_null_block()
    except WrongBytes as wrong:
        tally.failures.append(_describe(wrong, session, requests, settings))
    finally:
        if worker is not None:
            tally.tokens_written = worker.tokens_written
            tally.blocks_verified = worker.blocks_verified
            tally.blocks_in_windows = worker.blocks_in_windows
            tally.blocks_reread = worker.blocks_reread


def _describe(
    wrong: WrongBytes, session: Session, requests: list[TraceRequest], settings: ReplaySettings
) -> str:
    """The failure with the hash of the block, which only now is worth computing."""
    pool = session.pool
    request = next((item for item in requests if item.request_id == wrong.request_id), None)
    if request is None:
        return str(wrong)
    tokens = np.frombuffer(make_job(request, settings).tokens, "<u4")
    chain = make_scheme(pool.hash_scheme, pool.hash_seed).chain(pool.hash_block_size, ExtraKeys())
    chain.extend(tokens.tobytes(), len(tokens))
    block_size = pool.table_block_sizes[wrong.group]
    index = wrong.position // block_size
    last = (index + 1) * block_size // pool.hash_block_size - 1
    named = chain.hashes[last].hex() if last < len(chain.hashes) else "none, it is partial"
    return f"{wrong} (position {index} of the block table, hash {named})"


def peer_process(
    connection: Connection[Any, Any], target: str, settings: ReplaySettings, stop: Event
) -> None:
    """Follows the events and pulls blocks, until told to stop; then compares its mirror."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    result = PeerResult()
    try:
        with Client(target) as client:
            follower = Follower(client)
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
            result.blocks_mirrored = sum(map(len, follower.mirror.blocks.values()))
    except KVDepotError as error:
        result.failures.append(f"peer: {error}")
    connection.send(result)


def _pull_until(
    stop: Event, client: Client, follower: Follower, settings: ReplaySettings, result: PeerResult
) -> None:
    if not settings.with_bytes:
        stop.wait()
        return
    puller = Puller(client, follower, client.describe_pool(), settings.seed)
    while not stop.wait(_PULL_PAUSE_SECONDS):
        result.failures += puller.pull()
        if result.failures:
            break
    else:  # once more, now that nothing moves
        result.failures += puller.pull()
    result.blocks_pulled = puller.blocks_pulled
    result.blocks_gone = puller.blocks_gone
    result.bytes_pulled = puller.bytes_pulled
