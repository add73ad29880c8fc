"""A scheduler's morning, told to either client: ``python story.py sync|aio TARGET``.

Prints what the server answered, a JSON line each; both clients must print the same.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from dataclasses import asdict, is_dataclass
from typing import Any

import kvclient
import kvclient.aio
from kvclient.errors import KVDepotError
from kvclient.events import IndexMirror
from kvclient.values import (
    Cache,
    Content,
    ExtraKeys,
    Free,
    FreeMode,
    Grow,
    OperationKind,
    SlotRequest,
    Step,
    StepMark,
)

PROMPT = list(range(100, 110))


async def of(value: Any) -> Any:
    """The value, awaited if the client is asyncio's."""
    return await value if inspect.isawaitable(value) else value


async def items(stream: Any) -> list[Any]:
    """All of a stream."""
    return [item async for item in stream] if hasattr(stream, "__aiter__") else list(stream)


async def following(stream: Any) -> Any:
    """A stream's next item."""
    return await anext(stream) if hasattr(stream, "__aiter__") else next(stream)


def tell(what: str, value: Any) -> None:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    print(json.dumps({what: value}, default=lambda other: bytes(other).hex()), flush=True)


async def story(client: Any) -> None:
    pool = await of(client.describe_pool())
    tell("pool", [pool.num_blocks, pool.groups[0].block_size, pool.layout, len(pool.layers)])
    events = await of(client.stream_events(snapshot=True))
    mirror = IndexMirror()
    mirror.apply(await following(events))
    tell("at first", sorted(mirror.hashes()))

    session = await of(client.open_session("story", pool.fingerprint, lease_ttl_s=50))
    tell("lease", session.lease_ttl_s)
    tell("lookup", await of(session.get_computed_blocks("a", PROMPT)))
    tell("slots", await of(session.allocate_slots(SlotRequest("a", num_new_tokens=10))))
    grown = Content([110, 111], token_offset=10)
    decode = SlotRequest("a", grown, num_computed_tokens=10, num_new_tokens=2)
    tell("decode", await of(session.allocate_slots(decode)))
    tell("cache", await of(session.cache_blocks("a", 12)))
    tell("cache unknown", await of(session.cache_blocks("z", 12)))

    stream = session.step_stream()
    salted = Content(PROMPT, extra_keys=ExtraKeys(cache_salt="salt"))
    step = Step(
        runs=[(OperationKind.ADMIT, 2), (OperationKind.GROW, 1)],
        admissions=[
            SlotRequest("b", Content(PROMPT), lookup=True),
            SlotRequest("c", salted, lookup=True, max_new_tokens=8),
        ],
        grow=Grow(
            handles=[1],
            num_computed_tokens=[12],
            num_new_tokens=[1],
            token_offsets=[12],
            token_counts=[1],
            tokens=[112],
        ),
    )
    reply = await of(stream.call(step))
    tell("step", reply)
    tell("grown", reply.grow.new_blocks())
    handles = [admitted.handle for admitted in reply.admissions]
    step = Step(
        runs=[(OperationKind.CACHE, 1), (OperationKind.FREE, 2)],
        cache=Cache(handles=[handles[1]], num_computed_tokens=[8]),
        free=Free(handles=handles, modes=[FreeMode.PREEMPT, FreeMode.DETACH]),
    )
    reply = await of(stream.call(step))
    tell("free", reply)
    tell("returned", await of(session.return_blocks(reply.free_tickets[1])))
    for what, bad in {
        "unknown ticket": lambda: session.return_blocks(99),
        "busy reset": lambda: session.reset_prefix_cache(),
        "drain in vain": lambda: session.reset_prefix_cache("drain", timeout_s=0.05),
        "no such mode": lambda: session.reset_prefix_cache("gently"),
        "no block": lambda: client.evict_blocks([1, 65]),
        "nobody's worker": lambda: client.attach_worker("nobody", session.epoch),
        "bad mark": lambda: session.free("a", mark=StepMark(1, 2)),
        "bad token": lambda: session.get_computed_blocks("d", [-1]),
        "odd bytes": lambda: session.get_computed_blocks("d", b"\1\2\3"),
        "no request": lambda: session.get_computed_blocks("d"),
        "other tokens": lambda: session.get_computed_blocks("b", [1, 2]),
        "bad step": lambda: stream.call(Step(runs=[(OperationKind.FREE, 3)])),
        "bad fingerprint": lambda: client.open_session("x", "other"),
        "bad pull": lambda: items(client.pull_blocks([b"short"])),
        "old events": lambda: old_events(client),
    }.items():
        try:
            await of(bad())
            tell(what, "no error")
        except KVDepotError as error:
            tell(what, [type(error).__name__, error.reason, error.field, error.retryable])
    tell("after errors", (await of(stream.call(Step(runs=[])))).free_blocks)

    stats = await of(client.stats())
    tell("stats", [stats.num_sessions, stats.num_requests, asdict(stats.blocks)])
    while mirror.next_sequence != stats.next_event_sequence:
        mirror.apply(await following(events))
    events.close()
    hashes = sorted(mirror.hashes())
    tell("mirrored", hashes)
    pulled = await items(client.pull_blocks([*hashes, bytes(32)], checksums=True))
    tell("pulled", [[block.status.name, len(block.data)] for block in pulled])
    tell("violations", (await of(client.audit())).violations)
    await operators(client, session)
    worker = await of(client.attach_worker(session.session_id, session.epoch, "worker"))
    await of(stream.close())
    tell("closed", await of(session.close()))
    while (error := await raised(worker.check)) is None:
        await asyncio.sleep(0.01)
    tell("after its end", error)
    await of(worker.close())
    again = await of(session.reopen())
    tell("reopened", [again.session_id != session.session_id, again.lease_ttl_s])
    await of(again.close())
    tell("closed again", await of(session.close()))
    await of(client.close())


async def operators(client: Any, session: Any) -> None:
    """What operators see and do, and workers."""
    await of(session.get_computed_blocks("d", PROMPT))
    worker = await of(client.attach_worker(session.session_id, session.epoch, "worker"))
    tell("attached", await raised(worker.check))
    hasty = await of(client.open_session("hasty", lease_ttl_s=25))
    sessions = await of(client.list_sessions())
    tell("listed", [[s.name, s.state.name, s.num_requests, s.num_workers] for s in sessions])
    workers = [(await of(client.stats())).num_workers]
    await of(worker.close())
    while (await of(client.stats())).num_workers:
        await asyncio.sleep(0.01)
    tell("workers", [*workers, 0])
    tell("while detached", await raised(worker.check))
    page = await of(client.list_requests(session.session_id, page_size=2))
    rest = await of(client.list_requests(session.session_id, page_token=page.next_page_token))
    tell("pages", [[request.request_id for request in part.requests] for part in (page, rest)])
    tell("requests", [asdict(request) | {"session_id": ""} for request in page.requests])
    tell("evicted", await of(client.evict_blocks([1, 1, 64])))
    tell("scoped", (await of(session.reset_prefix_cache(cache_salt="salt"))).generation)
    tell("forced", (await of(session.reset_prefix_cache("force"))).generation)
    await of(hasty.close())


async def raised(check: Any) -> Any:
    """What a check raises; None when nothing."""
    try:
        check()
    except KVDepotError as error:
        return [type(error).__name__, error.reason, error.field, error.retryable]
    return None


async def old_events(client: Any) -> list[Any]:
    return await items(await of(client.stream_events(7, epoch="other")))


if __name__ == "__main__":
    flavour, target = sys.argv[1:]

    async def main() -> None:
        make = kvclient.Client if flavour == "sync" else kvclient.aio.Client
        await story(make(target, timeout_s=20))

    asyncio.run(main())
