"""One server, asked by asyncio: the twin of ``kvclient.client``."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import grpc

from kvclient import calls, event_stream, transfer
from kvclient.aio.attachment import Attachment
from kvclient.aio.event_stream import Stream
from kvclient.aio.imports import Import
from kvclient.aio.keeper import LeaseKeeper
from kvclient.aio.pulling import BlockStream
from kvclient.aio.session import Session
from kvclient.calls import Call, Opening
from kvclient.channel import BACKOFFS_S, MAX_MESSAGE_BYTES, TIMEOUT_S, Stubs, channel_options
from kvclient.description import PoolDescription
from kvclient.errors import Unavailable, unanswered
from kvclient.imports import TransferPath, hashes_request
from kvclient.reports import AuditReport, RequestPage, SessionInfo, Stats, TransferInfo

Result = TypeVar("Result")


class Client:
    """One server, as ``kvclient.client.Client``, where its calls are explained.

    Made inside the event loop. One task renews the leases of the client's sessions: a loop
    that is kept busy for longer than a lease loses it.
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
        self._stubs = Stubs(target, lambda address: grpc.aio.insecure_channel(address, options))
        self._keeper = LeaseKeeper()

    async def open_session(
        self, name: str = "", fingerprint: str = "", *, lease_ttl_s: float | None = None
    ) -> Session:
        """A new session; with ``fingerprint``, only on a pool that has it."""
        return await self._open(Opening(name, fingerprint, lease_ttl_s))

    async def attach_worker(self, session_id: str, epoch: str = "", name: str = "") -> Attachment:
        """Tells the server that this process writes to the pool under a session."""
        for backoff_s in BACKOFFS_S:
            try:
                return await Attachment(self, session_id, epoch, name)._attached()
            except Unavailable:
                await asyncio.sleep(backoff_s)
        return await Attachment(self, session_id, epoch, name)._attached()

    async def describe_pool(self) -> PoolDescription:
        """What the server's pool is, and where its bytes are."""
        return await self._invoke(calls.describe_pool())

    async def stats(self) -> Stats:
        """The server's figures."""
        return await self._invoke(calls.get_stats())

    async def audit(self) -> AuditReport:
        """Has the server check every invariant."""
        return await self._invoke(calls.audit())

    async def list_sessions(self) -> tuple[SessionInfo, ...]:
        """Open sessions, and those that ended while their workers may still write."""
        return await self._invoke(calls.list_sessions())

    async def list_requests(
        self, session_id: str = "", *, page_size: int = 0, page_token: str = ""
    ) -> RequestPage:
        """Requests of a session, or of all, oldest first, a page at a time."""
        return await self._invoke(calls.list_requests(session_id, page_size, page_token))

    async def list_transfers(self) -> tuple[TransferInfo, ...]:
        """What peers read from this server, and what it imports."""
        return await self._invoke(calls.list_transfers())

    async def evict_blocks(self, block_ids: Iterable[int]) -> int:
        """Takes blocks out of the prefix cache; answers how many had content."""
        return await self._invoke(calls.evict_blocks(block_ids))

    async def drain(self) -> int:
        """Has the server stop as SIGTERM does; answers how many sessions it waits for."""
        return await self._invoke(calls.drain())

    def pull_blocks(
        self,
        block_hashes: Sequence[bytes],
        group: int = 0,
        *,
        checksums: bool = False,
        fingerprint: str = "",
        timeout_s: float | None = None,
    ) -> BlockStream:
        """Copies of blocks, one answer a hash, in order; all within ``timeout_s``."""
        ends_at = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        pull = transfer.Pull(block_hashes, group, checksums, ends_at)
        return BlockStream(self, pull, fingerprint)

    async def open_transfer(
        self,
        groups: Mapping[int, Sequence[bytes]],
        *,
        fingerprint: str = "",
        lease_ttl_s: float | None = None,
        name: str = "",
    ) -> transfer.Transfer:
        """Pins the ready blocks among the hashes, by group, so that nobody writes to them."""
        return await self._invoke(
            transfer.open_transfer(
                groups, fingerprint=fingerprint, lease_ttl_s=lease_ttl_s, name=name
            )
        )

    async def renew_transfer(self, transfer_id: str) -> float:
        """Begins a transfer's lease anew; answers its seconds. NotFound when it has ended."""
        return await self._invoke(transfer.renew_transfer(transfer_id))

    async def close_transfer(self, transfer_id: str) -> None:
        """Unpins. NotFound when the lease had run out: what was read may be something else."""
        await self._invoke(transfer.close_transfer(transfer_id))

    def import_blocks(
        self,
        block_hashes: Mapping[int, Sequence[bytes]] | Sequence[bytes],
        peer: str,
        *,
        paths: Iterable[TransferPath] = (),
        checksums: bool = False,
        deadline_s: float | None = None,
    ) -> Import:
        """Has the server pull blocks from ``peer`` into its cache, parents before children."""
        request = hashes_request(
            block_hashes, peer, paths=paths, checksums=checksums, deadline_s=deadline_s
        )
        return Import(self, request, deadline_s)

    async def stream_events(
        self, from_sequence: int | None = None, *, epoch: str = "", snapshot: bool = False
    ) -> Stream:
        """What happens to the index, from ``from_sequence`` (default: now), until closed."""
        request = event_stream.request(from_sequence, epoch, snapshot)
        call = self._stubs.method("KVEventService", "StreamEvents")(request)
        # Answered once subscribed; a failed call answers too, and fails when iterated over.
        with contextlib.suppress(grpc.RpcError):
            await call.initial_metadata()
        return Stream(call)

    async def close(self) -> None:
        """Ends every call and stream. Sessions live on until their leases end: close them first."""
        self._stubs.closed = True
        await self._keeper.close()
        for channel in self._stubs.channels():
            await channel.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _open(self, opening: Opening) -> Session:
        asked_at = time.monotonic()
        opened = await self._invoke(calls.open_session(opening))
        return Session(self, opening, opened, asked_at=asked_at)

    async def _invoke(self, call: Call[Result]) -> Result:
        return call.read(await self._send(call))

    async def _send(self, call: Call[Any], timeout_s: float | None = None) -> Any:
        method = self._stubs.method(call.service, call.method)
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            return await method(call.request, timeout=limit_s)
        except grpc.RpcError as error:
            raise unanswered(error, closed=self._stubs.closed) from None
