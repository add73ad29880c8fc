"""Leases with the asyncio client: ``python keeping_story.py TARGET``. Fails by assertion.

In a process of its own, as every event loop of grpc's.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time

import pytest

from kvclient.aio import Client
from kvclient.errors import CacheLost
from patience import TTL_S


def keepers() -> int:
    """The tasks that renew leases."""
    return sum(task.get_name() == "kvdepot-leases" for task in asyncio.all_tasks())


async def until_sessions(client: Client, count: int) -> None:
    while (await client.stats()).num_sessions != count:
        await asyncio.sleep(0.02)


async def story(target: str) -> None:
    async with Client(target) as client:
        sessions = [await client.open_session(lease_ttl_s=TTL_S) for _ in range(3)]
        assert keepers() == 1
        await asyncio.sleep(1.25 * TTL_S)
        for session in sessions:
            assert session.lost is None
            await session.get_computed_blocks("a", [1, 2, 3])

        # One that nobody refers to ends; so does one whose loop is busy for too long.
        del session
        sessions.pop()
        gc.collect()
        await until_sessions(client, 2)
        await sessions.pop().close()
        (session,) = sessions
        while session.lost is None:
            time.sleep(1.25 * TTL_S)
            await asyncio.sleep(0.3)
        assert keepers() == 0
        with pytest.raises(CacheLost) as lost:
            await session.free("a")
        # Or it heard nothing, and knows by its own clock.
        assert lost.value.reason in ("SESSION_EXPIRED", "LEASE_EXPIRED")
        assert await session.close() == 0
        async with await session.reopen() as again:
            assert not (await again.free("a")).known
        await client.open_session(lease_ttl_s=TTL_S)
    assert keepers() == 0


if __name__ == "__main__":
    asyncio.run(asyncio.wait_for(story(sys.argv[1]), 140), debug=True)
