"""What is known of blocks besides their bytes: to the wire, for peers, and from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from kvcore.block_pool import BlockPool
from kvcore.content_run import ContentRun, content_runs
from kvcore.errors import ResourceExhausted
from kvcore.transfer import TransferGroup
from kvdepot.v1 import event_pb2
from kvdepot.v1 import transfer_pb2 as pb
from kvserver.convert_event import extra_key_list


def add_contents(
    answer: pb.GroupBlocks, pool: BlockPool, group: TransferGroup, *, max_bytes: int
) -> int:
    """Of the ready blocks of one group of a transfer, in order.

    Nothing is told of blocks of which nothing is known: a peer does not register them. Answers
    the bytes of the whole ``answer``, about; ResourceExhausted if that is more than ``max_bytes``.
    """
    num_bytes = answer.ByteSize()
    runs = content_runs(pool, group.blocks, group.hashes)
    while num_bytes <= max_bytes and (run := next(runs, None)) is not None:
        message = content_message(run)
        num_bytes += message.ByteSize()
        answer.contents.append(message)
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


def content_message(run: ContentRun) -> pb.ContentRun:
    """A run, as it travels."""
    message = pb.ContentRun(
        num_blocks=run.num_blocks,
        parent_hash=run.parent_hash,
        token_ids=run.tokens,
        lora_id=run.lora_id,
        lora_name=run.lora_name,
        cache_salt=run.cache_salt,
    )
    first = 0
    for keys, blocks in groupby(run.extra_keys or ()):
        count = sum(1 for _ in blocks)
        if keys:
            told = message.extra_keys.add(first=first, num_blocks=count)
            told.keys.CopyFrom(extra_key_list(keys))
        first += count
    return message


def content_run(message: pb.ContentRun) -> ContentRun:
    """A run as a peer has told it, whose shape ``misfit`` has seen."""
    extra_keys: list[tuple[Any, ...] | None] | None = None
    if message.extra_keys:
        extra_keys = [None] * message.num_blocks
        for told in message.extra_keys:
            keys = tuple(map(_extra_key, told.keys.keys)) or None
            extra_keys[told.first : told.first + told.num_blocks] = [keys] * told.num_blocks
    return ContentRun(
        message.num_blocks,
        # An empty one is of no block: not the start of a chain, as none at all is.
        message.parent_hash if message.HasField("parent_hash") else None,
        message.token_ids,
        extra_keys,
        message.lora_id if message.HasField("lora_id") else None,
        message.lora_name or None,
        message.cache_salt or None,
    )


def num_told(runs: Iterable[pb.ContentRun]) -> int:
    """Of how many blocks."""
    return sum(run.num_blocks for run in runs)


def misfit(runs: Sequence[pb.ContentRun], num_blocks: int, block_token_bytes: int) -> str:
    """Why ``runs`` cannot be what is known of so many ready blocks; empty: they can."""
    told = num_told(runs)
    if told != num_blocks or not all(run.num_blocks for run in runs):
        return f"contents are of {told} blocks, {num_blocks} are ready"
    for run in runs:
        if run.token_ids and len(run.token_ids) != run.num_blocks * block_token_bytes:
            return (
                f"contents.token_ids are {len(run.token_ids)} bytes for {run.num_blocks} blocks "
                f"of {block_token_bytes}"
            )
        end = 0
        for keys in run.extra_keys:
            if keys.first < end or not keys.num_blocks:
                return "contents.extra_keys do not ascend"
            end = keys.first + keys.num_blocks
        if end > run.num_blocks:
            return "contents.extra_keys are of more blocks than the run has"
    return ""


def chosen(
    runs: Iterable[pb.ContentRun], hashes: Sequence[bytes], is_chosen: Sequence[bool]
) -> list[pb.ContentRun]:
    """The runs of some of the blocks, whose ``hashes`` these are, in order.

    A block behind one that is left out begins a run, with its parent's hash.
    """
    found = []
    at = 0
    for run in runs:
        stop = at + run.num_blocks
        if all(is_chosen[at:stop]):
            found.append(run)
        else:
            first = 0
            for kept, blocks in groupby(is_chosen[at:stop]):
                count = sum(1 for _ in blocks)
                if kept:
                    parent = hashes[at + first - 1] if first else None
                    found.append(_part(run, first, count, parent))
                first += count
        at = stop
    return found


def _part(
    run: pb.ContentRun, first: int, num_blocks: int, parent_hash: bytes | None
) -> pb.ContentRun:
    """``num_blocks`` of a run from ``first`` on, the child of ``parent_hash`` unless that is 0."""
    part = pb.ContentRun()
    part.CopyFrom(run)
    part.num_blocks = num_blocks
    if first and run.token_ids:
        assert parent_hash is not None
        part.parent_hash = parent_hash
    block_bytes = len(run.token_ids) // run.num_blocks
    part.token_ids = run.token_ids[first * block_bytes : (first + num_blocks) * block_bytes]
    del part.extra_keys[:]
    for keys in run.extra_keys:
        begin, end = max(keys.first, first), min(keys.first + keys.num_blocks, first + num_blocks)
        if begin < end:
            told = part.extra_keys.add(first=begin - first, num_blocks=end - begin)
            told.keys.CopyFrom(keys.keys)
    return part


def _extra_key(message: event_pb2.ExtraKey) -> Any:
    kind = message.WhichOneof("key")
    if kind == "multimodal":
        return message.multimodal.identifier, message.multimodal.offset
    return message.digest if kind == "digest" else message.text
