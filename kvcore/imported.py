"""What an import of hashes has brought becomes hits for everybody."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvcore.block import KVCacheBlock
from kvcore.block_pool import BlockPool
from kvcore.content_run import ContentRun
from kvcore.feed import RUN_BLOCKS_MAX
from kvcore.hashing import ExtraKeys
from kvcore.import_job import Import, ImportGroup, ImportStatus
from kvcore.request import TOKEN_BYTES
from kvcore.spec import FullAttentionSpec

if TYPE_CHECKING:
    from kvcore.depot import Depot

# Plain numbers, as a status of each block is compared.
_IMPORTED, _PRESENT = int(ImportStatus.IMPORTED), int(ImportStatus.PRESENT)
_FAILED, _NOT_ATTEMPTED = int(ImportStatus.FAILED), int(ImportStatus.NOT_ATTEMPTED)


def register_imported(
    depot: Depot,
    found: Import,
    group: ImportGroup,
    came: Sequence[int],
    contents: Sequence[ContentRun],
) -> None:
    """Register what came, each block if its parent is here; ``contents`` are those of ``came``,
    in order. Nothing after a reset.
    """
    config = depot.config
    spec = config.kv_cache.groups[group.group].manager_spec
    block_size = spec.block_size * config.context_parallel_size
    at = 0
    for content in contents:
        numbers = came[at : at + content.num_blocks]
        at += len(numbers)
        is_told = (
            len(content.tokens) == content.num_blocks * block_size * TOKEN_BYTES
            and len(numbers) == content.num_blocks
            and found.generation == depot.generation
        )
        if is_told:
            needs_parents = isinstance(spec, FullAttentionSpec)
            _register_run(
                depot.pool, group, numbers, content, block_size, needs_parents=needs_parents
            )
        else:
            _fail(group, numbers)
    _fail(group, came[at:])


def _register_run(
    pool: BlockPool,
    group: ImportGroup,
    numbers: Sequence[int],
    content: ContentRun,
    block_size: int,
    *,
    needs_parents: bool,
) -> None:
    index = pool.indexes[group.group]
    entries = index.entries
    hashes, statuses, blocks = group.hashes, group.statuses, group.blocks
    extra = None
    if content.lora_name is not None or content.cache_salt is not None:
        extra = ExtraKeys(lora_name=content.lora_name, cache_salt=content.cache_salt)
    # Those that were registered, one after the other, and where in the run they began.
    fresh: list[KVCacheBlock] = []
    fresh_hashes: list[bytes] = []
    start = 0
    parent_hash = told_parent = content.parent_hash
    has_parent = (
        not needs_parents or parent_hash is None or index.ready_copy(parent_hash) is not None
    )

    def tell() -> None:
        if pool.publish_events and fresh:
            pool.truth_feed.keep_imported(
                fresh,
                fresh_hashes,
                content,
                start,
                parent_hash=told_parent,
                block_size=block_size,
                group=group.group,
            )
        pool.pins.filling.difference_update([block.block_id for block in fresh])

    for offset, number in enumerate(numbers):
        block_hash, block = hashes[number], blocks[number]
        if statuses[number] or block is None:
            statuses[number] = statuses[number] or _FAILED
        elif not has_parent:
            statuses[number] = _NOT_ATTEMPTED
            assert parent_hash is not None
            group.absent[parent_hash] = None
        elif block_hash in entries and index.ready_copy(block_hash) is not None:
            statuses[number] = _PRESENT  # another has brought it meanwhile
        else:
            if len(fresh) == RUN_BLOCKS_MAX or (fresh and start + len(fresh) != offset):
                tell()
                fresh, fresh_hashes = [], []
            if not fresh:
                start, told_parent = offset, parent_hash
            block.block_hash = block_hash
            block.group = group.group
            statuses[number] = _IMPORTED
            # The first copy is the usual case, which costs no call.
            if entries.setdefault(block_hash, block) is not block:
                index.insert(block_hash, block)
            if extra is not None:
                pool.extras[block.block_id] = extra
            fresh.append(block)
            fresh_hashes.append(block_hash)
            parent_hash = block_hash
            has_parent = True
            continue
        parent_hash = block_hash
        has_parent = not needs_parents or index.ready_copy(block_hash) is not None
    tell()


def _fail(group: ImportGroup, numbers: Iterable[int]) -> None:
    for number in numbers:
        group.statuses[number] = group.statuses[number] or _FAILED
