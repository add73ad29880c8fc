"""Several Steps in flight, with either client: ``python pipelining.py sync|aio TARGET``.

Over a wire that breaks. Fails by assertion.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import pytest

import kvclient
import kvclient.aio
from kvclient.errors import FailedPrecondition, InvalidArgument
from kvclient.values import Cache, Content, Free, OperationKind, SlotRequest, Step
from story import of
from wire import Wire

BLOCK_SIZE = 4


def admit(request_id: str, num_tokens: int) -> Step:
    slots = SlotRequest(request_id, Content(range(num_tokens)), lookup=True)
    return Step(runs=[(OperationKind.ADMIT, 1)], admissions=[slots])


def free(*handles: int) -> Step:
    return Step(runs=[(OperationKind.FREE, len(handles))], free=Free(handles=handles))


BAD = Step(runs=[(OperationKind.CACHE, 2)], cache=Cache(handles=[1], num_computed_tokens=[1]))


async def until_live(client: Any, num_blocks: int) -> None:
    while (await of(client.stats())).blocks.live != num_blocks:
        await asyncio.sleep(0.01)


async def raised(pending: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        await of(pending.result())


async def story(near: Any, far: Any, wire: Wire) -> None:
    session = await of(far.open_session())
    for bound in (0, session.reply_window + 1):
        with pytest.raises(InvalidArgument) as caught:
            session.step_stream(bound)
        assert caught.value.field == "max_in_flight"
    stream = session.step_stream(3)

    # Sent is not waited for; answers come in order, whoever asks first.
    first, second = [await of(stream.send(admit(name, 4))) for name in "ab"]
    assert len((await of(second.result())).admissions[0].new_blocks[0]) == 1
    assert first.is_here() and len((await of(first.result())).admissions[0].new_blocks[0]) == 1
    assert await of(first.result()) == await of(first.result())

    # One that is wrong is its own caller's; those behind it are sent again.
    good, bad, after = [await of(stream.send(step)) for step in (admit("c", 5), BAD, admit("d", 6))]
    assert len((await of(after.result())).admissions[0].new_blocks[0]) == 1
    await raised(bad, InvalidArgument)
    await raised(bad, InvalidArgument)
    handles = [(await of(good.result())).admissions[0].handle]
    handles.append((await of(after.result())).admissions[0].handle)

    # A call that is no Step comes after them, and settles them.
    pending = await of(stream.send(free(*handles)))
    assert not (await of(session.free("c"))).known
    assert pending.is_here()
    await until_live(near, 2)

    # Answers are lost with their connection: sent again in order, each done once.
    wire.losing = True
    lost = [await of(stream.send(admit(name, 4))) for name in "efg"]
    await until_live(near, 5)
    wire.cut()
    results = [await of(step.result()) for step in lost]
    assert all(result.admissions[0].new_blocks != ([],) for result in results)
    assert (await of(near.stats())).blocks.live == 5

    # At the bound a further one waits for the oldest; here the wire breaks meanwhile.
    wire.losing = True
    lost = [await of(stream.send(admit(name, 4))) for name in "hij"]
    await until_live(near, 8)
    sending = asyncio.create_task(one_more(stream))
    await asyncio.sleep(0.2)
    wire.cut()
    lost.append(await sending)
    await of(lost[-1].result())
    assert all(step.is_here() for step in lost)
    await until_live(near, 9)

    # The stream is closed by its owner; what it carried is settled all the same.
    pending = await of(stream.send(admit("l", 4)))
    await of(stream.close())
    assert len((await of(pending.result())).admissions[0].new_blocks[0]) == 1
    with pytest.raises(FailedPrecondition) as closed:
        await of(stream.send(free()))
    assert closed.value.reason == "STREAM_CLOSED"
    assert await of(session.close()) == 10
    assert (await of(near.audit())).violations == ()


async def one_more(stream: Any) -> Any:
    if isinstance(stream, kvclient.StepStream):
        return await asyncio.to_thread(stream.send, admit("k", 4))
    return await stream.send(admit("k", 4))


async def main(flavour: str, target: str, wire: Wire) -> None:
    make = kvclient.Client if flavour == "sync" else kvclient.aio.Client
    # Whoever waited for an answer that does not come would wait for 100 s.
    near, far = make(target), make(wire.target, timeout_s=200)
    began = time.monotonic()
    await story(near, far, wire)
    assert time.monotonic() - began < 100
    await of(far.close())
    await of(near.close())


if __name__ == "__main__":
    relay = Wire(sys.argv[2])
    asyncio.run(asyncio.wait_for(main(sys.argv[1], sys.argv[2], relay), 140))
    relay.close()
