"""KVTransferService: where the bytes are, who may read them, and pulls from peers."""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence

from google.protobuf.message import Message

from kvcore.depot import Depot, check_name
from kvcore.errors import InvalidArgument
from kvcore.import_job import Import
from kvcore.session import Session
from kvcore.transfer import BlockLimit, GroupHashes, Transfer
from kvdepot.v1 import transfer_pb2 as pb
from kvserver.contents import add_contents, too_many_contents
from kvserver.imports import RunningImport
from kvserver.node import Node
from kvserver.rpc import Context, Handler, Rpcs, write

SERVICE = pb.DESCRIPTOR.services_by_name["KVTransferService"].full_name
# Of an answer, beside its groups: ids, the lease, where the bytes are.
_ANSWER_BYTES = 1 << 12


class TransferService:
    """What workers and peers ask of the node; PullBlocks is not served here."""

    def __init__(
        self,
        node: Node,
        rpcs: Rpcs,
        *,
        stall_seconds: float,
        contents_max: int,
        message_bytes_max: int,
    ) -> None:
        self._node = node
        self._rpcs = rpcs
        self._stall_seconds = stall_seconds
        self._contents_limit = BlockLimit(
            contents_max, lambda num_blocks: too_many_contents(num_blocks, contents_max)
        )
        self._message_bytes_max = message_bytes_max

    def handlers(self) -> dict[str, Handler]:
        """The service's methods by name."""
        rpcs = self._rpcs
        return {
            "DescribePool": rpcs.unary("DescribePool", pb.DescribePoolRequest, self.describe_pool),
            "AttachWorker": rpcs.server_stream(
                "AttachWorker", pb.AttachWorkerRequest, self._attach_worker
            ),
            "OpenTransfer": rpcs.unary("OpenTransfer", pb.OpenTransferRequest, self.open_transfer),
            "RenewTransfer": rpcs.unary(
                "RenewTransfer", pb.RenewTransferRequest, self.renew_transfer
            ),
            "CloseTransfer": rpcs.unary(
                "CloseTransfer", pb.CloseTransferRequest, self.close_transfer
            ),
            "ImportBlocks": rpcs.server_stream(
                "ImportBlocks", pb.ImportBlocksRequest, self._import_blocks
            ),
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

    # --- transfers --------------------------------------------------------------------

    async def open_transfer(self, request: pb.OpenTransferRequest) -> bytes:
        """OpenTransfer."""
        node, depot = self._node, self._node.depot
        node.require_not_draining()
        data_plane = node.require_data_plane()
        depot.require_fingerprint(request.fingerprint)
        check_name(request.name)
        limit = self._contents_limit if request.contents else None

        def opening() -> Generator[Transfer, None, Transfer]:
            session = self._session_of(request)
            if session is None:
                groups = _groups(request.groups, depot)
                return (
                    yield from depot.transfers.opening_hashes(request.name, groups, limit=limit)
                )
            request_id = request.request.request_id
            return depot.transfers.open_request(request.name, session, request_id, limit=limit)

        has_ttl = request.HasField("lease_ttl_seconds")
        ttl = request.lease_ttl_seconds if has_ttl else None
        transfer = await node.transfers.open(opening(), ttl)
        transfer_id = transfer.transfer_id
        answer = pb.OpenTransferResponse(
            transfer_id=transfer_id,
            epoch=depot.epoch,
            lease_ttl_seconds=node.transfers.lease_ttl_seconds(transfer_id),
            reach=data_plane.reach(),
        )
        room = self._message_bytes_max - _ANSWER_BYTES
        try:
            if request.contents:  # some may have been evicted while others had their turn
                depot.transfers.require_content(transfer)
            for group in transfer.groups:
                entry = answer.groups.add(
                    group=group.group,
                    statuses=bytes(group.statuses),
                    block_ids=struct.pack(f"<{len(group.blocks)}I", *group.block_ids),
                    block_hashes=group.hashes if request.HasField("request") else (),
                )
                if request.checksums:
                    sums = depot.pool.sums.of([b for b in group.blocks if b is not None])
                    entry.checksums = struct.pack(f"<{len(sums)}Q", *sums)
                if request.contents:
                    room -= add_contents(entry, depot.pool, group, max_bytes=room)
        except BaseException:
            node.transfers.end(transfer_id)
            raise
        return answer.SerializeToString()

    def renew_transfer(self, request: pb.RenewTransferRequest) -> bytes:
        """RenewTransfer."""
        ttl = self._node.transfers.renew(request.transfer_id)
        return pb.RenewTransferResponse(
            epoch=self._node.depot.epoch, lease_ttl_seconds=ttl
        ).SerializeToString()

    async def close_transfer(self, request: pb.CloseTransferRequest) -> bytes:
        """CloseTransfer."""
        await self._node.transfers.close(request.transfer_id)
        return pb.CloseTransferResponse(epoch=self._node.depot.epoch).SerializeToString()

    def _session_of(
        self, message: pb.OpenTransferRequest | pb.ImportBlocksRequest
    ) -> Session | None:
        """The session whose request is named, its lease renewed; None: hashes are."""
        if message.HasField("request") == bool(message.groups):
            raise InvalidArgument("name either hashes or a request", field="groups")
        if not message.HasField("request"):
            return None
        named = message.request
        return self._node.session(named.session_id, named.epoch, within="request.")

    # --- imports ----------------------------------------------------------------------

    async def _import_blocks(self, request: pb.ImportBlocksRequest, context: Context) -> None:
        """Ends with the call, but the blocks stay pinned until no byte can land in them."""
        running = await self._begin_import(request)
        try:
            while not running.has_ended:
                await running.news()
                if not running.has_ended:
                    await self._write(context, self._progress(running))
            if running.error is not None:
                raise running.error
            await self._write(context, self._result(running))
        finally:
            running.stop()

    async def _begin_import(self, request: pb.ImportBlocksRequest) -> RunningImport:
        node, imports = self._node, self._node.depot.imports
        node.require_not_draining()
        node.require_data_plane()
        check_name(request.peer)
        if not request.peer:
            raise InvalidArgument("a peer is needed, HOST:PORT", field="peer")
        for position, path in enumerate(request.paths):
            if path not in _PATHS:
                raise InvalidArgument(f"{path} is no path", field=f"paths[{position}]")
        has_deadline = request.HasField("deadline_seconds")
        deadline = node.imports.deadline_seconds(request.deadline_seconds if has_deadline else None)
        session = self._session_of(request)
        found: Import
        if session is None:
            groups = _groups(request.groups, node.depot)
            found = await node.imports.begin(imports.beginning_hashes(request.peer, groups))
        else:
            found = imports.begin_request(request.peer, session, request.request.request_id)
        return node.imports.start(
            found,
            paths=list(request.paths),
            checksums=request.checksums,
            deadline_seconds=deadline,
        )

    def _progress(self, running: RunningImport) -> pb.ImportBlocksResponse:
        progress = running.progress
        return pb.ImportBlocksResponse(
            epoch=self._node.depot.epoch,
            num_blocks=progress.num_blocks,
            num_bytes=progress.num_bytes,
            path=progress.path,
        )

    def _result(self, running: RunningImport) -> pb.ImportBlocksResponse:
        assert running.result is not None
        message = self._progress(running)
        message.done = True
        message.num_tokens = running.result.num_tokens
        for group, statuses in running.result.statuses.items():
            message.groups.add(group=group, statuses=statuses)
        for group, hashes in running.result.missing_parents.items():
            message.missing_parents.add(group=group, block_hashes=hashes)
        message.failures.extend(running.failures)
        return message

    async def _write(self, context: Context, message: Message) -> None:
        await write(context, message.SerializeToString(), seconds=self._stall_seconds)


_PATHS = frozenset(pb.TransferPath.values()) - {pb.TRANSFER_PATH_UNSPECIFIED}


def _groups(messages: Sequence[pb.GroupHashes], depot: Depot) -> list[GroupHashes]:
    few = messages[: len(depot.config.kv_cache.groups) + 1]  # more name one twice: these, too
    return [GroupHashes(message.group, list(message.block_hashes)) for message in few]
