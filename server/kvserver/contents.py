"""What is known of a block besides its bytes: to the wire, for peers, and from it."""

from __future__ import annotations

from typing import Any

from kvcore.block_pool import BlockPool
from kvcore.errors import ResourceExhausted
from kvcore.feed import StoredRun
from kvcore.import_job import ImportedContent
from kvcore.transfer import TransferGroup
from kvdepot.v1 import event_pb2
from kvdepot.v1 import transfer_pb2 as pb
from kvserver import convert

# Of a ready block's, beside its tokens: hashes, what its group says.
_CONTENT_BYTES = 160


def add_contents(
    answer: pb.GroupBlocks, pool: BlockPool, group: TransferGroup, *, max_bytes: int
) -> int:
    """Of the ready blocks of one group of a transfer, in order.

    Empty of a block of which nothing is told: a peer does not register it. Answers the bytes
    of the whole ``answer``, about; ResourceExhausted if that is more than ``max_bytes``.
    """
    add, num_bytes = answer.contents.add, answer.ByteSize()
    last: StoredRun | None = None
    of_run = event_pb2.BlockStored()
    for block, block_hash in zip(group.blocks, group.hashes, strict=True):
        if num_bytes > max_bytes:
            break
        if block is None:
            continue
        num_bytes += _CONTENT_BYTES
        content = add()
        extra = pool.extras.get(block.block_id)
        if extra is not None and extra.cache_salt is not None:
            content.cache_salt = extra.cache_salt
        run, position = pool.partial.content(block, block_hash)
        if run is None:
            continue
        stored = content.stored
        if run.extra_keys is not None:
            stored.CopyFrom(convert.block_stored(run.event(position)))
            num_bytes += content.ByteSize()
        else:
            if run is not last:
                # What is the same for all its blocks, as one of them has it.
                last, of_run = run, convert.block_stored(run.event(position))
                for field in ("block_hashes", "parent_block_hash", "token_ids"):
                    of_run.ClearField(field)
            stored.CopyFrom(of_run)
            stored.block_hashes.append(block_hash)
            parent_hash = run.parent_of(position)
            if parent_hash is not None:
                stored.parent_block_hash = parent_hash
            stored.token_ids = run.tokens_of(position)
            num_bytes += len(stored.token_ids)
    if num_bytes > max_bytes:
        raise ResourceExhausted(
            "the blocks' contents are larger than a message may be (--max-message-bytes): "
            "open transfers of fewer blocks, one after the other",
            reason="CONTENTS_TOO_LARGE",
            field="contents",
        )
    return num_bytes


def too_many_contents(num_blocks: int, maximum: int) -> ResourceExhausted:
    """Of more blocks than are told in one call, during which all others wait."""
    return ResourceExhausted(
        f"the contents of {num_blocks} blocks are more than {maximum} at a time "
        "(--max-transfer-contents): open transfers of fewer blocks, one after the other, or "
        "leave out contents",
        reason="TOO_MANY_CONTENTS",
        field="contents",
    )


def imported_content(message: pb.BlockContent, block_hash: bytes) -> ImportedContent | None:
    """What a peer says of a block; None if it is of another one, or nothing."""
    stored = message.stored
    hashes = stored.block_hashes
    if len(hashes) != 1 or hashes[0] != block_hash:
        return None
    keys = stored.extra_keys[0].keys if stored.extra_keys else ()
    return ImportedContent(
        # An empty one is of no block: not the start of a chain, as none at all is.
        stored.parent_block_hash if stored.HasField("parent_block_hash") else None,
        stored.token_ids,
        tuple(map(_extra_key, keys)) or None if keys else None,
        stored.lora_id if stored.HasField("lora_id") else None,
        stored.lora_name or None,
        message.cache_salt or None,
    )


def _extra_key(message: event_pb2.ExtraKey) -> Any:
    kind = message.WhichOneof("key")
    if kind == "multimodal":
        return message.multimodal.identifier, message.multimodal.offset
    return message.digest if kind == "digest" else message.text
