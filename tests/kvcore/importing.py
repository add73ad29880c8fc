"""Imports as tests tell of them: block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvcore.content_run import ContentRun
from kvcore.depot import Depot
from kvcore.import_job import Filled, Import, ImportResult, ImportStatus


class Entry(NamedTuple):
    """How it went with one block; of an imported one, what is known of it, a run of one."""

    status: ImportStatus
    content: ContentRun | None = None


def filled(hashes: Sequence[bytes], entries: Sequence[Entry], first: int = 0) -> Filled:
    """What ``hashes`` from ``first`` on came to; what follows each other is one run."""
    runs: list[ContentRun] = []
    last_hash = b""
    for block_hash, entry in zip(hashes[first:], entries, strict=False):
        if entry.status is not ImportStatus.IMPORTED:
            continue
        content = entry.content or ContentRun(1, None, b"")
        last = runs[-1] if runs else None
        if (
            last is not None
            and content.parent_hash == last_hash
            and (content.lora_name, content.cache_salt) == (last.lora_name, last.cache_salt)
        ):
            runs[-1] = last._replace(
                num_blocks=last.num_blocks + 1, tokens=last.tokens + content.tokens
            )
        else:
            runs.append(content)
        last_hash = block_hash
    return Filled(first, bytes(entry.status for entry in entries), runs)


def filled_runs(hashes: Sequence[bytes], contents: Sequence[ContentRun], first: int = 0) -> Filled:
    """The hashes from ``first`` on have come, with these contents."""
    entries = [Entry(ImportStatus.IMPORTED, content) for content in contents]
    return filled(hashes, entries, first)


def finish(
    depot: Depot, found: Import, entries: Mapping[int, Sequence[Entry]] | None
) -> ImportResult:
    """All comes at once, or nothing: None."""
    if entries is not None:
        told = {
            group.group: filled(group.wanted()[0], entries[group.group])
            for group in found.groups
            if group.group in entries
        }
        depot.imports.fill(found, told)
    return depot.imports.finish(found)
