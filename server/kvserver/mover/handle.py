"""The node's handle on the processes that move its bytes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from kvcore.errors import Unavailable
from kvcore.memory import PoolMemory, layer_layouts
from kvdepot.v1 import transfer_pb2 as pb
from kvserver import convert_pool
from kvserver.address import is_loopback, split_address
from kvserver.config import ConfigError, ServerConfig
from kvserver.data_plane import ImportJob, ImportNews
from kvserver.mover.channel import Message
from kvserver.mover.child import Child
from kvserver.mover.host import host_id
from kvserver.mover.imports import Imports

logger = logging.getLogger(__name__)

MODULE = "kvserver.mover.serving"
_START_SECONDS = 60.0
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.1, 10.0
# A process that lived so long did not die of how it was started.
_LIVED_SECONDS = 30.0
# Heartbeats that fail to come, one after another, of a process that must be stuck.
_MISSED_MAX = 3


class MoverHandle:
    """DataPlane over child processes, on the node's event loop."""

    def __init__(self, config: ServerConfig, memory: PoolMemory) -> None:
        self.pulled_bytes = 0
        self.on_summed: Callable[[str, Sequence[int], Sequence[int]], None] = lambda *_: None
        self._config = config
        self._pool = convert_pool.pool_description(
            memory.config, layer_layouts(memory.config), memory.mappings
        )
        self._listen_host, self._port = data_listen(config)
        self._host_id = host_id()
        self._reach = pb.Reach()
        self._transfers: dict[str, dict[int, list[int]]] = {}
        self._serving: Child | None = None
        # Messages of serving processes.
        self.num_heard = 0
        self._supervising: asyncio.Task[None] | None = None
        self._imports = Imports(
            {
                "pool": self._pool.SerializeToString(),
                "bandwidth_bytes": config.import_bandwidth_bytes,
                "part_blocks": config.import_part_blocks,
                "copy_threads": config.import_copy_threads,
                # An estimate that is short of long names by half is no matter.
                "part_bytes": config.max_message_bytes // 2,
                "nixl_devices": self._nixl_devices(),
            }
        )

    async def start(self) -> None:
        """As DataPlane's. ConfigError for a data address that cannot be had."""
        self._serving = await self._spawn(any_port=False)
        self._supervising = asyncio.ensure_future(self._supervise(self._serving))

    async def close(self) -> None:
        """As DataPlane's."""
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.wait([self._supervising])
        if self._serving is not None:
            await self._serving.end()
        await self._imports.close()

    def reach(self) -> pb.Reach:
        """As DataPlane's."""
        return self._reach

    def open_transfer(self, transfer_id: str, blocks: Mapping[int, Sequence[int]]) -> None:
        """As DataPlane's."""
        groups = {group: list(ids) for group, ids in blocks.items()}
        self._transfers[transfer_id] = groups
        self._tell(op="open", id=transfer_id, blocks=groups)

    def close_transfer(self, transfer_id: str) -> None:
        """As DataPlane's."""
        if self._transfers.pop(transfer_id, None) is not None:
            self._tell(op="close", id=transfer_id)

    def import_blocks(self, job: ImportJob) -> AsyncIterator[ImportNews]:
        """As DataPlane's."""
        return self._imports.run(job)

    def _tell(self, **message: object) -> None:
        if self._serving is not None:
            self._serving.send(**message)

    # --- the serving process ----------------------------------------------------------

    async def _spawn(self, *, any_port: bool) -> Child:
        """A serving process that can be reached and knows the open transfers."""
        config = self._config
        child = await Child.spawn(MODULE)
        try:
            child.send(
                pool=self._pool.SerializeToString(),
                host=self._listen_host,
                port=self._port,
                any_port=any_port,
                pulls_max=config.max_pulls,
                connections_max=config.max_data_connections,
                connection_idle_ms=round(config.data_connection_idle_seconds * 1000),
                streams_max=config.max_concurrent_streams,
                stall_seconds=config.pull_stall_seconds,
                heartbeat_seconds=config.pull_heartbeat_seconds,
                bandwidth_bytes=config.pull_bandwidth_bytes,
                message_bytes_max=config.max_message_bytes,
                nixl_devices=self._nixl_devices(),
            )
            try:
                said = await asyncio.wait_for(child.receive(), _START_SECONDS)
            except asyncio.TimeoutError:
                said = None
            if said is None:
                raise Unavailable(
                    "the process that serves the pool's bytes does not start; its log says why",
                    reason="NO_DATA_PLANE",
                )
            if said["op"] == "failed":
                raise ConfigError(f"--data-listen: {said['message']}; is it in use?")
            self._port = said["port"]
            self._reach = pb.Reach(host_id=self._host_id, data_address=self._data_address())
            # Last: what is opened after it is told to whom this returns.
            await self._tell_all(child)
        except BaseException:
            await child.end()
            raise
        return child

    async def _tell_all(self, child: Child) -> None:
        """It knows the transfers that are open now."""
        told: set[str] = set()
        while untold := self._transfers.keys() - told:
            for transfer_id in untold:
                blocks = self._transfers.get(transfer_id)
                if blocks is not None:  # else closed meanwhile
                    told.add(transfer_id)
                    child.send(op="open", id=transfer_id, blocks=blocks)
                    await asyncio.wait_for(child.drain(), _START_SECONDS)
        for transfer_id in told - self._transfers.keys():
            child.send(op="close", id=transfer_id)

    def _hear(self, message: Message) -> None:
        self.num_heard += 1
        if message["op"] == "pulled":
            self.pulled_bytes += message["bytes"]
        elif message["op"] == "sums":
            self.on_summed(message["id"], message["ids"], message["sums"])
        elif message["op"] == "ask":
            transfer_id = message["id"]
            if (blocks := self._transfers.get(transfer_id)) is None:
                self._tell(op="unknown", id=transfer_id)
            else:
                self._tell(op="open", id=transfer_id, blocks=blocks)
        elif message["op"] == "nixl":
            self._reach = pb.Reach(
                host_id=self._host_id,
                data_address=self._data_address(),
                nixl_agent=message["agent"],
                nixl_regions=[
                    pb.NixlRegion(kind=kind, device=device, address=address, nbytes=nbytes)
                    for kind, device, address, nbytes in message["regions"]
                ],
            )

    async def _watch(self, child: Child, complete: asyncio.Event) -> None:
        """Kill it once it has said nothing for too long; before it is ``complete``, much longer.

        While NIXL pins a large pool, nothing else may run there. Afterwards in beats, not by
        the clock: when the node itself stood still, what was said meanwhile is heard within one.
        """
        missed = 0
        try:
            await asyncio.wait_for(complete.wait(), self._config.pull_start_seconds)
        except asyncio.TimeoutError:
            missed = _MISSED_MAX
        while missed < _MISSED_MAX:
            num_heard = self.num_heard
            await asyncio.sleep(self._config.pull_heartbeat_seconds)
            missed = missed + 1 if num_heard == self.num_heard else 0
        logger.error("pid %d says nothing any more; it is killed", child.pid)
        child.kill()

    async def _supervise(self, child: Child) -> None:
        """Read what the process says, and start another when it dies."""
        pause = _PAUSE_SECONDS
        while True:
            began = time.monotonic()
            complete = asyncio.Event()
            watching = asyncio.ensure_future(self._watch(child, complete))
            try:
                while (message := await child.receive()) is not None:
                    self._hear(message)
                    if message["op"] == "complete":
                        complete.set()
            except Exception:
                logger.exception("what the process that serves PullBlocks says is not understood")
            finally:
                watching.cancel()
            self._serving = None
            self._reach = pb.Reach(host_id=self._host_id, data_address=self._data_address())
            try:
                await child.end()
            except Exception:  # it only reads the pool: another may begin before it is gone
                logger.exception("pid %d does not end", child.pid)
            if time.monotonic() - began > _LIVED_SECONDS:
                pause = _PAUSE_SECONDS
            logger.error("the process that serves PullBlocks (pid %d) has ended", child.pid)
            while self._serving is None:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _PAUSE_SECONDS_MAX)
                try:
                    self._serving = child = await self._spawn(any_port=True)
                except (Unavailable, ConfigError, OSError) as error:
                    logger.error("PullBlocks is not served: %s", error)
                except Exception:
                    logger.exception("PullBlocks is not served")
            logger.warning("another serves PullBlocks now (pid %d)", child.pid)

    # --- addresses --------------------------------------------------------------------

    def _data_address(self) -> str:
        config = self._config
        if config.advertise_data_address:
            return config.advertise_data_address
        listen_host, _ = split_address(config.listen, option="--listen")
        host = self._listen_host
        if host in (listen_host, "0.0.0.0", "::"):
            return f":{self._port}"
        return f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"

    def _nixl_devices(self) -> str:
        """For UCX_NET_DEVICES; empty: no NIXL.

        Whoever reaches an agent and knows its metadata may read and write the pool: it
        listens where it was told to, or on loopback.
        """
        devices = self._config.nixl_devices
        if devices == "none":
            return ""
        return devices or ("lo" if is_loopback(self._listen_host) else "")


def data_listen(config: ServerConfig) -> tuple[str, int]:
    """Host and port of PullBlocks: of --data-listen, else the host of --listen."""
    if config.data_listen:
        return split_address(config.data_listen, option="--data-listen")
    return split_address(config.listen, option="--listen")[0], 0
