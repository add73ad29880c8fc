"""A server under replay for long: its memory stays, and all it counts comes back to 0.

``KVDEPOT_SOAK_SECONDS`` says how long; `make soak` says half an hour.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvclient import Client
from processes import Processes, assert_empty, wait_for

SECONDS = float(os.environ.get("KVDEPOT_SOAK_SECONDS", "60"))
WARM_UP_SHARE = 0.4
"""Of the time: until then the event history, reply windows and heaps fill."""
SAMPLE_SECONDS = 0.5
GROWTH_MAX_BYTES = 6 << 20
"""Over what is left of a minute; noise of the allocator's is a few MiB."""
GROWTH_MAX_SHARE = 0.03
"""Over what is left of a longer run, of the memory then."""


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_soak(processes: Processes, record_property: Callable[[str, object], None]) -> None:
    server = processes.serve(
        num_blocks=600, event_history=2048, lease_ttl_seconds=5, worker_heartbeat_seconds=0.5
    )
    with Client(server.target) as client:
        loads = [processes.load("scheduler", server.target, seed, 5) for seed in range(2)]
        for load in loads:
            load.said("running")
        times: list[float] = []
        memory: list[int] = []
        began = time.monotonic()
        while (now := time.monotonic() - began) < SECONDS:
            time.sleep(SAMPLE_SECONDS)
            if now > WARM_UP_SHARE * SECONDS:
                times.append(now)
                memory.append(server.rss_bytes)
            assert all(load.popen.poll() is None for load in loads), [x.lines for x in loads]
        assert client.audit().violations == ()
        for load in loads:
            load.signal(signal.SIGTERM)
        reports = [load.report() for load in loads]
        slope = float(np.polyfit(times, memory, 1)[0])
        growth = slope * (times[-1] - times[0])
        record_property("growth_bytes", int(growth))
        record_property("rss_bytes", memory[-1])
        requests = sum(report["requests"] for report in reports)
        print(
            f"{SECONDS:.0f} s, {requests} requests: {memory[-1] >> 20} MiB, "
            f"{growth / (1 << 20):+.2f} MiB over the last {times[-1] - times[0]:.0f} s"
        )
        assert growth < max(GROWTH_MAX_BYTES, GROWTH_MAX_SHARE * memory[-1])
        for report in reports:
            assert report["failure"] is None
            assert report["verified"] > 0
        assert sum(report["preemptions"] for report in reports) > 0  # the pool was too small
        wait_for(lambda: not client.list_sessions())
        assert_empty(client)
        with client.open_session("last") as session:
            session.reset_prefix_cache()
        blocks = client.stats().blocks
        assert (blocks.cached, blocks.free) == (0, 599)
