"""What the node and the process that moves its bytes say to each other.

The node's event loop serves schedulers and touches no bulk bytes. A process of its own
maps the pool, serves PullBlocks to peers, keeps the NIXL agent that peers read from,
and runs imports. It knows no hashes, sessions or requests: the node tells it which
blocks an open transfer has, and which blocks an import fills.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcore.import_job import Ready
from kvdepot.v1 import transfer_pb2 as pb


@dataclass(frozen=True, slots=True)
class ImportGroup:
    """Blocks of one KV cache group: which hashes go into which blocks of this pool.

    Ids are 0 where ImportJob.take is to be asked for them.
    """

    group: int
    hashes: Sequence[bytes]
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ImportJob:
    """One import. ``paths``: those allowed, in order; empty: all, the best first.

    ``contents``: bring what is known of the blocks besides their bytes. ``take``: called
    with what the peer has ready, by group, part by part; answers the ids of the blocks to
    fill, one a hash of the part, 0 for one that gets none, or None: the import is to end with
    what has come. A ``take`` of None: they are named already.
    """

    peer: str
    fingerprint: str
    groups: Sequence[ImportGroup]
    paths: Sequence[pb.TransferPath]
    checksums: bool
    contents: bool
    deadline_seconds: float
    take: Callable[[Mapping[int, Ready]], Mapping[int, Sequence[int]] | None] | None = None


@dataclass(frozen=True, slots=True)
class ImportProgress:
    """So far. ``path`` is the one in use."""

    num_blocks: int
    num_bytes: int
    path: pb.TransferPath


@dataclass(frozen=True, slots=True)
class ImportPart:
    """What some of the hashes have come to; no byte lands in their blocks any more.

    ``first``: the first of them, by group; ``statuses``, one a hash: IMPORTED if its bytes are
    in its block, verified and valid (the peer answered OK to CloseTransfer); else PENDING,
    MISSING or FAILED. ``contents`` by group, of imported blocks in order, if they were asked for.
    """

    first: Mapping[int, int]
    statuses: Mapping[int, bytes]
    contents: Mapping[int, Sequence[pb.ContentRun]]


@dataclass(frozen=True, slots=True)
class ImportReport:
    """How an import ended. What no part told of has failed. ``failures`` of paths tried."""

    num_blocks: int
    num_bytes: int
    path: pb.TransferPath
    failures: Sequence[pb.PathFailure]


ImportNews = ImportProgress | ImportPart | ImportReport


class DataPlane(Protocol):
    """The node's side of the process that moves bytes."""

    pulled_bytes: int
    """Of blocks, sent by PullBlocks so far."""

    on_summed: Callable[[str, Sequence[int], Sequence[int]], None]
    """Called with checksums that were computed under a transfer: its id, block ids, their sums."""

    async def start(self) -> None:
        """Start the process, and wait until it can be reached. It is restarted if it dies."""

    async def close(self) -> None:
        """End the process; nothing of it is left."""

    def reach(self) -> pb.Reach:
        """How peers get at the bytes now."""

    def open_transfer(self, transfer_id: str, blocks: Mapping[int, Sequence[int]]) -> None:
        """PullBlocks may read these blocks: ids by group, as in GroupBlocks."""

    def close_transfer(self, transfer_id: str) -> None:
        """PullBlocks of the transfer end, and none begins any more."""

    def import_blocks(self, job: ImportJob) -> AsyncIterator[ImportNews]:
        """Run an import: progress, parts, at last one report.

        Closing the iterator cancels the import. The iterator ends (by report, error or
        close) only when no byte can land in the job's blocks any more: a copy that hangs
        is ended by ending the process that runs it. Raises KVDepotError when the peer cannot
        be asked (Unavailable), refuses, or has another fingerprint.
        """
