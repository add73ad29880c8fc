"""KVAdminService: what operators ask."""

from __future__ import annotations

import time

from kvdepot.v1 import admin_pb2 as pb
from kvserver.node import Node
from kvserver.rpc import Handler, Rpcs

SERVICE = pb.DESCRIPTOR.services_by_name["KVAdminService"].full_name


class AdminService:
    """Looks, and changes nothing."""

    def __init__(self, node: Node, rpcs: Rpcs) -> None:
        self._node = node
        self._rpcs = rpcs

    def handlers(self) -> dict[str, Handler]:
        """The service's methods by name."""
        return {
            "GetStats": self._rpcs.unary("GetStats", pb.GetStatsRequest, self.get_stats),
            "Audit": self._rpcs.unary("Audit", pb.AuditRequest, self.audit),
        }

    def get_stats(self, _: pb.GetStatsRequest) -> bytes:
        """GetStats."""
        node = self._node
        stats = node.depot.stats()
        return pb.GetStatsResponse(
            epoch=node.depot.epoch,
            uptime_seconds=time.monotonic() - node.started,
            num_blocks=stats.num_blocks,
            blocks=pb.BlockStates(
                live=stats.live, cached=stats.cached, quarantined=stats.quarantined, free=stats.free
            ),
            usage=stats.usage,
            num_sessions=stats.num_sessions,
            num_requests=stats.num_requests,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            preempted_queries=stats.preempted_queries,
            preempted_hits=stats.preempted_hits,
            evictions=stats.evictions,
            generation=stats.generation,
            next_event_sequence=node.publisher.next_sequence,
            pulled_bytes=node.pulled_bytes,
            num_event_subscribers=node.publisher.num_subscribers,
        ).SerializeToString()

    def audit(self, _: pb.AuditRequest) -> bytes:
        """Audit."""
        stats = self._node.depot.stats()
        return pb.AuditResponse(
            violations=self._node.depot.audit(),
            num_blocks_checked=stats.num_blocks,
            num_requests_checked=stats.num_requests,
        ).SerializeToString()
