"""The truth feed's events on the wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvcore.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvdepot.v1 import event_pb2
from kvserver.convert_pool import spec_kind

_REMOVAL_REASONS = {
    "evicted": event_pb2.REMOVAL_REASON_EVICTED,
    "reset": event_pb2.REMOVAL_REASON_RESET,
}


def event(value: Event) -> event_pb2.Event:
    """One event of the truth feed."""
    if isinstance(value, BlockStored):
        return event_pb2.Event(block_stored=block_stored(value))
    if isinstance(value, BlockRemoved):
        removed = event_pb2.BlockRemoved(
            block_hashes=value.block_hashes,
            group=value.group,
            medium=value.medium,
            reason=_REMOVAL_REASONS.get(value.reason, event_pb2.REMOVAL_REASON_UNSPECIFIED),
        )
        return event_pb2.Event(block_removed=removed)
    assert isinstance(value, AllBlocksCleared)
    cleared = event_pb2.AllBlocksCleared(generation=value.generation)
    return event_pb2.Event(all_blocks_cleared=cleared)


def block_stored(value: BlockStored) -> event_pb2.BlockStored:
    """One block, or several, that became readable."""
    message = event_pb2.BlockStored(
        block_hashes=value.block_hashes,
        parent_block_hash=value.parent_block_hash,
        token_ids=value.token_ids,
        block_size=value.block_size,
        lora_id=value.lora_id,
        lora_name=value.lora_name,
        group=value.group,
        spec_kind=spec_kind(value.spec_kind),
        medium=value.medium,
        sliding_window=value.sliding_window,
    )
    if value.extra_keys is not None:
        for keys in value.extra_keys:
            message.extra_keys.append(extra_key_list(keys or ()))
    return message


def extra_key_list(keys: Iterable[Any]) -> event_pb2.ExtraKeyList:
    """Of one block."""
    message = event_pb2.ExtraKeyList()
    for key in keys:
        if isinstance(key, str):
            message.keys.add(text=key)
        elif isinstance(key, bytes):
            message.keys.add(digest=key)
        else:
            message.keys.add().multimodal.CopyFrom(
                event_pb2.MultimodalKey(identifier=key[0], offset=key[1])
            )
    return message
