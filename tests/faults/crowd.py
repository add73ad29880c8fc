"""Many or awkward clients in one process: ``python crowd.py PROGRAM ...``; ends with SIGTERM.

connections TARGET COUNT       as many channels, a call on each; and one more before the end
sessions TARGET COUNT LEASE_S  as many idle sessions on one channel, kept alive; then closed
nagger TARGET                  calls all the time; says how long they took
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from typing import Any

import grpc

from kvclient import Client
from kvclient.errors import KVDepotError
from kvdepot.v1 import admin_pb2, admin_pb2_grpc

AT_ONCE = 50
TIMEOUT_SECONDS = 60


def say(**values: Any) -> None:
    """A line for the test."""
    print(json.dumps(values), flush=True)


def wait_for_end() -> None:
    """Until SIGTERM."""
    signal.sigwait([signal.SIGTERM])


async def connections(target: str, count: int) -> None:
    """Each with a TCP connection of its own."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(target, options) for _ in range(count)]
    turn = asyncio.Semaphore(AT_ONCE)
    failed = 0

    async def call(channel: grpc.aio.Channel) -> None:
        nonlocal failed
        stub = admin_pb2_grpc.KVAdminServiceStub(channel)
        async with turn:
            try:
                await stub.GetStats(
                    admin_pb2.GetStatsRequest(), timeout=TIMEOUT_SECONDS, wait_for_ready=True
                )
            except grpc.RpcError:
                failed += 1

    await asyncio.gather(*map(call, channels))
    say(connected=count - failed)
    await ended.wait()
    await asyncio.gather(*map(call, channels))
    say(failed=failed)


def sessions(target: str, count: int, lease_s: int) -> None:
    """Their leases are renewed meanwhile."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    with Client(target, timeout_s=TIMEOUT_SECONDS) as client:
        opened = [client.open_session(f"idle {n}", lease_ttl_s=lease_s) for n in range(count)]
        say(opened=count)
        wait_for_end()
        lost = sum(session.lost is not None for session in opened)
        for session in opened:
            session.close()
        say(lost=lost)


def nagger(target: str) -> None:
    """A well-behaved client: what the others do should not reach it."""
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    failures: list[str] = []
    seconds: list[float] = []
    with (
        Client(target, timeout_s=TIMEOUT_SECONDS) as client,
        client.open_session("nagger") as session,
    ):
        say(running=True)
        number = 0
        while not stopping:
            number += 1
            began = time.monotonic()
            try:
                session.get_computed_blocks(f"r{number}", range(40))
                session.free(f"r{number}")
            except KVDepotError as error:
                failures.append(str(error))
            seconds.append(time.monotonic() - began)
            time.sleep(0.002)
    seconds.sort()
    say(
        failures=failures[:5],
        calls=2 * len(seconds),
        p99_s=seconds[int(0.99 * len(seconds))],
        max_s=seconds[-1],
    )


if __name__ == "__main__":
    program, where, *numbers = sys.argv[1:]
    if program == "connections":
        asyncio.run(connections(where, *map(int, numbers)))
    elif program == "sessions":
        sessions(where, *map(int, numbers))
    else:
        nagger(where)
