"""One import: what it asks for, which blocks it fills, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from kvcore.block import KVCacheBlock
from kvcore.content_run import ContentRun
from kvcore.request import Request

if TYPE_CHECKING:
    from kvcore.session import Session


class ImportStatus(IntEnum):
    """How it went with one block. Numbers are the wire's, where 0 is not used.

    PRESENT: it was here already. PENDING, MISSING: at the peer. NO_FIT: no block is free
    for it. NOT_ATTEMPTED: it is behind one that is not here.
    """

    RUNNING = 0
    IMPORTED = 1
    PRESENT = 2
    PENDING = 3
    MISSING = 4
    FAILED = 5
    NO_FIT = 6
    NOT_ATTEMPTED = 7


class Filled(NamedTuple):
    """Of the hashes of a group that a peer is asked for, from ``first`` on: how it went.

    ``statuses`` are IMPORTED, PENDING, MISSING or FAILED. ``contents``, of the imported ones
    in order, are needed unless the import is for a request.
    """

    first: int
    statuses: bytes
    contents: Sequence[ContentRun] = ()


class Ready(NamedTuple):
    """Of the hashes of a group that a peer is asked for, from ``first`` on: which it has."""

    first: int
    is_ready: Sequence[int]


@dataclass(slots=True, eq=False)
class ImportGroup:
    """Blocks of one group. ``blocks``: those that are filled, and those that were here."""

    group: int
    hashes: Sequence[bytes]
    # Of a request: where in its table they are; of hashes: in their list.
    positions: Sequence[int]
    # Of ImportStatus, one a hash.
    statuses: bytearray
    blocks: list[KVCacheBlock | None]
    # Which of the hashes the peer is asked for.
    asked: Sequence[int]
    # Parents of blocks that were not attempted, in order.
    absent: dict[bytes, None] = field(default_factory=dict)

    @property
    def running(self) -> list[int]:
        """Which of ``hashes`` are being imported."""
        return [i for i, status in enumerate(self.statuses) if not status]

    def wanted(self) -> tuple[list[bytes], list[int]]:
        """The hashes that the peer is asked for, and the ids of their blocks, 0 for none yet."""
        hashes, blocks = list(self.hashes), self.blocks
        if len(self.asked) < len(hashes):
            hashes = [self.hashes[i] for i in self.asked]
            blocks = [self.blocks[i] for i in self.asked]
        return hashes, [0 if block is None else block.block_id for block in blocks]


@dataclass(slots=True, eq=False)
class Import:
    """One import that runs. ``peer``: where from; ``request`` None: of hashes."""

    import_id: str
    peer: str
    groups: Sequence[ImportGroup]
    generation: int
    session: Session | None = None
    request: Request | None = None
    # Of a request: its tokens, those computed elsewhere included.
    num_tokens: int = 0

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """The blocks it pins, group by group."""
        return [block for group in self.groups for block in group.blocks if block is not None]

    @property
    def filling(self) -> list[KVCacheBlock]:
        """The blocks in which bytes may land, or have and are nobody's yet."""
        return [
            block
            for group in self.groups
            for block, status in ((group.blocks[i], group.statuses[i]) for i in group.asked)
            # What was registered stays so when its content is dropped.
            if block is not None and (self.request is not None or status != ImportStatus.IMPORTED)
        ]


class ImportResult(NamedTuple):
    """Of an import: one status a hash, by group. ``num_tokens``: of a request, its leading
    tokens whose bytes are here and verified in all groups. ``missing_parents``, by group: of
    hashes that are NOT_ATTEMPTED, the first 64 parents that are not here and were not asked for.
    """

    statuses: dict[int, bytes]
    num_tokens: int
    missing_parents: Mapping[int, Sequence[bytes]]
