"""The twin of ``kvclient.pulling``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc

from kvclient import transfer
from kvclient.errors import KVDepotError, from_rpc_error
from kvclient.values import PulledBlock

if TYPE_CHECKING:
    from kvclient.aio.client import Client

_GIVE_UP_SECONDS = 1.0


class _Pulling:
    """What a pull has open at the server. It does not know the BlockStream.

    So its iterator ends, by the loop's own hand, when nobody refers to that any more.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.call: Any = None
        self.transfer_id = ""

    async def read(self, pull: transfer.Pull, fingerprint: str) -> AsyncIterator[PulledBlock]:
        client = self.client
        if not pull.block_hashes:
            return
        opening = transfer.open_transfer(
            {pull.group: pull.block_hashes}, fingerprint=fingerprint, name="pull"
        )
        opened = opening.read(await client._send(opening, pull.seconds_left()))
        self.transfer_id = opened.transfer_id
        try:
            request = pull.request(opened)
            if request is not None:
                method = client._stubs.pull(opened.reach.data_address)
                self.call = method(request.SerializeToString(), timeout=pull.seconds_left())
                async for message in self.call:
                    if pull.take(message):
                        renewal = transfer.renew_transfer(opened.transfer_id)
                        reply = await client._send(renewal, pull.seconds_left())
                        pull.renewed(renewal.read(reply))
                        for block in pull.proven():
                            yield block
            self.transfer_id = ""
            await client._send(transfer.close_transfer(opened.transfer_id), pull.seconds_left())
        except grpc.RpcError as error:
            await self.give_up()
            raise from_rpc_error(error) from None
        except BaseException:  # also of a task that is cancelled, and of an iterator let go of
            await self.give_up()
            raise
        for block in pull.proven(last=True):
            yield block

    async def give_up(self) -> None:
        """The blocks need not wait for the lease to end."""
        if self.call is not None:
            self.call.cancel()
        transfer_id, self.transfer_id = self.transfer_id, ""
        if transfer_id and not self.client._stubs.closed:
            with contextlib.suppress(KVDepotError):
                await self.client._send(transfer.close_transfer(transfer_id), _GIVE_UP_SECONDS)


class BlockStream:
    """Pulled blocks, to iterate over; ``close`` ends it early, as does letting go of it."""

    def __init__(self, client: Client, pull: transfer.Pull, fingerprint: str) -> None:
        self._pulling = _Pulling(client)
        self._giving_up: asyncio.Future[None] | None = None
        self._items = self._pulling.read(pull, fingerprint)

    def __aiter__(self) -> AsyncIterator[PulledBlock]:
        return self

    async def __anext__(self) -> PulledBlock:
        return await self._items.__anext__()

    def close(self) -> None:
        """Ends the stream."""
        if self._pulling.call is not None:
            self._pulling.call.cancel()
        if self._pulling.transfer_id:
            self._giving_up = asyncio.ensure_future(self._pulling.give_up())

    async def __aenter__(self) -> BlockStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()
        if self._giving_up is not None:
            await self._giving_up
