"""Schedulers, workers and servers are killed, or stopped and continued, while others work."""

from __future__ import annotations

import json
import os
import signal
import time
from random import Random

import pytest

from kvclient import Client
from kvclient.errors import KVDepotError
from kvclient.reports import SessionState
from processes import SLACK_SECONDS, Processes, ServerProcess, assert_empty, wait_for

# A machine that stands still for two seconds ends no session.
LEASE_SECONDS = 4.0
LINGER_SECONDS = 240.0
POOL = {"block_size": 16, "num_blocks": 400, "worker_heartbeat_seconds": 0.2}

# The long versions, on a busy machine.
pytestmark = pytest.mark.timeout(900)


def sessions_named(client: Client, name: str) -> list[SessionState]:
    """The states of the sessions with this name."""
    return [info.state for info in client.list_sessions() if info.name == name]


@pytest.mark.parametrize(
    "kills",
    [pytest.param(2, id="2-kills"), pytest.param(20, id="20-kills", marks=pytest.mark.slow)],
)
def test_one_of_two_schedulers_is_killed(processes: Processes, kills: int) -> None:
    """Its worker with it, or left alive and writing; the other one's bytes stay right."""
    chance = Random(kills)
    server = processes.serve(**POOL)
    with Client(server.target) as client:
        other = processes.load("scheduler", server.target, 0, 20)
        other.said("running")
        num_lingering = number = 0
        # Between two steps nothing is in flight, which is seldom.
        while number < kills or not num_lingering:
            number += 1
            assert number < kills + 10
            name = f"split {number}"
            victim = processes.load("split", server.target, number, LEASE_SECONDS, LINGER_SECONDS)
            worker = processes.stray(int(victim.said(r'"worker": (\d+)')[1]))
            victim.said("running")
            time.sleep(chance.uniform(0, 0.5))
            worker_lives = number % 2 == 1
            victim.kill()
            if worker_lives:
                in_flight = int(victim.said(r'"lingers": (\d+)')[1])
                num_lingering += in_flight
                # The lease ends, and the worker writes: nobody gets those blocks meanwhile.
                departed = [SessionState.DEPARTED]
                wait_for(lambda n=name, d=departed: sessions_named(client, n) == d)
                assert client.stats().blocks.quarantined >= in_flight
                os.kill(worker, signal.SIGTERM)
                victim.said("worker_ended")
                seconds = wait_for(lambda n=name: not sessions_named(client, n))
                assert seconds < SLACK_SECONDS
            else:
                os.kill(worker, signal.SIGKILL)
                seconds = wait_for(lambda n=name: not sessions_named(client, n))
                assert seconds < LEASE_SECONDS + SLACK_SECONDS
            assert client.audit().violations == ()
        other.signal(signal.SIGTERM)
        report = other.report()
        assert report["failure"] is None
        assert report["verified"] > 0
        assert report["requests"] > 0
        wait_for(lambda: not client.list_sessions())
        assert_empty(client)


@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_the_server_is_killed_and_restarted(processes: Processes, kills: int) -> None:
    """Clients learn the new epoch, reopen and finish; no byte is wrong."""
    server = processes.serve(**POOL | {"num_blocks": 2000})
    replay = processes.kvdepot(
        *("replay", "--server", server.target, "--requests", str(30 * (kills + 1))),
        *("--reopen", "--lease-ttl-seconds", "120", "--max-running", "16", "--json"),
    )
    for _ in range(kills):
        wait_for_work(server)
        server.kill()
        server = processes.again(server)
    assert replay.ended(240) == 0, replay.lines
    report = parsed(replay.lines)
    assert report["failures"] == []
    assert report["requests"] == 30 * (kills + 1)
    assert report["sessions_reopened"] >= kills
    assert report["blocks_verified"] > 0
    assert report["mirror_equal"] is True
    with Client(server.target) as client:
        wait_for(lambda: not client.stats().num_event_subscribers)
        assert_empty(client)


def wait_for_work(server: ServerProcess) -> None:
    """Until schedulers have looked up tokens on it."""

    def works() -> bool:
        try:
            return client.stats().prefix_cache_queries > 3_000
        except KVDepotError:
            return False

    with Client(server.target) as client:
        wait_for(works)


def parsed(lines: list[str]) -> dict[str, object]:
    """A report that is printed over several lines."""
    start = max(number for number, line in enumerate(lines) if line == "{")
    loaded: dict[str, object] = json.loads("\n".join(lines[start:]))
    return loaded


def test_a_stopped_client_is_fenced(processes: Processes) -> None:
    """SIGSTOP for longer than its lease, SIGCONT: its late calls change nothing."""
    server = processes.serve(**POOL)
    with Client(server.target) as client, client.open_session("B", lease_ttl_s=60) as other:
        patient = processes.load("patient", server.target, LEASE_SECONDS)
        patient.said("running")
        assert client.stats().blocks.live == 3
        patient.signal(signal.SIGSTOP)
        wait_for(lambda: not sessions_named(client, "patient"))
        warm = other.get_computed_blocks("probe", range(41)).num_computed_tokens
        before = client.stats()
        assert (before.blocks.live, before.num_sessions) == (0, 1)
        patient.signal(signal.SIGUSR1)
        patient.signal(signal.SIGCONT)
        report = patient.report()
        lost = {"SESSION_EXPIRED", "LEASE_EXPIRED"}
        assert set(report["answers"].values()) <= lost, report
        assert len(report["answers"]) == 4
        # What it did in a session of its own after that is all that was done.
        assert (report["after"], report["freed"]) == ("OK", 1)
        after = client.stats()
        assert after.generation == before.generation
        assert after.evictions == before.evictions
        assert after.prefix_cache_queries == before.prefix_cache_queries + 40
        assert warm == 0
        assert (after.blocks.live, after.num_sessions) == (0, 1)
        assert client.audit().violations == ()
