"""The event stream: its request, its messages read, and iterating over it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from kvclient.convert import uint64
from kvclient.convert_pool import SPEC_KINDS
from kvclient.errors import InternalError, from_rpc_error
from kvclient.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from kvdepot.v1 import event_pb2

_REMOVAL_REASONS = {
    event_pb2.REMOVAL_REASON_EVICTED: "evicted",
    event_pb2.REMOVAL_REASON_RESET: "reset",
}


class Stream:
    """What happens to the index, to iterate over; ``close`` ends it early."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._batches = self._read()

    def __iter__(self) -> Iterator[EventBatch]:
        return self

    def __next__(self) -> EventBatch:
        return next(self._batches)

    def _read(self) -> Iterator[EventBatch]:
        try:
            for message in self._call:
                yield batch(message)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def close(self) -> None:
        """Ends the stream; whoever waits for its next item gets Cancelled."""
        self._call.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def request(from_sequence: int | None, epoch: str, snapshot: bool) -> event_pb2.StreamEventsRequest:
    """StreamEvents, from a sequence, or from now on."""
    return event_pb2.StreamEventsRequest(
        epoch=epoch,
        from_sequence=None if from_sequence is None else uint64(from_sequence, "from_sequence"),
        snapshot=snapshot,
    )


def batch(message: event_pb2.StreamEventsResponse) -> EventBatch:
    """One message of the event stream."""
    return EventBatch(
        epoch=message.epoch,
        first_sequence=message.first_sequence,
        timestamp_seconds=message.timestamp_seconds,
        events=tuple([_event(item) for item in message.events]),
        snapshot=message.snapshot,
        snapshot_end=message.snapshot_end,
    )


def _event(message: event_pb2.Event) -> Event:
    """One event. InternalError for a kind that this client does not know."""
    kind = message.WhichOneof("event")
    if kind == "block_stored":
        return _block_stored(message.block_stored)
    if kind == "block_removed":
        removed = message.block_removed
        return BlockRemoved(
            tuple(removed.block_hashes),
            removed.group,
            removed.medium,
            _REMOVAL_REASONS.get(removed.reason, "unknown"),
        )
    if kind == "all_blocks_cleared":
        return AllBlocksCleared(message.all_blocks_cleared.generation)
    raise InternalError("an event of an unknown kind", reason="UNKNOWN_EVENT")


def _block_stored(stored: event_pb2.BlockStored) -> BlockStored:
    has = stored.HasField
    return BlockStored(
        block_hashes=tuple(stored.block_hashes),
        parent_block_hash=stored.parent_block_hash if has("parent_block_hash") else None,
        token_ids=stored.token_ids,
        block_size=stored.block_size,
        lora_id=stored.lora_id if has("lora_id") else None,
        lora_name=stored.lora_name if has("lora_name") else None,
        extra_keys=tuple(
            tuple([_extra_key(key) for key in keys.keys]) for keys in stored.extra_keys
        ),
        group=stored.group,
        spec_kind=SPEC_KINDS.get(stored.spec_kind, "unknown"),
        medium=stored.medium,
        sliding_window=stored.sliding_window if has("sliding_window") else None,
    )


def _extra_key(key: event_pb2.ExtraKey) -> Any:
    if key.WhichOneof("key") == "multimodal":
        return key.multimodal.identifier, key.multimodal.offset
    return key.digest if key.WhichOneof("key") == "digest" else key.text
