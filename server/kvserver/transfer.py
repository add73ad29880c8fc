"""KVTransferService: where the bytes are, and the bytes."""

from __future__ import annotations

import zlib

from kvcore.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from kvcore.hashing import make_scheme
from kvcore.memory import PoolMemory
from kvdepot.v1 import transfer_pb2 as pb
from kvserver.node import Node
from kvserver.rpc import Context, Handler, Rpcs, write

SERVICE = pb.DESCRIPTOR.services_by_name["KVTransferService"].full_name

MESSAGE_BYTES = 1 << 20
MESSAGE_BLOCKS_MAX = 4096

_STATUSES = {
    "ready": pb.BLOCK_STATUS_READY,
    "pending": pb.BLOCK_STATUS_PENDING,
    "missing": pb.BLOCK_STATUS_MISSING,
}


class TransferService:
    """Describes the pool and copies blocks out of it."""

    def __init__(
        self, node: Node, rpcs: Rpcs, *, pulls_max: int, blocks_max: int, stall_seconds: float
    ) -> None:
        self._node = node
        self._rpcs = rpcs
        self._num_pulls = 0
        self._pulls_max = pulls_max
        self._blocks_max = blocks_max
        self._stall_seconds = stall_seconds
        config = node.depot.config
        self._hash_bytes = make_scheme(config.hash_scheme, config.hash_seed).digest_size
        self._block_bytes = [
            config.num_ranks * group.block_bytes for group in config.kv_cache.groups
        ]

    def handlers(self) -> dict[str, Handler]:
        """The service's methods by name."""
        rpcs = self._rpcs
        return {
            "DescribePool": rpcs.unary("DescribePool", pb.DescribePoolRequest, self.describe_pool),
            "AttachWorker": rpcs.server_stream(
                "AttachWorker", pb.AttachWorkerRequest, self._attach_worker
            ),
            "PullBlocks": rpcs.server_stream("PullBlocks", pb.PullBlocksRequest, self._pull_blocks),
        }

    def describe_pool(self, _: pb.DescribePoolRequest) -> bytes:
        """DescribePool."""
        return pb.DescribePoolResponse(
            pool=self._node.pool, epoch=self._node.depot.epoch
        ).SerializeToString()

    async def _attach_worker(self, request: pb.AttachWorkerRequest, context: Context) -> None:
        """Lasts until the worker is gone or the server stops; an ended session is only told."""
        node = self._node
        node.require_streams()
        session = node.session(request.session_id, request.epoch, within="")
        worker = node.attach_worker(session, request.name)
        heartbeat = node.policy.worker_heartbeat_seconds
        try:
            while True:
                message = pb.AttachWorkerResponse(
                    epoch=node.depot.epoch,
                    heartbeat_seconds=heartbeat,
                    session_ended=worker.session_ended,
                )
                await context.write(message.SerializeToString())
                await worker.wait(heartbeat)
                node.require_streams()
        finally:
            node.detach_worker(worker)

    async def _pull_blocks(self, request: pb.PullBlocksRequest, context: Context) -> None:
        memory = self._check(request)
        if self._num_pulls >= self._pulls_max:
            raise ResourceExhausted(
                f"{self._num_pulls} pulls are under way, the maximum",
                reason="TOO_MANY_PULLS",
                retryable=True,
            )
        self._num_pulls += 1
        try:
            start = 0
            while start < len(request.block_hashes):
                # Synchronous, so that no block changes between its look-up and its copy.
                message, start = self._message(request, memory, start)
                await write(context, message, seconds=self._stall_seconds)
        finally:
            self._num_pulls -= 1

    def _check(self, request: pb.PullBlocksRequest) -> PoolMemory:
        node = self._node
        if request.fingerprint and request.fingerprint != node.pool.fingerprint:
            raise FailedPrecondition(
                "the pool holds other content than the fingerprint names",
                reason="FINGERPRINT_MISMATCH",
                field="fingerprint",
            )
        if request.group >= len(self._block_bytes):
            raise InvalidArgument(f"there is no group {request.group}", field="group")
        if len(request.block_hashes) > self._blocks_max:
            raise ResourceExhausted(
                f"{len(request.block_hashes)} hashes are more than {self._blocks_max} a call",
                reason="TOO_MANY_BLOCKS",
                field="block_hashes",
            )
        for position, block_hash in enumerate(request.block_hashes):
            if len(block_hash) != self._hash_bytes:
                raise InvalidArgument(
                    f"a hash has {self._hash_bytes} bytes ({2 * self._hash_bytes} hex digits), "
                    f"got {len(block_hash)}",
                    field=f"block_hashes[{position}]",
                )
        if node.memory is None:
            raise FailedPrecondition("the server keeps no bytes", reason="NO_MEMORY")
        return node.memory

    def _message(
        self, request: pb.PullBlocksRequest, memory: PoolMemory, start: int
    ) -> tuple[bytes, int]:
        """One message's bytes, from the hash at ``start``, and where the next begins."""
        group = request.group
        block_bytes = self._block_bytes[group]
        statuses: list[pb.BlockStatus] = []
        pages: list[bytes] = []
        checksums: list[int] = []
        stop = min(len(request.block_hashes), start + MESSAGE_BLOCKS_MAX)
        position = start
        while position < stop:
            if pages and (len(pages) + 1) * block_bytes > MESSAGE_BYTES:
                break
            status, block_id = self._node.depot.locate(request.block_hashes[position], group)
            statuses.append(_STATUSES[status])
            if status == "ready":
                assert block_id is not None
                page = memory.block_pages(block_id, group)
                pages.append(page)
                if request.checksums:
                    checksums.append(zlib.crc32(page))
            position += 1
        data = b"".join(pages)
        self._node.pulled_bytes += len(data)
        response = pb.PullBlocksResponse(
            first_index=start, statuses=statuses, data=data, checksums=checksums
        )
        return response.SerializeToString(), position
