"""What the interpreter needs of a cache manager beyond the names both sides share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol


class Backend(Protocol):
    """One side: how to make, change and read what the two managers name differently."""

    manager: Any

    def describe(self) -> dict[str, Any]:
        """What the configuration came to: block sizes, and of each group its kind and sizes."""

    def make_request(
        self,
        request_id: str,
        tokens: list[int],
        *,
        lora: tuple[str, int] | None,
        salt: str | None,
        skip_reading: bool,
    ) -> Any: ...

    def append(self, request: Any, tokens: list[int]) -> None: ...

    def set_status(self, request: Any, name: str) -> None: ...

    def return_blocks(self, blocks: list[Any]) -> None: ...

    def hits_per_group(self, request: Any) -> tuple[Any, list[int]]:
        """Every group's own longest hit: KVCacheBlocks, and tokens by group."""

    def num_uncached_common_prefix_tokens(self) -> int:
        """Of the last lookup; 0 where no coordinator counts them."""

    def cache_partial_block(
        self, request: Any, block: Any, num_tokens: int, group: int
    ) -> str | None:
        """The hash, in hex, under which ``block`` can be found now."""

    def remaining_blocks(self, request: Any) -> int:
        """What the request would still take, held against its admission caps."""

    def free_queue(self) -> list[int]: ...

    def blocks(self) -> tuple[list[int], list[str | None]]:
        """Every block's reference count, the null block's as 0, and its hashes with their group."""

    def events(self) -> list[list[Any]]: ...

    def stats(self) -> list[int] | None: ...

    def violations(self) -> list[str]: ...


HASH_BYTES_SHOWN = 6


def hash_names(block_hash: bytes, group: int, others: Collection[bytes]) -> str:
    """A block's hashes as one short string: the first, then the other ones in order."""
    name = f"{group}:{block_hash[:HASH_BYTES_SHOWN].hex()}"
    if others:
        name = "+".join((name, *sorted(other[:HASH_BYTES_SHOWN].hex() for other in others)))
    return name


def sort_removals(events: list[list[Any]]) -> list[list[Any]]:
    """Events with every run of removals in one order.

    A block with several hashes loses them in no particular order.
    """
    ordered: list[list[Any]] = []
    run: list[list[Any]] = []
    for event in events:
        if event[0] == "removed":
            run.append(event)
        else:
            ordered += [*sorted(run), event]
            run = []
    return ordered + sorted(run)


def stats_column(stats: Any) -> list[int] | None:
    """PrefixCacheStats, whose names both sides share."""
    if stats is None:
        return None
    return [
        stats.requests,
        stats.queries,
        stats.hits,
        stats.preempted_requests,
        stats.preempted_queries,
        stats.preempted_hits,
        int(stats.reset),
    ]
