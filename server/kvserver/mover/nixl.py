"""NIXL, where it is installed: an agent that peers read from, and one that reads.

Neither starts NIXL's listener: it binds every address and asks nobody who he is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from kvserver.mover.devices import PoolDevices
from kvserver.mover.pages import PoolFile
from kvserver.mover.store import Store

logger = logging.getLogger(__name__)

KINDS = frozenset(("DRAM", "VRAM"))
"""Of memory that is read."""

# Of NIXL's progress thread, between two looks at what UCX's descriptors did not wake it for.
_PROGRESS_MICROSECONDS = 10_000
# Peers that stay connected: meeting one anew takes milliseconds.
_PEERS_MAX = 64


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory. ``kind``: one of KINDS; ``device``: of VRAM, the CUDA device's index."""

    kind: str
    device: int
    address: int
    nbytes: int


def regions_of(store: Store) -> list[Region]:
    """The bytes of a pool in this process, one region a mapping, in order."""
    if isinstance(store, PoolDevices):
        return [
            Region(
                "VRAM" if tensor.device.type == "cuda" else "DRAM",
                tensor.device.index or 0,
                tensor.data_ptr(),
                tensor.numel(),
            )
            for tensor in store.tensors
        ]
    assert isinstance(store, PoolFile)
    import numpy as np

    address = int(np.frombuffer(store.mapping, "u1").ctypes.data)
    return [Region("DRAM", 0, address, store.nbytes)]


def make_agent(devices: str, *, cuda: bool, serves: bool) -> Any:
    """An agent over UCX; None if NIXL is not to be used or not installed.

    ``devices``: UCX_NET_DEVICES; empty: none. What the environment says of UCX_TLS stays.
    ``cuda``: for memory of CUDA devices. ``serves``: it works for peers by itself, in a thread
    that sleeps until they want something and holds no GIL. Otherwise it works while it is called.
    """
    if not devices:
        return None
    os.environ["UCX_NET_DEVICES"] = devices
    if devices == "lo":
        os.environ.setdefault("UCX_TLS", "tcp,sm,self,cuda" if cuda else "tcp,sm,self")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    try:
        import nixl_cu12 as nixl
        import nixl_cu12._bindings as bindings
    except ImportError:
        return None
    name = f"kvdepot-{secrets.token_hex(8)}"
    try:
        config = nixl.nixl_agent_config(
            enable_prog_thread=False, enable_listen_thread=False, backends=[]
        )
        agent = nixl.nixl_agent(name, config)
        if serves:
            # The package gives its progress thread no pause, so that it spins on a core: with one,
            # it waits for UCX's descriptors.
            inner = bindings.nixlAgentConfig(True, False)
            inner.pthrDelay = _PROGRESS_MICROSECONDS
            agent.agent = bindings.nixlAgent(name, inner)
        agent.create_backend("UCX")
        return agent
    except Exception as error:
        logger.warning("NIXL does not start, and is not offered: %s", error)
        return None


def _register(agent: Any, regions: Sequence[Region]) -> None:
    for region in regions:
        row = (region.address, region.nbytes, region.device, "")
        agent.register_memory([row], region.kind)


class ServingAgent:
    """Registers the pool, and works for peers."""

    def __init__(self, store: Store, devices: str) -> None:
        cuda = isinstance(store, PoolDevices)
        self._agent = make_agent(devices, cuda=cuda, serves=True)
        self._regions: list[Region] = []
        if self._agent is not None:
            self._regions = regions_of(store)
            try:
                _register(self._agent, self._regions)
            except Exception as error:  # memory of a device, which UCX or the driver refuses
                logger.warning("NIXL cannot register the pool, and is not offered: %s", error)
                self._agent = None

    def reach(self) -> dict[str, Any] | None:
        """What peers must know: ``agent`` and ``regions``; None without NIXL."""
        if self._agent is None:
            return None
        return {
            "agent": self._agent.get_agent_metadata(),
            "regions": [list(astuple(region)) for region in self._regions],
        }


class AgentFailed(Exception):
    """NIXL does not do what it was asked for: its own exceptions share no base."""


class ReadingAgent:
    """Reads from peers into the pool. For use from any thread. Raises AgentFailed."""

    def __init__(self, store: Store, devices: str) -> None:
        # The agent is not thread-safe as it is made here.
        self._lock = threading.Lock()
        # By metadata, the last used last; and how many use each name.
        self._peers: OrderedDict[bytes, str] = OrderedDict()
        self._users: Counter[str] = Counter()
        self._failed: set[str] = set()
        self.regions: list[Region] = []
        cuda = isinstance(store, PoolDevices)
        self._agent = make_agent(devices, cuda=cuda, serves=False)
        if self._agent is not None:
            self.regions = regions_of(store)
            try:
                _register(self._agent, self.regions)
            except Exception as error:
                logger.warning("NIXL cannot register the pool, and is not used: %s", error)
                self._agent = None

    @property
    def offered(self) -> bool:
        """Whether NIXL is to be had."""
        return self._agent is not None

    def connect(self, metadata: bytes) -> str:
        """A peer's name; ``disconnect`` it."""
        with self._lock, _translated():
            name = self._peers.get(metadata)
            if name is None:
                name = str(self._agent.add_remote_agent(metadata), "utf-8")
            self._peers[metadata] = name
            self._peers.move_to_end(metadata)
            self._users[name] += 1
            return name

    def disconnect(self, name: str, *, failed: bool) -> None:
        """One reader fewer of a peer. After a failure, the last one makes that it is met anew."""
        with self._lock:
            self._users[name] -= 1
            if failed:
                self._failed.add(name)
            unused = [kept for kept in self._peers.items() if not self._users[kept[1]]]
            num_old = len(self._peers) - _PEERS_MAX
            for number, (metadata, old) in enumerate(unused):
                if number < num_old or old in self._failed:
                    del self._peers[metadata], self._users[old]
                    self._failed.discard(old)
                    with contextlib.suppress(Exception):  # the peer may be gone
                        self._agent.remove_remote_agent(old)

    def prepare(self, name: str, descriptors: Any, kind: str) -> Any:
        """A list of (address, nbytes, device) rows of ``name``; of "": our own."""
        with self._lock, _translated():
            return self._agent.prep_xfer_dlist(name or "NIXL_INIT_AGENT", descriptors, kind)

    def read(self, ours: Any, theirs: Any, rows: Any) -> Any:
        """Begin to read ``rows`` of the prepared lists."""
        with self._lock, _translated():
            reading = self._agent.make_prepped_xfer("READ", ours, rows, theirs, rows)
            try:
                self._agent.transfer(reading)
            except BaseException:
                _release(reading)
                raise
            return reading

    def done(self, reading: Any) -> bool:
        """Whether the bytes are here. Raises when they will not come."""
        with self._lock, _translated():
            state = self._agent.check_xfer_state(reading)
        if state == "ERR":
            raise AgentFailed("the transfer failed")
        return bool(state == "DONE")

    def release(self, *handles: Any) -> None:
        """Of lists and of reads that are over, well or not."""
        with self._lock:
            for handle in handles:
                _release(handle)


def _release(handle: Any) -> None:
    with contextlib.suppress(Exception):
        handle.release()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AgentFailed(f"{type(error).__name__}: {error}") from None
