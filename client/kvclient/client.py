"""The synchronous client. ``kvclient.aio`` has its asyncio twin."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import grpc

from kvclient import calls, event_stream, transfer
from kvclient.attachment import Attachment
from kvclient.calls import Call, Opening
from kvclient.channel import BACKOFFS_S, MAX_MESSAGE_BYTES, TIMEOUT_S, Stubs, channel_options
from kvclient.description import PoolDescription
from kvclient.errors import Unavailable, unanswered
from kvclient.event_stream import Stream
from kvclient.imports import Import, TransferPath, hashes_request
from kvclient.keeper import LeaseKeeper
from kvclient.pulling import BlockStream
from kvclient.reports import AuditReport, RequestPage, SessionInfo, Stats, TransferInfo
from kvclient.session import Session

Result = TypeVar("Result")


class Client:
    """One server, at ``host:port`` or ``unix:/path``. For use from any thread.

    Every call ends within ``timeout_s`` in a value or an error of ``kvclient.errors``; until
    then a server that cannot be reached is asked again a few times. One thread renews the
    leases of the client's sessions.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float = TIMEOUT_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.target = target
        self.timeout_s = timeout_s
        options = channel_options(max_message_bytes)
        self._stubs = Stubs(target, lambda address: grpc.insecure_channel(address, options))
        self._keeper = LeaseKeeper()
        # Also when the process ends and nobody closed the client.
        weakref.finalize(self, self._keeper.close)

    def open_session(
        self, name: str = "", fingerprint: str = "", *, lease_ttl_s: float | None = None
    ) -> Session:
        """A new session; with ``fingerprint``, only on a pool that has it.

        It ends ``lease_ttl_s`` after the server last heard of it (default: the server's).
        """
        return self._open(Opening(name, fingerprint, lease_ttl_s))

    def attach_worker(self, session_id: str, epoch: str = "", name: str = "") -> Attachment:
        """Tells the server that this process writes to the pool under a session.

        Until the attachment is closed, or this process ends, the blocks of the session
        are given to nobody else should it end. CacheLost when it has ended already.
        """
        for backoff_s in BACKOFFS_S:
            try:
                return Attachment(self, session_id, epoch, name)
            except Unavailable:
                time.sleep(backoff_s)
        return Attachment(self, session_id, epoch, name)

    def describe_pool(self) -> PoolDescription:
        """What the server's pool is, and where its bytes are."""
        return self._invoke(calls.describe_pool())

    def stats(self) -> Stats:
        """The server's figures."""
        return self._invoke(calls.get_stats())

    def audit(self) -> AuditReport:
        """Has the server check every invariant."""
        return self._invoke(calls.audit())

    def list_sessions(self) -> tuple[SessionInfo, ...]:
        """Open sessions, and those that ended while their workers may still write."""
        return self._invoke(calls.list_sessions())

    def list_requests(
        self, session_id: str = "", *, page_size: int = 0, page_token: str = ""
    ) -> RequestPage:
        """Requests of a session, or of all, oldest first, a page at a time.

        ``page_size`` 0 is the server's default.
        """
        return self._invoke(calls.list_requests(session_id, page_size, page_token))

    def list_transfers(self) -> tuple[TransferInfo, ...]:
        """What peers read from this server, and what it imports."""
        return self._invoke(calls.list_transfers())

    def evict_blocks(self, block_ids: Iterable[int]) -> int:
        """Takes blocks out of the prefix cache; answers how many had content.

        Who holds one keeps it. InvalidArgument, and nothing is done, if an id is none.
        """
        return self._invoke(calls.evict_blocks(block_ids))

    def drain(self) -> int:
        """Has the server stop as SIGTERM does; answers how many sessions it waits for."""
        return self._invoke(calls.drain())

    def pull_blocks(
        self,
        block_hashes: Sequence[bytes],
        group: int = 0,
        *,
        checksums: bool = False,
        fingerprint: str = "",
        timeout_s: float | None = None,
    ) -> BlockStream:
        """Copies of blocks, one answer a hash, in order; all within ``timeout_s``.

        They are pinned while they are pulled. With ``checksums`` each is verified: DataLoss
        for one that came damaged. A stream that breaks is not begun again.
        """
        ends_at = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        pull = transfer.Pull(block_hashes, group, checksums, ends_at)
        return BlockStream(self, pull, fingerprint)

    def open_transfer(
        self,
        groups: Mapping[int, Sequence[bytes]],
        *,
        fingerprint: str = "",
        lease_ttl_s: float | None = None,
        name: str = "",
    ) -> transfer.Transfer:
        """Pins the ready blocks among the hashes, by group, so that nobody writes to them."""
        return self._invoke(
            transfer.open_transfer(
                groups, fingerprint=fingerprint, lease_ttl_s=lease_ttl_s, name=name
            )
        )

    def renew_transfer(self, transfer_id: str) -> float:
        """Begins a transfer's lease anew; answers its seconds. NotFound when it has ended."""
        return self._invoke(transfer.renew_transfer(transfer_id))

    def close_transfer(self, transfer_id: str) -> None:
        """Unpins. NotFound when the lease had run out: what was read may be something else."""
        self._invoke(transfer.close_transfer(transfer_id))

    def import_blocks(
        self,
        block_hashes: Mapping[int, Sequence[bytes]] | Sequence[bytes],
        peer: str,
        *,
        paths: Iterable[TransferPath] = (),
        checksums: bool = False,
        deadline_s: float | None = None,
    ) -> Import:
        """Has the server pull blocks from ``peer`` into its cache, parents before children.

        ``block_hashes`` are by group, or of the first. ``paths``: those allowed, in order;
        none: all, the best first. Runs at most ``deadline_s`` (default: the server's bound).
        """
        request = hashes_request(
            block_hashes, peer, paths=paths, checksums=checksums, deadline_s=deadline_s
        )
        return Import(self, request, deadline_s)

    def stream_events(
        self, from_sequence: int | None = None, *, epoch: str = "", snapshot: bool = False
    ) -> Stream:
        """What happens to the index, from ``from_sequence`` (default: now), until closed.

        With ``snapshot``, all that is there comes first. The subscription stands when
        this returns. OutOfRange for a cursor no longer kept, DataLoss for one of an
        ``epoch`` that is over.
        """
        request = event_stream.request(from_sequence, epoch, snapshot)
        call = self._stubs.method("KVEventService", "StreamEvents")(request)
        # Answered once subscribed; a failed call answers too, and fails when iterated over.
        call.initial_metadata()
        return Stream(call)

    def close(self) -> None:
        """Ends every call and stream. Sessions live on until their leases end: close them first."""
        self._stubs.closed = True
        self._keeper.close()
        for channel in self._stubs.channels():
            channel.close()
        self._keeper.join()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open(self, opening: Opening) -> Session:
        asked_at = time.monotonic()
        opened = self._invoke(calls.open_session(opening))
        return Session(self, opening, opened, asked_at=asked_at)

    def _invoke(self, call: Call[Result]) -> Result:
        return call.read(self._send(call))

    def _send(self, call: Call[Any], timeout_s: float | None = None) -> Any:
        method = self._stubs.method(call.service, call.method)
        try:
            return method(call.request, timeout=self.timeout_s if timeout_s is None else timeout_s)
        except grpc.RpcError as error:
            raise unanswered(error, closed=self._stubs.closed) from None
