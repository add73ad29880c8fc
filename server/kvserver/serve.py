"""``kvdepot serve``: starts a node, announces it, and stops it gracefully."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
import uvloop

from kvcore.depot import Depot
from kvcore.errors import KVDepotError
from kvcore.memory import PoolMemory, remove_abandoned
from kvcore.spec import why_never_hit
from kvserver import admin, cache, event, health, reflect, transfer
from kvserver.config import ConfigError, ServerConfig, parse, split_address
from kvserver.metrics import DepotCollector, MetricsServer
from kvserver.node import Node
from kvserver.publisher import Publisher
from kvserver.rpc import Rpcs, register

logger = logging.getLogger(__name__)

_DRAIN_POLL_SECONDS = 0.05
_STOP_SECONDS = 1.0


class Server:
    """A running node. ``await start()``, then ``await stop()``, on one event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.port = 0
        self.metrics_port: int | None = None
        depot_config = config.depot_config()
        reason = why_never_hit(depot_config)
        if reason is not None:
            logger.warning("no request can ever hit the prefix cache: %s", reason)
        # First of all, so that a pool that does not fit is refused at once.
        memory = None
        if not config.no_memory and depot_config.kv_cache.block_bytes:
            name = f"{os.getpid()}-{secrets.token_hex(4)}"
            try:
                for path in remove_abandoned(config.mapping_directory()):
                    logger.info("removed %s, which a server that died had left", path)
                memory = PoolMemory(depot_config, config.mapping_directory(), name=name)
            except OSError as error:
                raise ConfigError(f"--mapping-dir: {error}") from None
        try:
            depot = Depot(depot_config)
        except BaseException:
            if memory is not None:
                memory.close()
            raise
        self.node = Node(
            depot,
            memory,
            Publisher(
                depot.epoch,
                history_events=config.event_history,
                queue_batches=config.event_queue,
                subscribers_max=config.max_subscribers,
                heartbeat_seconds=config.event_heartbeat_s,
            ),
            reply_window=config.reply_window,
        )
        self._rpcs = Rpcs(depot.epoch)
        self._cache = cache.CacheService(self.node, self._rpcs)
        self._metrics: MetricsServer | None = None

    async def start(self) -> None:
        """Bind everything and serve. Raises ConfigError for an address that cannot be had."""
        try:
            await self._start()
        except BaseException:
            self._close_memory()
            raise

    async def _start(self) -> None:
        config, node, rpcs = self.config, self.node, self._rpcs
        services = {
            cache.SERVICE: self._cache.handlers(),
            event.SERVICE: event.EventService(node, rpcs).handlers(),
            transfer.SERVICE: transfer.TransferService(node, rpcs).handlers(),
            admin.SERVICE: admin.AdminService(node, rpcs).handlers(),
        }
        self._health = health.HealthService(tuple(services), rpcs)
        self._grpc = grpc.aio.server(options=_channel_options(config))
        for name, handlers in services.items():
            register(self._grpc, name, handlers)
        register(self._grpc, health.SERVICE, self._health.handlers())
        names = (*services, health.SERVICE, reflect.SERVICE)
        register(self._grpc, reflect.SERVICE, reflect.handlers(names))
        host, port = split_address(config.listen, option="--listen")
        self.port = self._bind(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "--listen")
        if config.uds:
            _require_free(Path(config.uds))
            self._bind(f"unix:{config.uds}", "--uds")
            Path(config.uds).chmod(0o660)
        if not config.no_metrics:
            collector = DepotCollector(node, rpcs, asyncio.get_running_loop())
            try:
                self._metrics = MetricsServer(
                    collector, config.metrics_host or host, config.metrics_port
                )
            except OSError as error:
                raise ConfigError(f"--metrics-port: {error}") from None
            self.metrics_port = self._metrics.port
        await self._grpc.start()

    def _bind(self, address: str, option: str) -> int:
        try:
            return self._grpc.add_insecure_port(address)
        except RuntimeError:
            raise ConfigError(f"{option}: cannot bind {address}; is it in use?") from None

    def ready_line(self) -> str:
        """What ``serve`` prints once it serves."""
        host, _ = split_address(self.config.listen, option="--listen")
        metrics_host = self.config.metrics_host or host
        metrics = "off" if self.metrics_port is None else f"{metrics_host}:{self.metrics_port}"
        return (
            f"kvdepot ready grpc={host}:{self.port} uds={self.config.uds or 'off'} "
            f"metrics={metrics} epoch={self.node.depot.epoch} "
            f"blocks={self.node.pool.num_blocks}"
        )

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """Refuse new sessions, give open ones the grace, end streams, stop, unlink.

        Setting ``hurry`` ends the grace at once.
        """
        loop = asyncio.get_running_loop()
        self.node.draining = True
        self._health.stop()
        deadline = loop.time() + self.config.drain_grace_s
        while self.node.depot.sessions and loop.time() < deadline:
            if hurry is not None and hurry.is_set():
                break
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        self.node.draining_streams = True
        self._cache.end_streams()
        self.node.publisher.close()
        self._health.end_streams()
        await self._grpc.stop(_STOP_SECONDS)
        if self._metrics is not None:
            await loop.run_in_executor(None, self._metrics.close)
        if self.config.uds:
            Path(self.config.uds).unlink(missing_ok=True)
        self._close_memory()

    def _close_memory(self) -> None:
        if self.node.memory is not None:
            self.node.memory.close()


def _channel_options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        # Bursts are queued, not cancelled.
        ("grpc.server.max_pending_requests", 1 << 20),
        # Clients may ping every 10 s, idle or not.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        # A peer that vanished is noticed within a minute.
        ("grpc.keepalive_time_ms", 40_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


def _require_free(path: Path) -> None:
    """A socket left behind by a dead server is no obstacle; a live server's, or a file, is."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--uds: {path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        else:
            raise ConfigError(f"--uds: {path} is served already")


async def _serve(config: ServerConfig) -> None:
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    server = Server(config)
    await server.start()
    print(server.ready_line(), flush=True)
    await stopping.wait()
    logger.info("stopping")
    await server.stop(hurry)


def main(config: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT; a second one skips the grace. Returns the exit status.

    Raises ConfigError for what cannot be had: an address, memory.
    """
    try:
        uvloop.run(_serve(config))
    except KVDepotError as error:
        raise ConfigError(error.message) from error
    return 0


def run(argv: Sequence[str]) -> int:
    """``main`` from a command line; a configuration error is one line and status 2."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        return main(parse(argv))
    except ConfigError as error:
        print(f"kvdepot serve: {error}", file=sys.stderr)
        return 2
