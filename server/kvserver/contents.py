"""What is known of a block besides its bytes: to the wire, for peers, and from it."""

from __future__ import annotations

from typing import Any

from kvcore.block_pool import BlockPool
from kvcore.import_job import ImportedContent
from kvcore.transfer import TransferGroup
from kvdepot.v1 import event_pb2
from kvdepot.v1 import transfer_pb2 as pb
from kvserver import convert


def block_contents(pool: BlockPool, group: TransferGroup) -> list[pb.BlockContent]:
    """Of the ready blocks of one group of a transfer, in order.

    Empty of a block of which nothing is told: a peer does not register it.
    """
    contents = []
    for block, block_hash in zip(group.blocks, group.hashes, strict=True):
        if block is None:
            continue
        content = pb.BlockContent(cache_salt=pool.extra_of(block).cache_salt)
        stored = pool.partial.stored_event(block, block_hash)
        if stored is not None:
            content.stored.CopyFrom(convert.block_stored(stored))
        contents.append(content)
    return contents


def imported_content(message: pb.BlockContent, block_hash: bytes) -> ImportedContent | None:
    """What a peer says of a block; None if it is of another one, or nothing."""
    stored = message.stored
    has = stored.HasField
    if list(stored.block_hashes) != [block_hash]:
        return None
    keys = stored.extra_keys[0].keys if stored.extra_keys else ()
    return ImportedContent(
        parent_hash=stored.parent_block_hash if has("parent_block_hash") else None,
        tokens=stored.token_ids,
        extra_keys=tuple(map(_extra_key, keys)) or None,
        lora_id=stored.lora_id if has("lora_id") else None,
        lora_name=stored.lora_name if has("lora_name") else None,
        cache_salt=message.cache_salt if message.HasField("cache_salt") else None,
    )


def _extra_key(message: event_pb2.ExtraKey) -> Any:
    kind = message.WhichOneof("key")
    if kind == "multimodal":
        return message.multimodal.identifier, message.multimodal.offset
    return message.digest if kind == "digest" else message.text
