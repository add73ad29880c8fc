"""A server under load for long: its memory stays, and all it counts comes back to 0.

Two schedulers replay chats all the time, a third is killed and begins again, a fourth opens
and closes sessions; a follower mirrors the index, a peer pulls blocks, the cache is reset now
and then. ``KVDEPOT_SOAK_SECONDS`` says how long; `make soak` says half an hour.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from kvclient import Client
from kvclient.errors import BlocksInUse
from kvclient.replay.follower import Follower
from kvclient.replay.puller import Puller
from kvclient.values import Content, SlotRequest
from processes import Process, Processes, ServerProcess, assert_empty, wait_for

SECONDS = float(os.environ.get("KVDEPOT_SOAK_SECONDS", "60"))
WARM_UP_SHARE = 0.4
"""Of the time, and longer on a slow machine: until then the event history, reply windows and
heaps fill."""
EVENT_HISTORY = 2048
SAMPLE_SECONDS = 0.5
AUDIT_SECONDS = 10.0
RESET_SECONDS = 4.0
KILL_SECONDS = 5.0
GROWTH_MAX_BYTES = 6 << 20
"""Over what is left of a minute; noise of the allocator's is a few MiB."""
GROWTH_MAX_SHARE = 0.03
"""Over what is left of a longer run, of the memory then."""
NUM_BLOCKS = 600


class Disturbances:
    """What happens beside the steady load, a little of it at each call."""

    def __init__(self, processes: Processes, server: ServerProcess, client: Client) -> None:
        self.counts = dict.fromkeys(("kills", "resets", "refused", "sessions", "audits"), 0)
        self._processes = processes
        self._server = server
        self._client = client
        self._chance = Random(7)
        self._operator = client.open_session("operator")
        self._victim = self._start_victim()
        self._next_kill, self._next_reset, self._next_audit = 0.0, 0.0, 0.0
        self.follower = Follower(client)
        self.puller = Puller(client, self.follower, client.describe_pool())

    def happen(self, now: float) -> None:
        """Whatever is due; raises if anything is wrong."""
        assert self.puller.pull() == []
        assert self.follower.error is None, self.follower.error
        self._open_and_close()
        if now >= self._next_reset:
            self._next_reset = now + RESET_SECONDS
            self._reset()
        if now >= self._next_kill and any("running" in line for line in self._victim.lines):
            self._next_kill = now + KILL_SECONDS
            self._victim.kill()
            self.counts["kills"] += 1
            self._victim = self._start_victim()
        assert self._victim.popen.poll() is None, self._victim.lines
        if now >= self._next_audit:
            self._next_audit = now + AUDIT_SECONDS
            assert self._client.audit().violations == ()
            self.counts["audits"] += 1

    def end(self) -> None:
        """Nothing more happens."""
        self._victim.kill()
        self._operator.close()
        assert self.follower.compare() == []
        self.follower.stop()

    def _start_victim(self) -> Process:
        return self._processes.load("scheduler", self._server.target, self._chance.randrange(99), 6)

    def _reset(self) -> None:
        if self._chance.random() < 0.7:
            self._operator.reset_prefix_cache("force")
            self.counts["resets"] += 1
            return
        try:
            self._operator.reset_prefix_cache("refuse")
            self.counts["resets"] += 1
        except BlocksInUse:
            self.counts["refused"] += 1

    def _open_and_close(self) -> None:
        with self._client.open_session("brief") as brief:
            prompt = Content([self._chance.randrange(1000) for _ in range(40)])
            brief.allocate_slots(SlotRequest("r", prompt, lookup=True))
            if self._chance.random() < 0.5:
                brief.free("r")
        self.counts["sessions"] += 1


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_soak(processes: Processes, record_property: Callable[[str, object], None]) -> None:
    # Small bounds, so that all that is bounded is full after the warm-up.
    server = processes.serve(
        num_blocks=NUM_BLOCKS,
        event_history=EVENT_HISTORY,
        lease_ttl_seconds=10,
        worker_heartbeat_seconds=0.5,
        ended_sessions_kept=16,
    )
    with Client(server.target) as client:
        assert_empty(client)
        descriptors = server.num_descriptors
        loads = [processes.load("scheduler", server.target, seed, 10) for seed in range(2)]
        for load in loads:
            load.said("running")
        beside = Disturbances(processes, server, client)
        times: list[float] = []
        memory: list[int] = []
        began = time.monotonic()
        ends_at = SECONDS
        while (now := time.monotonic() - began) < ends_at:
            time.sleep(SAMPLE_SECONDS)
            beside.happen(now)
            if not times and beside.follower.num_events < 3 * EVENT_HISTORY:
                ends_at = max(ends_at, now + (1 - WARM_UP_SHARE) * SECONDS)
            elif now > WARM_UP_SHARE * SECONDS:
                times.append(now)
                memory.append(server.rss_bytes)
            assert all(load.popen.poll() is None for load in loads), [x.lines for x in loads]
        for load in loads:
            load.signal(signal.SIGTERM)
        reports = [load.report() for load in loads]
        beside.end()
        slope = float(np.polyfit(times, memory, 1)[0])
        growth = slope * (times[-1] - times[0])
        record_property("growth_bytes", int(growth))
        record_property("rss_bytes", memory[-1])
        requests = sum(report["requests"] for report in reports)
        told = ", ".join(f"{count} {what}" for what, count in beside.counts.items())
        print(
            f"{now:.0f} s, {requests} requests, {told}, {beside.follower.num_events} events, "
            f"{beside.puller.blocks_pulled} blocks pulled: {memory[-1] >> 20} MiB, "
            f"{growth / (1 << 20):+.2f} MiB over the last {times[-1] - times[0]:.0f} s "
            f"(from {min(memory) >> 20} to {max(memory) >> 20})"
        )
        assert growth < max(GROWTH_MAX_BYTES, GROWTH_MAX_SHARE * memory[-1])
        for report in reports:
            assert report["failure"] is None
            assert report["verified"] > 0
        assert sum(report["preemptions"] for report in reports) > 0  # the pool was too small
        assert beside.puller.blocks_pulled > 0
        assert beside.counts["kills"] > 0 and beside.counts["resets"] > 0
        wait_for(lambda: not client.list_sessions())
        wait_for(lambda: not client.stats().num_event_subscribers)
        assert_empty(client)
        with client.open_session("last") as session:
            session.reset_prefix_cache()
        blocks = client.stats().blocks
        assert (blocks.cached, blocks.free) == (0, NUM_BLOCKS - 1)
        wait_for(lambda: server.num_descriptors <= descriptors)
