"""KVAdminService: what operators ask."""

from __future__ import annotations

import time

from kvcore.errors import InvalidArgument
from kvcore.listing import RequestInfo
from kvdepot.v1 import admin_pb2 as pb
from kvserver import convert
from kvserver.node import ListedSession, Node
from kvserver.rpc import Handler, Rpcs
from kvserver.transfers import ListedTransfer

SERVICE = pb.DESCRIPTOR.services_by_name["KVAdminService"].full_name


PAGE_SIZE = 100
PAGE_SIZE_MAX = 1000
_STATES = {
    "WAITING": pb.REQUEST_STATE_WAITING,
    "RUNNING": pb.REQUEST_STATE_RUNNING,
    "PREEMPTED": pb.REQUEST_STATE_PREEMPTED,
}


class AdminService:
    """Looks at the state, and does the few things that are an operator's."""

    def __init__(self, node: Node, rpcs: Rpcs) -> None:
        self._node = node
        self._rpcs = rpcs

    def handlers(self) -> dict[str, Handler]:
        """The service's methods by name."""
        unary = self._rpcs.unary
        return {
            "GetStats": unary("GetStats", pb.GetStatsRequest, self.get_stats),
            "ListSessions": unary("ListSessions", pb.ListSessionsRequest, self.list_sessions),
            "ListRequests": unary("ListRequests", pb.ListRequestsRequest, self.list_requests),
            "ListTransfers": unary("ListTransfers", pb.ListTransfersRequest, self.list_transfers),
            "EvictBlocks": unary("EvictBlocks", pb.EvictBlocksRequest, self.evict_blocks),
            "Audit": unary("Audit", pb.AuditRequest, self.audit),
            "Drain": unary("Drain", pb.DrainRequest, self.drain),
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
                live=stats.live,
                cached=stats.cached,
                pinned=stats.pinned,
                in_transfer=stats.in_transfer,
                quarantined=stats.quarantined,
                free=stats.free,
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
            num_departed_sessions=stats.num_departed_sessions,
            num_workers=stats.num_workers,
            reset_pending=stats.reset_pending,
            num_transfers=len(node.transfers),
            num_imports=len(node.imports),
        ).SerializeToString()

    def list_sessions(self, _: pb.ListSessionsRequest) -> bytes:
        """ListSessions."""
        node = self._node
        return pb.ListSessionsResponse(
            sessions=[_session(listed) for listed in node.list_sessions()],
            epoch=node.depot.epoch,
        ).SerializeToString()

    def list_requests(self, request: pb.ListRequestsRequest) -> bytes:
        """ListRequests. A page token is the handle of the page's last request."""
        token = request.page_token
        if token and not (token.isascii() and token.isdigit() and len(token) <= 20):
            raise InvalidArgument("no page has this token", field="page_token")
        limit = min(request.page_size or PAGE_SIZE, PAGE_SIZE_MAX)
        depot = self._node.depot
        # One more than a page, to know whether it is the last.
        found = depot.list_requests(request.session_id or None, limit + 1, int(token or 0))
        page = found[:limit]
        return pb.ListRequestsResponse(
            requests=[_request(info) for info in page],
            next_page_token=str(page[-1].handle) if len(found) > limit else "",
            epoch=depot.epoch,
        ).SerializeToString()

    def list_transfers(self, _: pb.ListTransfersRequest) -> bytes:
        """ListTransfers."""
        node = self._node
        return pb.ListTransfersResponse(
            transfers=[
                _transfer(listed) for listed in (*node.transfers.listed(), *node.imports.listed())
            ],
            epoch=node.depot.epoch,
        ).SerializeToString()

    def evict_blocks(self, request: pb.EvictBlocksRequest) -> bytes:
        """EvictBlocks."""
        num_blocks = self._node.pool.num_blocks
        if len(request.block_ids) > num_blocks:  # others wait for each of them
            raise InvalidArgument(
                f"{len(request.block_ids)} ids are more than the pool has blocks",
                field="block_ids",
            )
        for position, block_id in enumerate(request.block_ids):
            if not 1 <= block_id < num_blocks:
                raise InvalidArgument(
                    f"block ids are from 1 to {num_blocks - 1}, not {block_id}",
                    field=f"block_ids[{position}]",
                )
        return pb.EvictBlocksResponse(
            num_evicted=self._node.evict_blocks(request.block_ids), epoch=self._node.depot.epoch
        ).SerializeToString()

    def audit(self, _: pb.AuditRequest) -> bytes:
        """Audit."""
        stats = self._node.depot.stats()
        return pb.AuditResponse(
            violations=self._node.depot.audit(),
            num_blocks_checked=stats.num_blocks,
            num_requests_checked=stats.num_requests,
            holders=convert.block_holders(self._node.depot.holders()),
        ).SerializeToString()

    def drain(self, _: pb.DrainRequest) -> bytes:
        """Drain."""
        node = self._node
        node.drain()
        return pb.DrainResponse(
            num_sessions=len(node.depot.sessions), epoch=node.depot.epoch
        ).SerializeToString()


def _session(listed: ListedSession) -> pb.SessionInfo:
    info = listed.info
    return pb.SessionInfo(
        session_id=info.session_id,
        name=info.name,
        state=pb.SESSION_STATE_DEPARTED if info.departed else pb.SESSION_STATE_OPEN,
        age_seconds=listed.age_seconds,
        lease_ttl_seconds=listed.lease_ttl_seconds,
        lease_remaining_seconds=listed.lease_remaining_seconds,
        num_requests=info.num_requests,
        num_tokens=info.num_tokens,
        num_blocks=info.num_blocks,
        num_quarantined_blocks=info.num_quarantined_blocks,
        num_tickets=info.num_tickets,
        num_workers=info.num_workers,
        step=info.step,
        completed_step=info.completed_step,
    )


def _transfer(listed: ListedTransfer) -> pb.TransferInfo:
    return pb.TransferInfo(
        transfer=listed.shown_id,
        name=listed.name,
        direction=pb.TRANSFER_DIRECTION_IN if listed.is_import else pb.TRANSFER_DIRECTION_OUT,
        age_seconds=listed.age_seconds,
        lease_remaining_seconds=listed.lease_remaining_seconds,
        num_blocks=listed.num_blocks,
        num_bytes=listed.num_bytes,
        num_blocks_done=listed.num_blocks_done,
        num_bytes_done=listed.num_bytes_done,
    )


def _request(info: RequestInfo) -> pb.RequestInfo:
    return pb.RequestInfo(
        session_id=info.session_id,
        request_id=info.request_id,
        handle=info.handle,
        state=_STATES[info.status],
        num_tokens=info.num_tokens,
        num_prompt_tokens=info.num_prompt_tokens or 0,
        num_computed_tokens=info.num_computed_tokens,
        num_blocks=info.num_blocks,
        num_preemptions=info.num_preemptions,
        lora_name=info.lora_name,
        outlived_reset=info.outlived_reset,
    )
