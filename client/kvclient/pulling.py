"""Pulling blocks, synchronously: open, PullBlocks at the data address, close."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc

from kvclient import transfer
from kvclient.errors import KVDepotError, from_rpc_error
from kvclient.values import PulledBlock

if TYPE_CHECKING:
    from kvclient.client import Client

_GIVE_UP_SECONDS = 1.0


class BlockStream:
    """Pulled blocks, to iterate over; ``close`` ends it early."""

    def __init__(self, client: Client, pull: transfer.Pull, fingerprint: str) -> None:
        self._client = client
        self._pull = pull
        self._call: Any = None
        self._transfer_id = ""
        self._items = self._read(fingerprint)

    def __iter__(self) -> Iterator[PulledBlock]:
        return self

    def __next__(self) -> PulledBlock:
        return next(self._items)

    def _read(self, fingerprint: str) -> Iterator[PulledBlock]:
        client, pull = self._client, self._pull
        if not pull.block_hashes:
            return
        opening = transfer.open_transfer(
            {pull.group: pull.block_hashes}, fingerprint=fingerprint, name="pull"
        )
        opened = opening.read(client._send(opening, pull.seconds_left()))
        self._transfer_id = opened.transfer_id
        try:
            request = pull.request(opened)
            if request is not None:
                method = client._stubs.pull(opened.reach.data_address)
                self._call = method(request.SerializeToString(), timeout=pull.seconds_left())
                for message in self._call:
                    if pull.take(message):
                        renewal = transfer.renew_transfer(opened.transfer_id)
                        reply = client._send(renewal, pull.seconds_left())
                        pull.renewed(renewal.read(reply))
                        yield from pull.proven()
            self._transfer_id = ""
            client._send(transfer.close_transfer(opened.transfer_id), pull.seconds_left())
        except grpc.RpcError as error:
            self._give_up()
            raise from_rpc_error(error) from None
        except KVDepotError:
            self._give_up()
            raise
        yield from pull.proven(last=True)

    def close(self) -> None:
        """Ends the stream; whoever waits for its next item gets Cancelled."""
        if self._call is not None:
            self._call.cancel()
        self._give_up()

    def _give_up(self) -> None:
        """The blocks need not wait for the lease to end."""
        transfer_id, self._transfer_id = self._transfer_id, ""
        if transfer_id and not self._client._stubs.closed:
            with contextlib.suppress(KVDepotError):
                self._client._send(transfer.close_transfer(transfer_id), _GIVE_UP_SECONDS)

    def __enter__(self) -> BlockStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
