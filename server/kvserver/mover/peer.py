"""Another server, as an import asks it: every call with its own time, all of them stoppable."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import grpc

from kvclient.channel import PULL_BLOCKS, channel_options, data_target
from kvclient.duplex import Duplex
from kvclient.errors import Unavailable, from_rpc_error
from kvclient.frame import Frame, parse
from kvdepot.v1 import transfer_pb2 as pb
from kvdepot.v1 import transfer_pb2_grpc

_UNLIMITED = -1
_LINGER_SECONDS = 1.0
_CHANNELS_MAX = 64


class Channels:
    """Connections to peers, kept for the next import: making one takes milliseconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, grpc.Channel] = OrderedDict()
        self._users: Counter[str] = Counter()

    def take(self, address: str) -> grpc.Channel:
        """The channel to an address; ``give_back`` it."""
        with self._lock:
            channel = self._kept.get(address)
            if channel is None:
                channel = grpc.insecure_channel(address, channel_options(_UNLIMITED))
                self._kept[address] = channel
            self._users[address] += 1
            return channel

    def give_back(self, address: str) -> None:
        """Nobody needs the one used longest ago, if there are too many."""
        with self._lock:
            self._users[address] -= 1
            self._kept.move_to_end(address)
            unused = [kept for kept in self._kept if not self._users[kept]]
            for kept in unused[: max(0, len(self._kept) - _CHANNELS_MAX)]:
                self._kept.pop(kept).close()
                del self._users[kept]


class Peer:
    """Raises the errors of ``kvclient.errors``. ``stop`` may come from any thread."""

    def __init__(self, target: str, channels: Channels) -> None:
        self.target = target
        self._channels = channels
        self._taken: list[str] = []
        self._stub: Any = transfer_pb2_grpc.KVTransferServiceStub(self._take(target))
        self._lock = threading.Lock()
        self._running: set[Any] = set()
        self._stopped = False

    def call(self, method: str, request: Any, seconds: float, *, linger: bool = False) -> Any:
        """The answer to a unary call. With ``linger`` one that is stopped may come yet."""
        call = getattr(self._stub, method).future(request, timeout=seconds)
        with self._run(_Lingering(call) if linger else call):
            try:
                return call.result()
            except grpc.FutureCancelledError:
                raise from_rpc_error(call) from None
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None

    def pull(self, address: str, request: pb.PullBlocksRequest, seconds: float) -> Iterator[Frame]:
        """PullBlocks at the data address."""
        channel = self._take(data_target(self.target, address))
        call = Duplex(channel, PULL_BLOCKS, timeout_s=seconds)
        with self._run(call):
            try:
                call.send(request.SerializeToString())
                call.end()
                while (message := call.receive()) is not None:
                    yield parse(message)
            except grpc.RpcError as error:
                failed = from_rpc_error(error)
                if isinstance(failed, Unavailable) and not failed.answered:
                    # It cannot say so itself: it closes the connection.
                    failed.message += (
                        f" (the data address {address}: not reached, or it has as many "
                        "connections as its --max-data-connections allows)"
                    )
                raise failed from None
            finally:
                call.cancel()
                call.hear_out()

    def close_transfer(self, transfer_id: str, seconds: float) -> None:
        """CloseTransfer, also when stopped."""
        request = pb.CloseTransferRequest(transfer_id=transfer_id)
        try:
            self._stub.CloseTransfer(request, timeout=seconds)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def stop(self) -> None:
        """Calls end now, and none is made any more."""
        with self._lock:
            self._stopped = True
            for call in self._running:
                call.cancel()

    def _run(self, call: Any) -> _Running:
        with self._lock:
            self._running.add(call)
            if self._stopped:
                call.cancel()
        return _Running(self._lock, self._running, call)

    def close(self) -> None:
        """Let go of the connections."""
        for address in self._taken:
            self._channels.give_back(address)
        self._taken.clear()

    def _take(self, address: str) -> grpc.Channel:
        channel = self._channels.take(address)
        self._taken.append(address)
        return channel

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Lingering:
    """A call that leaves something behind at the peer: it is cancelled a second later."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def cancel(self) -> None:
        timer = threading.Timer(_LINGER_SECONDS, self._call.cancel)
        timer.daemon = True
        timer.start()


class _Running:
    """A call while it runs."""

    def __init__(self, lock: threading.Lock, running: set[Any], call: Any) -> None:
        self._lock, self._calls, self._call = lock, running, call

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._calls.discard(self._call)
