"""NIXL, where it is installed: an agent that peers read from, and one that reads.

Neither starts NIXL's listener (it binds every address and asks nobody who he is) nor its
progress thread (from Python it spins on a core for ever): who has something to do calls in.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvserver.mover.pages import PoolFile

logger = logging.getLogger(__name__)

# Between two looks for work while transfers are open.
_PROGRESS_SECONDS = 100e-6


def make_agent(devices: str) -> Any:
    """An agent over UCX; None if NIXL is not to be used or not installed.

    ``devices``: UCX_NET_DEVICES; empty: none. What the environment says of UCX_TLS stays.
    """
    if not devices:
        return None
    os.environ["UCX_NET_DEVICES"] = devices
    if devices == "lo":
        os.environ.setdefault("UCX_TLS", "tcp,sm,self")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    try:
        import nixl_cu12 as nixl
    except ImportError:
        return None
    try:
        config = nixl.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False)
        return nixl.nixl_agent(f"kvdepot-{secrets.token_hex(8)}", config)
    except Exception as error:
        logger.warning("NIXL does not start, and is not offered: %s", error)
        return None


def address_of(file: PoolFile) -> int:
    """Of the mapping in this process."""
    import numpy as np

    return int(np.frombuffer(file.mapping, "u1").ctypes.data)


class ServingAgent:
    """Registers the pool; works for peers while transfers are open."""

    def __init__(self, file: PoolFile, devices: str) -> None:
        self._agent = make_agent(devices)
        self._region: tuple[int, int] = (0, 0)
        self._serving = threading.Event()
        if self._agent is not None:
            self._region = (address_of(file), file.nbytes)
            self._agent.register_memory([(*self._region, 0, "")], "DRAM")
            threading.Thread(target=self._progress, daemon=True, name="nixl-progress").start()

    def reach(self) -> dict[str, Any] | None:
        """What peers must know: ``agent`` and ``regions``; None without NIXL."""
        if self._agent is None:
            return None
        return {
            "agent": self._agent.get_agent_metadata(),
            "regions": [["DRAM", 0, *self._region]],
        }

    def serve(self, serving: bool) -> None:
        """Whether transfers are open."""
        (self._serving.set if serving else self._serving.clear)()

    def _progress(self) -> None:
        while self._serving.wait():
            self._agent.get_new_notifs()
            time.sleep(_PROGRESS_SECONDS)


class AgentFailed(Exception):
    """NIXL does not do what it was asked for: its own exceptions share no base."""


class ReadingAgent:
    """Reads from peers into the pool. For use from any thread. Raises AgentFailed."""

    def __init__(self, file: PoolFile, devices: str) -> None:
        # The agent is not thread-safe as it is made here.
        self._lock = threading.Lock()
        self._peers: Counter[str] = Counter()
        self._agent = make_agent(devices)
        self.offered = self._agent is not None
        self.address = 0
        if self.offered:
            self.address = address_of(file)
            self._agent.register_memory([(self.address, file.nbytes, 0, "")], "DRAM")

    def connect(self, metadata: bytes) -> str:
        """A peer's name, until ``disconnect`` was called as often."""
        with self._lock, _translated():
            name = str(self._agent.add_remote_agent(metadata), "utf-8")
            self._peers[name] += 1
            return name

    def disconnect(self, name: str) -> None:
        """The last of a peer's readers lets go of it: after a failure it must be met anew."""
        with self._lock:
            self._peers[name] -= 1
            if not self._peers[name]:
                del self._peers[name]
                with contextlib.suppress(Exception):  # the peer may be gone
                    self._agent.remove_remote_agent(name)

    def prepare(self, name: str, descriptors: Any) -> Any:
        """A list of (address, nbytes, device) rows of ``name``; of "": our own."""
        with self._lock, _translated():
            return self._agent.prep_xfer_dlist(name or "NIXL_INIT_AGENT", descriptors, "DRAM")

    def read(self, ours: Any, theirs: Any, rows: Any) -> Any:
        """Begin to read ``rows`` of the prepared lists."""
        with self._lock, _translated():
            reading = self._agent.make_prepped_xfer("READ", ours, rows, theirs, rows)
            self._agent.transfer(reading)
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
                with contextlib.suppress(Exception):
                    handle.release()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AgentFailed(f"{type(error).__name__}: {error}") from None
