"""The standard health service (grpc.health.v1), for any number of watchers."""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health_pb2 as pb

from kvcore.errors import NotFound
from kvserver.rpc import Context, Handler, Rpcs

SERVICE = pb.DESCRIPTOR.services_by_name["Health"].full_name


class HealthService:
    """One status for the server and each of ``services``; SERVING until ``stop``."""

    def __init__(self, services: tuple[str, ...], rpcs: Rpcs) -> None:
        self._services = ("", *services)
        self._rpcs = rpcs
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    def handlers(self) -> dict[str, Handler]:
        """The service's methods by name."""
        rpcs = self._rpcs
        return {
            "Check": rpcs.unary("Check", pb.HealthCheckRequest, self._check),
            "Watch": rpcs.server_stream("Watch", pb.HealthCheckRequest, self._watch),
        }

    def stop(self) -> None:
        """Everything is NOT_SERVING from now on; watchers are told."""
        self._stopping.set()

    def end_streams(self) -> None:
        """End every Watch."""
        self._stopping.set()
        self._ended.set()

    def _status(self, service: str) -> bytes:
        if service not in self._services:
            status = pb.HealthCheckResponse.SERVICE_UNKNOWN
        elif self._stopping.is_set():
            status = pb.HealthCheckResponse.NOT_SERVING
        else:
            status = pb.HealthCheckResponse.SERVING
        reply: bytes = pb.HealthCheckResponse(status=status).SerializeToString()
        return reply

    def _check(self, request: pb.HealthCheckRequest) -> bytes:
        if request.service not in self._services:
            raise NotFound("no such service", reason="SERVICE_UNKNOWN", field="service")
        return self._status(request.service)

    async def _watch(self, request: pb.HealthCheckRequest, context: Context) -> None:
        told = self._status(request.service)
        await context.write(told)
        await self._stopping.wait()
        if (now := self._status(request.service)) != told:
            await context.write(now)
        await self._ended.wait()
