"""The asyncio client on a wire that breaks: ``python broken_wire.py TARGET``.

In a process of its own, as every event loop of grpc's. Fails by assertion.
"""

from __future__ import annotations

import asyncio
import sys

from kvclient.aio import Client
from kvclient.errors import DeadlineExceeded, Unavailable
from kvclient.values import Content, OperationKind, SlotRequest, Step
from patience import impatient
from wire import Wire


def admit(request_id: str, num_tokens: int) -> Step:
    slots = SlotRequest(request_id, Content(range(num_tokens)), lookup=True)
    return Step(runs=[(OperationKind.ADMIT, 1)], admissions=[slots])


async def until_live(client: Client, num_blocks: int) -> None:
    while (await client.stats()).blocks.live != num_blocks:
        await asyncio.sleep(0.01)


async def until_reached(client: Client) -> None:
    """What is sent again at once, a few times, may find the connection not back yet."""
    while True:
        try:
            await client.stats()
            return
        except Unavailable:
            await asyncio.sleep(0.01)


async def story(target: str, wire: Wire) -> None:
    async with Client(target) as near, Client(wire.target, timeout_s=20) as far:
        session = await far.open_session()
        stream = session.step_stream()
        await stream.call(admit("a", 4))

        # An answer is lost with its connection: sent again, done once.
        wire.losing = True
        call = asyncio.create_task(stream.call(admit("b", 5)))
        await until_live(near, 2)
        wire.cut()
        assert len((await call).admissions[0].new_blocks[0]) == 1

        # A caller that gives up: the next call settles what it left.
        wire.losing = True
        call = asyncio.create_task(stream.call(admit("c", 6)))
        await until_live(near, 3)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        wire.cut()
        assert (await session.free("c")).known

        # An answer that is late.
        for late in (stream.call, session.step):
            await session.free("z")
            wire.losing = True
            with impatient(far, stream):
                try:
                    await late(admit(f"d{late.__name__}", 4))
                except DeadlineExceeded:
                    wire.cut()
                else:
                    raise AssertionError("it was not late")
            await until_reached(far)
        settled = await session.settle()
        assert settled.admissions[0].num_new_computed_tokens == 0
        assert await session.close() == 4
        assert (await near.audit()).violations == ()


if __name__ == "__main__":
    relay = Wire(sys.argv[1])
    asyncio.run(asyncio.wait_for(story(sys.argv[1], relay), 140))
    relay.close()
