"""KVEventService: what routers follow."""

from __future__ import annotations

import asyncio

from kvdepot.v1 import event_pb2 as pb
from kvserver.node import Node
from kvserver.rpc import Context, Handler, Rpcs

# Between two snapshots, each of which takes some hundred milliseconds of a large pool.
_TURN_SECONDS = 0.02

SERVICE = pb.DESCRIPTOR.services_by_name["KVEventService"].full_name


class EventService:
    """Streams the publisher's feed."""

    def __init__(self, node: Node, rpcs: Rpcs) -> None:
        self._node = node
        self._rpcs = rpcs
        self._turns = asyncio.Lock()

    def handlers(self) -> dict[str, Handler]:
        """The service's methods by name."""
        stream = self._rpcs.server_stream
        return {"StreamEvents": stream("StreamEvents", pb.StreamEventsRequest, self._stream)}

    async def _stream(self, request: pb.StreamEventsRequest, context: Context) -> None:
        publisher = self._node.publisher
        if request.snapshot:
            await self._turn()
        # Subscribing and the snapshot are one synchronous section: no event falls between.
        subscriber, first = publisher.subscribe(
            epoch=request.epoch,
            from_sequence=request.from_sequence if request.HasField("from_sequence") else None,
            fresh=request.snapshot,
        )
        try:
            if request.snapshot:
                first = publisher.snapshot_messages(self._node.depot.snapshot())
            await context.send_initial_metadata(())
            for message in first:
                await context.write(message)
            while True:
                await context.write(await subscriber.next())
        finally:
            publisher.unsubscribe(subscriber)

    async def _turn(self) -> None:
        """Between two snapshots all that waits is answered, however many are asked for at once."""
        async with self._turns:
            await asyncio.sleep(_TURN_SECONDS)
