"""``python -m kvserver.mover.serving FD``: serves PullBlocks out of the pool's bytes.

It knows transfers by what the node tells it, block ids by group, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import sys
from array import array
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import uvloop

from kvcore.errors import InvalidArgument, NotFound, ResourceExhausted
from kvdepot.v1 import transfer_pb2 as pb
from kvdepot.v1 import types_pb2
from kvserver.mover.bucket import Bucket
from kvserver.mover.channel import Channel, Message
from kvserver.mover.frame import frame
from kvserver.mover.nixl import ServingAgent
from kvserver.mover.pages import checksum
from kvserver.mover.store import Store, open_store
from kvserver.rpc import Context, Rpcs, StallWatch, register

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["KVTransferService"].full_name
MESSAGE_BYTES = 1 << 20
MESSAGE_BLOCKS_MAX = 4096
# Hashing so much holds everybody up for a millisecond.
CHECKSUMS_ONLY_BYTES = 4 << 20
# No transfer's id is longer.
_ID_CHARACTERS_MAX = 64
_REPORT_SECONDS = 0.25
# In a message to the node.
_SUMS_MAX = 4096


@dataclass(eq=False, slots=True)
class _Transfer:
    """Block ids by group, 0 for what is not ready, and the pulls that are running."""

    groups: dict[int, array[int]]
    pulls: set[asyncio.Future[None]] = field(default_factory=set)
    closed: bool = False


class Serving:
    """PullBlocks of one pool. ``ask`` has the node tell of a transfer, or that it is none.

    ``summed`` tells it the checksums of blocks, by id, that were computed under a transfer.
    """

    def __init__(
        self,
        start: Message,
        store: Store,
        ask: Callable[[str], None],
        summed: Callable[[str, Sequence[int], Sequence[int]], None] = lambda *_: None,
    ) -> None:
        self.num_sent_bytes = 0
        self._store = store
        self._pulls_max: int = start["pulls_max"]
        self._stall_seconds: float = start["stall_seconds"]
        self._bucket = Bucket(start["bandwidth_bytes"])
        self._num_pulls = 0
        self._transfers: dict[str, _Transfer] = {}
        self._ask = ask
        self._summed = summed
        self._asked: dict[str, asyncio.Future[None]] = {}
        self._agent: ServingAgent | None = None

    def tell(self, message: Message) -> None:
        """What the node says."""
        transfer_id: str = message["id"]
        if message["op"] == "open":
            groups = {group: array("I", ids) for group, ids in message["blocks"].items()}
            self._transfers.setdefault(transfer_id, _Transfer(groups))
            self._answered(transfer_id)
        elif message["op"] == "unknown":
            self._answered(transfer_id)
        elif (transfer := self._transfers.pop(transfer_id, None)) is not None:
            transfer.closed = True
            for pull in transfer.pulls:
                pull.cancel()

    async def offer_nixl(self, devices: str) -> Message | None:
        """What peers must know to read with NIXL; None where that is not to be had."""
        loop = asyncio.get_running_loop()
        self._agent = await loop.run_in_executor(None, ServingAgent, self._store, devices)
        return self._agent.reach()

    async def pull_blocks(self, request: pb.PullBlocksRequest, context: Context) -> None:
        """PullBlocks."""
        transfer = await self._transfer(request.transfer_id)
        ids = self._ids(transfer, request)
        if self._num_pulls >= self._pulls_max:
            raise ResourceExhausted(
                f"{self._num_pulls} pulls are under way, the maximum",
                reason="TOO_MANY_PULLS",
                retryable=True,
            )
        self._num_pulls += 1
        try:
            # Before anything can be cut off: a status cannot follow metadata on their way.
            await context.send_initial_metadata(())
            if transfer.closed:
                raise _closed()
            await self._run(transfer, self._pull(request, ids, context))
        finally:
            self._num_pulls -= 1

    async def _run(self, transfer: _Transfer, pulling: Coroutine[Any, Any, None]) -> None:
        """Until it is done, or the transfer is closed."""
        pull = asyncio.ensure_future(pulling)
        transfer.pulls.add(pull)
        try:
            await pull
        except asyncio.CancelledError:
            if not transfer.closed:
                raise
            raise _closed() from None
        finally:
            transfer.pulls.discard(pull)

    async def _pull(self, request: pb.PullBlocksRequest, ids: array[int], context: Context) -> None:
        group, store = request.group, self._store
        size = store.block_bytes[group]
        limit = CHECKSUMS_ONLY_BYTES if request.checksums_only else MESSAGE_BYTES
        step = max(1, min(MESSAGE_BLOCKS_MAX, limit // max(1, size)))
        summed = _Summed(partial(self._summed, request.transfer_id))
        with contextlib.closing(StallWatch(context, self._stall_seconds)) as watch:
            for first in range(0, len(ids), step):
                some = ids[first : first + step]
                data_bytes = 0 if request.checksums_only else len(some) * size
                if delay := self._bucket.delay(data_bytes):
                    await asyncio.sleep(delay)
                store.check()
                blocks = store.blocks(group, some)
                sums = []
                if request.checksums or request.checksums_only:
                    sums = [checksum(pages) for pages in blocks]
                    summed.add(some, sums)
                pages = (
                    [] if request.checksums_only else [page for block in blocks for page in block]
                )
                message = frame(first, len(some), pages, sums)
                await watch.write(message)
                self.num_sent_bytes += data_bytes
        summed.tell()

    async def _transfer(self, transfer_id: str) -> _Transfer:
        """The node's word of it may come after the peer's, who heard of it from the node."""
        if transfer_id not in self._transfers and len(transfer_id) <= _ID_CHARACTERS_MAX:
            answered = self._asked.get(transfer_id)
            if answered is None:
                answered = asyncio.get_running_loop().create_future()
                self._asked[transfer_id] = answered
                self._ask(transfer_id)
            await asyncio.shield(answered)
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            raise _unknown("there is no such transfer, or it has ended")
        return transfer

    def _answered(self, transfer_id: str) -> None:
        asked = self._asked.pop(transfer_id, None)
        if asked is not None:
            asked.set_result(None)

    def _ids(self, transfer: _Transfer, request: pb.PullBlocksRequest) -> array[int]:
        ids = transfer.groups.get(request.group)
        if ids is None:
            raise InvalidArgument(f"the transfer has no group {request.group}", field="group")
        if not request.positions:
            return array("I", filter(None, ids))
        if len(request.positions) % 4:
            raise InvalidArgument("positions are uint32, four bytes each", field="positions")
        positions = struct.unpack(f"<{len(request.positions) // 4}I", request.positions)
        if len(positions) > len(ids):
            raise InvalidArgument("there are more positions than blocks", field="positions")
        chosen = array("I")
        for position in positions:
            if position >= len(ids) or not ids[position]:
                raise InvalidArgument(
                    f"at position {position} there is no ready block", field="positions"
                )
            chosen.append(ids[position])
        return chosen


class _Summed:
    """Checksums of one pull, told together: each message costs the node."""

    def __init__(self, tell: Callable[[Sequence[int], Sequence[int]], None]) -> None:
        self._tell = tell
        self._ids: list[int] = []
        self._sums: list[int] = []

    def add(self, block_ids: Sequence[int], sums: Sequence[int]) -> None:
        self._ids += block_ids
        self._sums += sums
        if len(self._ids) >= _SUMS_MAX:
            self.tell()

    def tell(self) -> None:
        if self._ids:
            self._tell(self._ids, self._sums)
            self._ids, self._sums = [], []


def _closed() -> NotFound:
    return _unknown("the transfer was closed")


def _unknown(message: str) -> NotFound:
    return NotFound(message, reason="UNKNOWN_TRANSFER", field="transfer_id")


async def _serve(channel: Channel, start: Message) -> None:
    loop = asyncio.get_running_loop()
    store = open_store(types_pb2.PoolDescription.FromString(start["pool"]))
    serving = Serving(
        start,
        store,
        lambda transfer_id: channel.send(op="ask", id=transfer_id),
        lambda transfer_id, ids, sums: channel.send(
            op="sums", id=transfer_id, ids=list(ids), sums=list(sums)
        ),
    )
    rpcs = Rpcs("", streams_max=start["streams_max"])
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", start["message_bytes_max"]),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_allowed_incoming_connections", start["connections_max"]),
            # Else whoever connects and asks nothing could keep the others out.
            ("grpc.max_connection_idle_ms", start["connection_idle_ms"]),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_time_ms", 40_000),
            ("grpc.keepalive_timeout_ms", 20_000),
        ]
    )
    pull = rpcs.server_stream("PullBlocks", pb.PullBlocksRequest, serving.pull_blocks)
    register(server, SERVICE, {"PullBlocks": pull})
    port = _bind(server, start["host"], start["port"], start["any_port"])
    if port is None:
        channel.send(op="failed", message=f"cannot bind {start['host']}:{start['port']}")
        return
    await server.start()
    channel.send(op="ready", port=port)

    def listen() -> None:
        while True:
            loop.call_soon_threadsafe(serving.tell, channel.receive())

    listening = loop.run_in_executor(None, listen)

    async def offer() -> None:
        if (offered := await serving.offer_nixl(start["nixl_devices"])) is not None:
            channel.send(op="nixl", **offered)
        channel.send(op="complete")

    # Peers are served while it is loaded, which takes a second.
    offering = asyncio.ensure_future(offer())
    heartbeat_seconds: float = start["heartbeat_seconds"]
    pause = min(_REPORT_SECONDS, heartbeat_seconds)
    reported, said_at = 0, loop.time()
    while not listening.done():
        await asyncio.sleep(pause)
        if offering.done():
            offering.result()
        num_bytes = serving.num_sent_bytes - reported
        # Saying that nothing was sent says that it lives; and early, as the node counts.
        if num_bytes or loop.time() - said_at > heartbeat_seconds / 2:
            channel.send(op="pulled", bytes=num_bytes)
            reported, said_at = reported + num_bytes, loop.time()
    listening.result()


def _bind(server: Any, host: str, port: int, any_port: bool) -> int | None:
    """The port, another one if need be and allowed."""
    for candidate in (port, 0) if any_port and port else (port,):
        with contextlib.suppress(RuntimeError):
            bound: int = server.add_insecure_port(
                f"[{host}]:{candidate}" if ":" in host else f"{host}:{candidate}"
            )
            if bound:
                return bound
    return None


def main() -> None:
    """Serve until the node is gone."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    channel = Channel(int(sys.argv[1]))
    uvloop.run(_serve(channel, channel.receive()))


if __name__ == "__main__":
    main()
