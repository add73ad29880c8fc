"""Where a scheduler of a replay works: its session and worker, and others when those are lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.synchronize import Event

import numpy as np

from kvclient.attachment import Attachment
from kvclient.client import Client
from kvclient.errors import CacheLost, DeadlineExceeded, KVDepotError, Unavailable
from kvclient.pool import map_pool
from kvclient.replay.errors import WrongBytes
from kvclient.replay.job import make_job
from kvclient.replay.scheduler import Scheduler
from kvclient.replay.settings import ReplaySettings
from kvclient.replay.tally import Tally
from kvclient.replay.trace import TraceRequest
from kvclient.replay.worker import Worker
from kvclient.session import Session
from kvcore.hashing import ExtraKeys, make_scheme

AWAY = (CacheLost, Unavailable, DeadlineExceeded)
"""What says that a session, or the server, is not there."""
REOPEN_PAUSE_SECONDS = 0.1
_REOPEN_SECONDS = 60.0
_PROGRESS_SECONDS = 0.2


class Site:
    """Where a scheduler works: its session, its worker, and others when those are lost."""

    def __init__(
        self,
        client: Client,
        settings: ReplaySettings,
        number: int,
        *,
        stop: Event,
        on_progress: Callable[[int], None],
    ) -> None:
        self._on_progress = on_progress
        self._settings = settings
        self._number = number
        self._stop = stop
        self._client = client
        self._session: Session | None = None
        self._worker: Worker | None = None
        self._attachment: Attachment | None = None
        self._reported = 0.0

    def schedule(self, requests: list[TraceRequest], tally: Tally) -> None:
        """All of the requests, over as many sessions as it takes."""
        settings = self._settings
        session = self._settle(tally)
        try:
            scheduler = Scheduler(session, self._worker, iter(requests), settings, tally)
            while not self._run(scheduler, tally):
                session = self._settle(tally)
                scheduler.move_to(session, self._worker)
        except WrongBytes as wrong:
            tally.failures.append(_describe(wrong, session, requests, settings))
        finally:
            self._dismiss(tally)
            with suppress(KVDepotError):  # gone, or its lease ends it
                session.close()

    def _run(self, scheduler: Scheduler, tally: Tally) -> bool:
        """Whether it came to its end; if not, the session is to be given up."""

        def on_step() -> bool:
            now = time.monotonic()
            if now - self._reported > _PROGRESS_SECONDS:
                self._reported = now
                self._on_progress(tally.requests)
            return not self._stop.is_set()

        try:
            scheduler.run(on_step)
            if self._worker is not None:
                self._worker.check_null_block()
        except AWAY:
            if not self._settings.reopen:
                raise
            return False
        return True

    def _settle(self, tally: Tally) -> Session:
        """A new session and worker; with ``reopen``, as soon as the server is there."""
        settings = self._settings
        deadline = time.monotonic() + (_REOPEN_SECONDS if settings.reopen else 0.0)
        while True:
            self._dismiss(tally)
            try:
                if self._session is None:
                    self._session = self._client.open_session(
                        f"replay-{self._number}", lease_ttl_s=settings.lease_ttl_s
                    )
                else:
                    self._session = self._session.reopen()
                self._employ(self._session)
                return self._session
            except AWAY:
                if time.monotonic() > deadline or self._stop.wait(REOPEN_PAUSE_SECONDS):
                    raise

    def _employ(self, session: Session) -> None:
        """A worker, attached under the session, on the pool as it is now."""
        settings = self._settings
        if settings.with_bytes:
            name = f"replay-{self._number}"
            attachment = self._client.attach_worker(session.session_id, session.epoch, name)
            self._attachment = attachment
            self._worker = Worker(
                map_pool(session.pool, attachment),
                attachment=attachment,
                verify_sample=settings.verify_sample,
                seed=settings.seed,
            )

    def _dismiss(self, tally: Tally) -> None:
        """The worker writes no more."""
        worker, self._worker = self._worker, None
        if worker is not None:
            tally.tokens_written += worker.tokens_written
            tally.blocks_verified += worker.blocks_verified
            tally.blocks_in_windows += worker.blocks_in_windows
            tally.blocks_reread += worker.blocks_reread
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None


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
