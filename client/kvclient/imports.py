"""Imports: a server pulls blocks from a peer into its own pool. Both clients share this part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import grpc

from kvclient.convert import uint32
from kvclient.errors import InternalError, KVDepotError, from_rpc_error
from kvdepot.v1 import transfer_pb2 as pb

if TYPE_CHECKING:
    from kvclient.client import Client


class TransferPath(IntEnum):
    """Ways for the bytes, the best first; UNKNOWN while none is in use."""

    UNKNOWN = 0
    MAPPING = 1
    NIXL = 2
    GRPC = 3


class ImportStatus(IntEnum):
    """What became of one block.

    PRESENT: it was here already. PENDING, MISSING: at the peer. NO_FIT: no block is free for
    it here. NOT_ATTEMPTED: it is behind one that is not here.
    """

    IMPORTED = 1
    PRESENT = 2
    PENDING = 3
    MISSING = 4
    FAILED = 5
    NO_FIT = 6
    NOT_ATTEMPTED = 7


@dataclass(frozen=True, slots=True)
class ImportProgress:
    """So far; ``path`` is the one in use."""

    num_blocks: int
    num_bytes: int
    path: TransferPath


@dataclass(frozen=True, slots=True)
class PathFailure:
    """Why the bytes did not come by a path that was tried."""

    path: TransferPath
    reason: str


@dataclass(frozen=True, slots=True)
class ImportResult:
    """How an import ended.

    ``statuses``, by group: one a hash asked for; of a request, one a full block that it was
    given for external tokens. ``num_tokens``: of a request, its leading tokens whose bytes are
    here and verified in all groups, which ``cache_blocks`` may confirm; 0 if it cannot go on
    with any of them. ``missing_parents``, by group: why blocks were NOT_ATTEMPTED, if that is
    because a parent is not here and was not asked for; the first 64.
    """

    statuses: Mapping[int, tuple[ImportStatus, ...]]
    num_tokens: int
    num_blocks: int
    num_bytes: int
    path: TransferPath
    failures: tuple[PathFailure, ...]
    missing_parents: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every block is here."""
        here = (ImportStatus.IMPORTED, ImportStatus.PRESENT)
        return all(status in here for column in self.statuses.values() for status in column)


def hashes_request(
    block_hashes: Mapping[int, Sequence[bytes]] | Sequence[bytes], peer: str, **options: Any
) -> pb.ImportBlocksRequest:
    """ImportBlocks of hashes, by group, or of the first group. ``options``: see _request."""
    groups = block_hashes if isinstance(block_hashes, Mapping) else {0: block_hashes}
    request = _request(peer, **options)
    for group, hashes in groups.items():
        request.groups.add(group=uint32(group, "group"), block_hashes=hashes)
    return request


def session_request(
    session_id: str, epoch: str, request_id: str, peer: str, **options: Any
) -> pb.ImportBlocksRequest:
    """ImportBlocks for a request of a session. ``options``: see _request."""
    request = _request(peer, **options)
    request.request.session_id = session_id
    request.request.epoch = epoch
    request.request.request_id = request_id
    return request


def _request(
    peer: str, *, paths: Iterable[TransferPath], checksums: bool, deadline_s: float | None
) -> pb.ImportBlocksRequest:
    return pb.ImportBlocksRequest(
        peer=peer,
        paths=[int(path) for path in paths],  # type: ignore[misc]
        checksums=checksums,
        deadline_seconds=deadline_s,
    )


def begin(client: Any, request: pb.ImportBlocksRequest, deadline_s: float | None) -> Any:
    """The call. It may take as long as the import, and a little; None: the server's bound."""
    method = client._stubs.method("KVTransferService", "ImportBlocks")
    return method(request, timeout=None if deadline_s is None else deadline_s + client.timeout_s)


def progress(message: pb.ImportBlocksResponse) -> ImportProgress:
    """What a message tells while the import runs."""
    return ImportProgress(message.num_blocks, message.num_bytes, _path(message.path))


def result(message: pb.ImportBlocksResponse) -> ImportResult:
    """What the last message tells."""
    return ImportResult(
        statuses={
            answer.group: tuple(map(ImportStatus, answer.statuses)) for answer in message.groups
        },
        num_tokens=message.num_tokens,
        num_blocks=message.num_blocks,
        num_bytes=message.num_bytes,
        path=_path(message.path),
        failures=tuple(
            PathFailure(_path(failure.path), failure.reason) for failure in message.failures
        ),
        missing_parents={
            group.group: tuple(group.block_hashes) for group in message.missing_parents
        },
    )


def unfinished() -> InternalError:
    """The stream ended well, but said no end."""
    return InternalError("the import ended without a result", reason="BAD_REPLY")


def _path(number: int) -> TransferPath:
    """A way that this client does not know is UNKNOWN, too."""
    known = number in TransferPath.__members__.values()
    return TransferPath(number) if known else TransferPath.UNKNOWN


class Import:
    """One import that runs: iterate over its progress, or wait for its ``result``.

    ``close`` ends it early. Its blocks are nobody's until no byte can land in them any more.
    """

    def __init__(
        self,
        client: Client,
        request: pb.ImportBlocksRequest,
        deadline_s: float | None,
        translate: Callable[[KVDepotError], KVDepotError] = lambda error: error,
    ) -> None:
        self._call = begin(client, request, deadline_s)
        self._translate = translate
        self._result: ImportResult | None = None
        self._items = self._read()

    def __iter__(self) -> Iterator[ImportProgress]:
        return self._items

    def _read(self) -> Iterator[ImportProgress]:
        try:
            for message in self._call:
                if message.done:
                    self._result = result(message)
                else:
                    yield progress(message)
        except grpc.RpcError as error:
            raise self._translate(from_rpc_error(error)) from None

    def result(self) -> ImportResult:
        """Wait for the end; how it went. Raises what the server, or its peer, refuses."""
        for _ in self._items:
            pass
        if self._result is None:
            raise unfinished()
        return self._result

    def close(self) -> None:
        """Ends the import, if it runs; whoever waits for it gets Cancelled."""
        self._call.cancel()

    def __enter__(self) -> Import:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
