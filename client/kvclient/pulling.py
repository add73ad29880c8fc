"""Pulling blocks, synchronously: open, PullBlocks at the data address, close."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc

from kvclient import transfer
from kvclient.errors import KVDepotError, from_rpc_error
from kvclient.values import PulledBlock

if TYPE_CHECKING:
    from kvclient.client import Client

_GIVE_UP_SECONDS = 1.0


class _Pulling:
    """What a pull has open at the server. It does not know the BlockStream."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.call: Any = None
        self.transfer_id = ""

    def read(self, pull: transfer.Pull, fingerprint: str) -> Iterator[PulledBlock]:
        client = self.client
        if not pull.block_hashes:
            return
        opening = transfer.open_transfer(
            {pull.group: pull.block_hashes}, fingerprint=fingerprint, name="pull"
        )
        opened = opening.read(client._send(opening, pull.seconds_left()))
        self.transfer_id = opened.transfer_id
        try:
            request = pull.request(opened)
            if request is not None:
                method = client._stubs.pull(opened.reach.data_address)
                self.call = method(request.SerializeToString(), timeout=pull.seconds_left())
                for message in self.call:
                    if pull.take(message):
                        renewal = transfer.renew_transfer(opened.transfer_id)
                        reply = client._send(renewal, pull.seconds_left())
                        pull.renewed(renewal.read(reply))
                        yield from pull.proven()
            self.transfer_id = ""
            client._send(transfer.close_transfer(opened.transfer_id), pull.seconds_left())
        except grpc.RpcError as error:
            self.give_up()
            raise from_rpc_error(error) from None
        except KVDepotError:
            self.give_up()
            raise
        yield from pull.proven(last=True)

    def give_up(self) -> None:
        """The blocks need not wait for the lease to end."""
        if self.call is not None:
            self.call.cancel()
        transfer_id, self.transfer_id = self.transfer_id, ""
        if transfer_id and not self.client._stubs.closed:
            with contextlib.suppress(KVDepotError):
                self.client._send(transfer.close_transfer(transfer_id), _GIVE_UP_SECONDS)

    def abandoned(self) -> None:
        """As ``give_up``, but whoever let go of the stream, wherever that is, waits for nothing."""
        if self.transfer_id:
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                threading.Thread(target=self.give_up, name="kvdepot-give-up", daemon=True).start()


class BlockStream:
    """Pulled blocks, to iterate over; ``close`` ends it early, as does letting go of it."""

    def __init__(self, client: Client, pull: transfer.Pull, fingerprint: str) -> None:
        self._pulling = _Pulling(client)
        self._items = self._pulling.read(pull, fingerprint)
        weakref.finalize(self, self._pulling.abandoned).atexit = False

    def __iter__(self) -> Iterator[PulledBlock]:
        return self

    def __next__(self) -> PulledBlock:
        return next(self._items)

    def close(self) -> None:
        """Ends the stream; whoever waits for its next item gets Cancelled."""
        self._pulling.give_up()

    def __enter__(self) -> BlockStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
