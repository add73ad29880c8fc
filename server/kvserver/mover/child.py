"""A process of the node's, and the channel to it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from kvserver.mover.channel import Message, pack, receive

logger = logging.getLogger(__name__)

_REAP_SECONDS = 10.0
QUEUED_BYTES_MAX = 64 << 20
"""Of messages to a process that does not read them; beyond, it is ended."""
READ_BYTES = 1 << 20
"""Of a message before more is read from the socket: what is known of a part's blocks at once."""
# A megabyte is allocated and freed for every message of bytes: glibc would map and unmap,
# and so zero, it each time.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_TOP_PAD_": str(16 << 20),
}
# glibc's memcpy reads what it is about to overwrite, unless it copies some megabytes at once:
# a third of the time of a copy of blocks that lie apart.
COPYING = MALLOC | {
    "GLIBC_TUNABLES": ":".join(
        (
            f"glibc.cpu.x86_non_temporal_threshold={64 << 10:#x}",
            f"glibc.cpu.x86_rep_movsb_threshold={1 << 30:#x}",
            *filter(None, (os.environ.get("GLIBC_TUNABLES", ""),)),
        )
    )
}


class Child:
    """``python -m MODULE FD``, from ``spawn`` until ``end``. It ends with the node, too."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._reader = reader
        self._writer = writer
        self._ending: asyncio.Future[int] | None = None
        self._killed = False

    @classmethod
    async def spawn(cls, module: str, environment: Mapping[str, str] = MALLOC) -> Child:
        """Start it, with ``environment`` beside the node's own; it answers nothing yet."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # Forking takes the longer the more memory the node has.
                process = await asyncio.get_running_loop().run_in_executor(
                    None, _popen, module, theirs.fileno(), environment
                )
                reader, writer = await asyncio.open_connection(sock=ours, limit=READ_BYTES)
            except BaseException:
                ours.close()
                raise
        return cls(process, reader, writer)

    def send(self, **message: object) -> None:
        """Send a message, at once as far as the socket takes it; lost if the process is gone.

        One that reads nothing, until too much is queued for it, is killed.
        """
        if self._killed or self._writer.is_closing():
            return
        num_queued = self._writer.transport.get_write_buffer_size()
        if num_queued > QUEUED_BYTES_MAX:
            logger.error(
                "pid %d reads nothing: %d bytes are queued for it; it is killed",
                self.pid,
                num_queued,
            )
            self.kill()
            return
        self._writer.write(pack(message))

    async def drain(self) -> None:
        """Wait until little is queued. OSError when the process is gone."""
        await self._writer.drain()

    async def receive(self) -> Message | None:
        """The next message; None when the process is gone."""
        return await receive(self._reader)

    def kill(self) -> None:
        """Its end begins now."""
        self._killed = True
        self._process.kill()

    async def end(self) -> None:
        """Nothing of the process is left when this returns; however often it is called.

        subprocess.TimeoutExpired when the kernel does not let go of it; then call again.
        """
        if self._ending is None or (self._ending.done() and self._ending.exception()):
            self.kill()
            self._writer.close()
            loop = asyncio.get_running_loop()
            self._ending = asyncio.ensure_future(
                loop.run_in_executor(None, self._process.wait, _REAP_SECONDS)
            )
        await asyncio.shield(self._ending)


def _popen(module: str, fd: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # It finds what this process finds, and nothing in the directory it is started from.
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, "-m", module, str(fd)],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what libraries print is no line of the server's
        pass_fds=[fd],
        cwd="/",
        # gRPC tells of every idle connection that a peer closes, in no form of the log's.
        env={"GRPC_VERBOSITY": "ERROR", **os.environ, **environment, "PYTHONPATH": path},
        # A Ctrl-C at the terminal is for the node, which then ends its processes.
        start_new_session=True,
    )
