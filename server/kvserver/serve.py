"""``kvdepot serve``: starts a node, announces it, and stops it gracefully."""

from __future__ import annotations

import asyncio
import gc
import logging
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import uvloop

from kvcore.depot import Depot
from kvcore.errors import KVDepotError, Unavailable
from kvcore.memory import PoolMemory
from kvcore.spec import why_never_hit
from kvserver import admin, cache, event, headroom, health, reflect, sockets, transfer
from kvserver.address import split_address
from kvserver.config import ConfigError, ServerConfig
from kvserver.data_plane import DataPlane
from kvserver.deadlines import Clock
from kvserver.metrics import DepotCollector, MetricsServer
from kvserver.mover.handle import MoverHandle
from kvserver.node import Node, SessionPolicy, TransferPolicy
from kvserver.option import flag_of
from kvserver.pool_memory import make_memory, tell_where
from kvserver.publisher import Publisher
from kvserver.rpc import Rpcs, register
from kvserver.sources import parse

logger = logging.getLogger(__name__)

_DRAIN_POLL_SECONDS = 0.05
_LINGER_SECONDS = 0.1
_STOP_SECONDS = 1.0


class Server:
    """A running node. ``await start()``, then ``await stop()``, on one event loop.

    ``clock`` is what leases run by, the event loop's unless given. ``make_data_plane``
    makes what moves bytes.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        clock: Clock | None = None,
        make_data_plane: Callable[[ServerConfig, PoolMemory], DataPlane] = MoverHandle,
    ) -> None:
        self.config = config
        self.port = 0
        self.metrics_port: int | None = None
        depot_config = config.depot_config()
        reason = why_never_hit(depot_config)
        if reason is not None:
            logger.warning("no request can ever hit the prefix cache: %s", reason)
        headroom.require_room(depot_config, config.max_books_bytes)
        # Before the books are made, so that a pool that does not fit is refused at once.
        keeps_bytes = not config.no_memory and depot_config.kv_cache.block_bytes > 0
        memory = make_memory(config, depot_config) if keeps_bytes else None
        try:
            poison = memory.poison if config.poison and memory is not None else None
            depot = Depot(depot_config, poison=poison)
            data_plane = None
            if memory is not None:
                data_plane = make_data_plane(config, memory)
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
                history_bytes=config.event_history_bytes,
                queue_batches=config.event_queue,
                queue_bytes=config.event_queue_bytes,
                subscribers_max=config.max_subscribers,
                heartbeat_seconds=config.event_heartbeat_seconds,
            ),
            SessionPolicy(
                reply_window=config.reply_window,
                reply_window_bytes=config.reply_window_bytes,
                reply_windows_bytes=config.reply_windows_bytes,
                ended_sessions_kept=config.ended_sessions_kept,
                lease_ttl_seconds=config.lease_ttl_seconds,
                lease_ttl_seconds_max=config.lease_ttl_seconds_max,
                quarantine_seconds=config.quarantine_seconds,
                reset_deadline_seconds=config.reset_deadline_seconds,
                worker_heartbeat_seconds=config.worker_heartbeat_seconds,
            ),
            TransferPolicy(
                lease_ttl_seconds=config.transfer_ttl_seconds,
                lease_ttl_seconds_max=config.transfer_ttl_seconds_max,
                import_seconds_max=config.import_seconds_max,
            ),
            data_plane=data_plane,
            clock=clock,
        )
        self._rpcs = Rpcs(
            depot.epoch,
            streams_max=config.max_concurrent_streams,
            unread_bytes_max=config.max_unread_bytes,
            message_bytes_max=config.max_message_bytes,
        )
        self._cache = cache.CacheService(
            self.node, self._rpcs, step_operations_max=config.max_step_operations
        )
        self._metrics: MetricsServer | None = None

    async def start(self) -> None:
        """Bind everything and serve. Raises ConfigError for an address that cannot be had."""
        try:
            await self._start()
        except BaseException:
            await self._close_memory()
            raise

    async def _start(self) -> None:
        config, node, rpcs = self.config, self.node, self._rpcs
        services = {
            cache.SERVICE: self._cache.handlers(),
            event.SERVICE: event.EventService(node, rpcs).handlers(),
            transfer.SERVICE: transfer.TransferService(
                node,
                rpcs,
                stall_seconds=config.pull_stall_seconds,
                contents_max=config.max_transfer_contents,
                message_bytes_max=config.max_message_bytes,
            ).handlers(),
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
        metrics_host = config.metrics_host or host
        advice = "stop the server that listens there, or give another HOST:PORT"
        sockets.require_port(host, port, option="--listen", advice=advice)
        if config.uds:
            sockets.require_path(Path(config.uds))
        if not config.no_metrics:
            advice = "give another port, 0 for a free one, or --no-metrics"
            sockets.require_port(
                metrics_host, config.metrics_port, option="--metrics-port", advice=advice
            )
        self.port = self._bind(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "--listen")
        if not config.no_metrics:
            collector = DepotCollector(node, rpcs, asyncio.get_running_loop())
            try:
                self._metrics = MetricsServer(collector, metrics_host, config.metrics_port)
            except OSError as error:
                raise ConfigError(
                    f"--metrics-port: {metrics_host}:{config.metrics_port}: {error.strerror}"
                ) from None
            self.metrics_port = self._metrics.port
        if config.uds:
            self._bind(f"unix:{config.uds}", "--uds")
            Path(config.uds).chmod(0o660)
        if node.data_plane is not None:
            try:
                await node.data_plane.start()
            except Unavailable as error:
                assert node.memory is not None
                if node.memory.path:
                    raise
                # Schedulers and workers do without.
                logger.error("no bytes are moved between servers: %s", error.message)
                await node.data_plane.close()
                node.data_plane = None
        await self._grpc.start()
        if node.memory is not None:
            tell_where(config, node.memory)

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
            f"blocks={self.node.pool.num_blocks} {self._pool_shown()}"
        )

    def _pool_shown(self) -> str:
        depot_config, memory = self.node.depot.config, self.node.memory
        return (
            f"bytes={0 if memory is None else memory.nbytes} "
            f"device={'none' if memory is None else ','.join(map(str, self.config.device))} "
            f"model={shlex.quote(depot_config.model or 'unnamed')} "
            f"groups={len(depot_config.kv_cache.groups)} fingerprint={depot_config.fingerprint}"
        )

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """Refuse new sessions and transfers, give open ones the grace, end them, stop, unlink.

        Setting ``hurry`` ends the grace at once.
        """
        loop = asyncio.get_running_loop()
        self.node.drain()
        self._health.stop()
        deadline = loop.time() + self.config.drain_grace_seconds
        while self.node.is_in_use and loop.time() < deadline:
            if hurry is not None and hurry.is_set():
                break
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        if left := self.node.in_use():
            logger.warning("ended with the grace: %s", "; ".join(left))
        self.node.end_streams()
        self._cache.end_streams()
        self._health.end_streams()
        if self._rpcs.num_streams:
            # A client that finds its connection gone does not read why its stream ended.
            await asyncio.sleep(_LINGER_SECONDS)
        await self.node.imports.close(_STOP_SECONDS)
        await self._grpc.stop(_STOP_SECONDS)
        self.node.close()
        if self._metrics is not None:
            await loop.run_in_executor(None, self._metrics.close)
        if self.config.uds:
            Path(self.config.uds).unlink(missing_ok=True)
        await self._close_memory()

    async def _close_memory(self) -> None:
        """The process that moves bytes first: it maps them."""
        if self.node.data_plane is not None:
            await self.node.data_plane.close()
        if self.node.memory is not None:
            self.node.memory.close()


def _channel_options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        # What is beyond waits in the client, which is told the number when it connects.
        ("grpc.max_concurrent_streams", config.max_calls_per_connection),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        # Else whoever connects and asks nothing could keep the others out.
        ("grpc.max_connection_idle_ms", round(config.connection_idle_seconds * 1000)),
        # Bursts are queued, not cancelled.
        ("grpc.server.max_pending_requests", 1 << 20),
        # Clients may ping every 10 s, idle or not.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        # A peer that vanished is noticed within a minute.
        ("grpc.keepalive_time_ms", 40_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


async def _serve(config: ServerConfig) -> None:
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    server = Server(config)
    await server.start()
    # The books stay as long as the process: a collection that walks those of 131,928
    # blocks stops everything for 55 ms.
    gc.collect()
    gc.freeze()
    print(server.ready_line(), flush=True)
    drained = asyncio.create_task(_drained(server, stopping))
    await stopping.wait()
    drained.cancel()
    if waited_for := server.node.in_use():
        logger.info(
            "stopping: these get %g s to end, another signal skips that: %s",
            *(config.drain_grace_seconds, "; ".join(waited_for)),
        )
    else:
        logger.info("stopping")
    await server.stop(hurry)


async def _drained(server: Server, stopping: asyncio.Event) -> None:
    """An operator's Drain stops the server as a signal does."""
    await server.node.drain_requested.wait()
    stopping.set()


def main(config: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT; a second one skips the grace. Returns the exit status.

    Raises ConfigError for what cannot be had: an address, memory.
    """
    try:
        uvloop.run(_serve(config))
    except KVDepotError as error:
        is_option = error.field in ServerConfig.__slots__
        where = f"{flag_of(error.field)}: " if is_option else ""
        raise ConfigError(where + error.message) from error
    return 0


def run(argv: Sequence[str]) -> int:
    """``main`` from a command line; a configuration error is one line and status 2."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        return main(parse(argv))
    except ConfigError as error:
        print(f"kvdepot serve: {error}", file=sys.stderr)
        return 2
