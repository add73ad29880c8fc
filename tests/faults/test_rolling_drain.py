"""Two servers are upgraded one after the other, under calls: none fails."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass, field

import pytest

from kvclient import Client
from kvclient.client import Session
from kvclient.errors import KVDepotError, Unavailable
from kvclient.values import Content, FreeMode, SlotRequest
from processes import Processes, assert_empty, wait_for

NUM_SCHEDULERS = 4
JOBS_A_SESSION = 3
GRACE_SECONDS = 60


@dataclass
class Count:
    """What all schedulers did."""

    calls: int = 0
    failed: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Scheduler(threading.Thread):
    """Works on one of the servers, and goes to the other when that one drains."""

    def __init__(self, number: int, clients: list[Client], count: Count, calls: int) -> None:
        super().__init__(daemon=True)
        self._number = number
        self._clients = clients
        self._at = number % 2
        self._count = count
        self._calls = calls

    def run(self) -> None:
        """Sessions of some jobs each, until all have made so many calls."""
        try:
            job = 0
            while self._count.calls < self._calls:
                session = self._open()
                for _ in range(JOBS_A_SESSION):
                    job += 1
                    self._work(session, f"{self._number}-{job}")
                session.close()
                self._done(1)
        except KVDepotError as error:
            with self._count.lock:
                self._count.failed.append(f"{type(error).__name__}: {error}")

    def _open(self) -> Session:
        for _ in range(200):
            try:
                session = self._clients[self._at].open_session(f"scheduler {self._number}")
            except Unavailable:  # it drains, or is being started again
                self._at = 1 - self._at
            else:
                self._done(1)
                return session
        raise Unavailable("neither server takes a session", reason="NONE")

    def _work(self, session: Session, request_id: str) -> None:
        prompt = Content(range(100, 150))
        session.allocate_slots(SlotRequest(request_id, prompt, lookup=True))
        session.cache_blocks(request_id, 50)
        grown = SlotRequest(request_id, Content([1], 50), num_computed_tokens=50, num_new_tokens=1)
        session.allocate_slots(grown)
        assert session.free(request_id, FreeMode.FINISH).known
        self._done(4)

    def _done(self, calls: int) -> None:
        with self._count.lock:
            self._count.calls += calls


@pytest.mark.parametrize("calls", [600, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_rolling_upgrade(processes: Processes, calls: int) -> None:
    """Each server is told to stop, ends by itself, and comes back; every call is answered."""
    servers = [
        processes.serve(num_blocks=200, drain_grace_seconds=GRACE_SECONDS, mapping_dir=directory)
        for directory in two_directories(processes)
    ]
    clients = [Client(server.target) for server in servers]
    count = Count()
    schedulers = [Scheduler(n, clients, count, calls) for n in range(NUM_SCHEDULERS)]
    for scheduler in schedulers:
        scheduler.start()
    for turn in range(4):
        wait_for(lambda t=turn: count.calls > calls * (t + 1) / 5 or count.failed)
        server, client = servers[turn % 2], clients[turn % 2]
        held = client.open_session("held")  # for as long as it is open, the server drains
        server.signal(signal.SIGTERM)
        wait_for(lambda c=client: _is_turned_away(c))
        held.close()
        assert server.ended() == 0, server.lines
        servers[turn % 2] = processes.again(server)
    for scheduler in schedulers:
        scheduler.join(120)
    assert count.failed == []
    assert count.calls >= calls
    for client in clients:
        wait_for(lambda c=client: _is_reachable(c))  # its channel may still pause
        assert_empty(client)
        client.close()


def _is_turned_away(client: Client) -> bool:
    try:
        client.open_session("late").close()
    except Unavailable as error:
        return error.reason == "DRAINING"
    return False


def _is_reachable(client: Client) -> bool:
    try:
        client.stats()
    except Unavailable:
        return False
    return True


def two_directories(processes: Processes) -> list[str]:
    """For the pools of two servers."""
    found = []
    for name in ("one", "two"):
        directory = processes.directory / name
        directory.mkdir()
        found.append(str(directory))
    return found
