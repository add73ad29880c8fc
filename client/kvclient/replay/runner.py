"""Runs a whole replay: starts the processes, watches them, and adds up what they did."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from kvclient.client import Client
from kvclient.description import PoolDescription
from kvclient.replay.errors import ReplayError
from kvclient.replay.job import num_computed_at_last
from kvclient.replay.processes import PeerResult, Progress, peer_process, scheduler_process
from kvclient.replay.report import Report
from kvclient.replay.settings import ReplaySettings
from kvclient.replay.tally import Tally
from kvclient.replay.trace import TraceRequest
from kvclient.tables import num_blocks_held

_START_SECONDS = 60.0
_END_SECONDS = 120.0


class Runner:
    """One replay against the server at ``target``.

    ``on_progress`` is called with the number of finished requests, now and then.
    """

    def __init__(
        self, target: str, settings: ReplaySettings, on_progress: Callable[[int], None]
    ) -> None:
        self._target = target
        self._settings = settings
        self._on_progress = on_progress
        self._context = multiprocessing.get_context("spawn")
        self._stop_schedulers = self._context.Event()
        self._stop_peer = self._context.Event()
        self._processes: list[BaseProcess] = []

    def run(self, requests: Sequence[TraceRequest]) -> Report:
        """The report of replaying ``requests``, which are those of the settings.

        Raises ReplayError, or what the client raises, if it cannot be run.
        """
        settings = self._settings
        try:
            with Client(self._target) as client:
                # A server that is not there, or too small, is told at once.
                self._require_room(client.describe_pool(), requests)
                peer = None
                if settings.follow:
                    peer = self._start(peer_process, settings, self._stop_peer)
                    told = self._receive(peer, _START_SECONDS)
                    if isinstance(told, PeerResult):  # its end
                        raise ReplayError("; ".join(told.failures))
                began = time.monotonic()
                tally = self._schedule(peer)
                seconds = time.monotonic() - began
                seen = PeerResult()
                if peer is not None:
                    self._stop_peer.set()
                    answer = self._receive(peer, _END_SECONDS)
                    assert isinstance(answer, PeerResult)
                    seen = answer
                violations = list(client.audit().violations)
                stats = client.stats()
        finally:
            for process in self._processes:
                process.terminate()
            for process in self._processes:
                process.join()
        return Report(settings, seconds, tally, seen, stats, violations)

    def _require_room(self, pool: PoolDescription, requests: Sequence[TraceRequest]) -> None:
        """ReplayError when a request could never run, or where no bytes are to write."""
        if self._settings.with_bytes and not pool.mapping_path:
            if pool.mappings:
                raise ReplayError("the server's bytes are on a CUDA device: add --no-bytes")
            raise ReplayError("the server keeps no bytes (--no-memory): add --no-bytes")
        sizes = [num_computed_at_last(request, self._settings) for request in requests]
        largest = max(sizes)
        name = requests[sizes.index(largest)].request_id
        num_blocks = num_blocks_held(pool, largest, max_step_tokens=self._settings.token_budget)
        if num_blocks > pool.num_blocks - 1:
            raise ReplayError(
                f"the pool is too small: {name}, the largest request, needs {num_blocks} blocks, "
                f"and {pool.num_blocks - 1} can be used; a server with "
                f"--num-blocks {num_blocks + 1} can run it"
            )

    def _schedule(self, peer: Connection[Any, Any] | None) -> Tally:
        """Runs the schedulers to the end, or until something is wrong."""
        settings = self._settings
        open_ends = {
            self._start(scheduler_process, settings, number, self._stop_schedulers)
            for number in range(settings.schedulers)
        }
        done = [0] * settings.schedulers
        total = Tally()
        while open_ends:
            for end in wait([*open_ends, *([peer] if peer is not None else [])]):
                assert isinstance(end, Connection)
                if end is peer:  # it speaks early only if something is wrong
                    self._stop_schedulers.set()
                    peer = None
                    continue
                message = self._receive(end, _END_SECONDS)
                if isinstance(message, Progress):
                    done[message.process] = message.requests
                    self._on_progress(sum(done))
                    continue
                assert isinstance(message, Tally)
                open_ends.discard(end)
                total.add(message)
                if message.failures:
                    self._stop_schedulers.set()
        return total

    def _start(self, work: Callable[..., None], *arguments: object) -> Connection[Any, Any]:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=work, args=(theirs, self._target, *arguments), daemon=True
        )
        process.start()
        theirs.close()
        self._processes.append(process)
        return ours

    def _receive(self, end: Connection[Any, Any], timeout_seconds: float) -> Any:
        try:
            if end.poll(timeout_seconds):
                return end.recv()
        except EOFError:
            pass
        raise ReplayError("a process of the replay ended without a result; see its message above")
