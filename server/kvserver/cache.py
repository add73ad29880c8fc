"""KVCacheService: what schedulers call."""

from __future__ import annotations

import asyncio
from time import perf_counter

import grpc

from kvcore.errors import ResourceExhausted, Unavailable
from kvcore.operation import FreeMode
from kvcore.session import Session
from kvdepot.v1 import cache_pb2 as pb
from kvdepot.v1 import types_pb2
from kvserver import convert
from kvserver.node import Node
from kvserver.rpc import Context, Handler, RpcCounts, Rpcs

SERVICE = pb.DESCRIPTOR.services_by_name["KVCacheService"].full_name


class CacheService:
    """Every method takes a request and answers a serialized reply, synchronously."""

    def __init__(self, node: Node, rpcs: Rpcs, *, step_operations_max: int) -> None:
        self._node = node
        self._step_operations_max = step_operations_max
        self._depot = node.depot
        self._epoch = node.depot.epoch
        self._rpcs = rpcs
        # Of StepStreams waiting for their next request.
        self._reading: set[asyncio.Task[None]] = set()

    def handlers(self) -> dict[str, Handler]:
        """The service's methods by name."""
        unary = self._rpcs.unary
        return {
            "OpenSession": unary("OpenSession", pb.OpenSessionRequest, self.open_session),
            "KeepAlive": unary("KeepAlive", pb.KeepAliveRequest, self.keep_alive),
            "CloseSession": unary("CloseSession", pb.CloseSessionRequest, self.close_session),
            "GetComputedBlocks": unary(
                "GetComputedBlocks", pb.GetComputedBlocksRequest, self.get_computed_blocks
            ),
            "AllocateSlots": unary("AllocateSlots", pb.AllocateSlotsRequest, self.allocate_slots),
            "CacheBlocks": unary("CacheBlocks", pb.CacheBlocksRequest, self.cache_blocks),
            "Free": unary("Free", pb.FreeRequest, self.free),
            "ReturnBlocks": unary("ReturnBlocks", pb.ReturnBlocksRequest, self.return_blocks),
            "ResetPrefixCache": unary(
                "ResetPrefixCache", pb.ResetPrefixCacheRequest, self.reset_prefix_cache
            ),
            "Step": unary("Step", pb.StepRequest, self.step),
            "StepStream": grpc.stream_stream_rpc_method_handler(self._step_stream),
        }

    def open_session(self, request: pb.OpenSessionRequest) -> bytes:
        """OpenSession."""
        ttl = request.lease_ttl_seconds if request.HasField("lease_ttl_seconds") else None
        session = self._node.open_session(request.name, request.fingerprint, ttl)
        return pb.OpenSessionResponse(
            session_id=session.session_id,
            epoch=self._epoch,
            pool=self._node.pool,
            reply_window=self._node.policy.reply_window,
            lease_ttl_seconds=self._node.lease_ttl_seconds(session),
            max_step_operations=self._step_operations_max,
        ).SerializeToString()

    def keep_alive(self, request: pb.KeepAliveRequest) -> bytes:
        """KeepAlive. Takes no part in the session's sequence of calls."""
        session = self._node.session(request.session_id, request.epoch, within="")
        return pb.KeepAliveResponse(
            epoch=self._epoch, lease_ttl_seconds=self._node.lease_ttl_seconds(session)
        ).SerializeToString()

    def close_session(self, request: pb.CloseSessionRequest) -> bytes:
        """CloseSession."""

        def operate(session: Session) -> pb.CloseSessionResponse:
            return pb.CloseSessionResponse(
                num_requests_freed=self._node.close_session(session), epoch=self._epoch
            )

        return self._node.call("CloseSession", request.context, operate)

    def get_computed_blocks(self, request: pb.GetComputedBlocksRequest) -> bytes:
        """GetComputedBlocks."""

        def operate(session: Session) -> pb.GetComputedBlocksResponse:
            content = convert.content(request.content) if request.HasField("content") else None
            hit = self._depot.get_computed_blocks(session, request.request_id, content)
            return pb.GetComputedBlocksResponse(
                num_computed_tokens=hit.num_computed_tokens,
                blocks=convert.block_tables(hit.blocks),
                handle=hit.handle,
                epoch=self._epoch,
                num_uncached_common_prefix_tokens=hit.num_uncached_common_prefix_tokens,
            )

        return self._node.call("GetComputedBlocks", request.context, operate)

    def allocate_slots(self, request: pb.AllocateSlotsRequest) -> bytes:
        """AllocateSlots."""

        def operate(session: Session) -> pb.AllocateSlotsResponse:
            slots = convert.slot_request(request.slots)
            result = self._depot.allocate_slots(session, slots)
            return pb.AllocateSlotsResponse(result=convert.slot_result(result), epoch=self._epoch)

        return self._node.call("AllocateSlots", request.context, operate)

    def cache_blocks(self, request: pb.CacheBlocksRequest) -> bytes:
        """CacheBlocks."""

        def operate(session: Session) -> pb.CacheBlocksResponse:
            content = convert.content(request.content) if request.HasField("content") else None
            known = self._depot.cache_blocks(
                session, request.request_id, content, request.num_computed_tokens
            )
            return pb.CacheBlocksResponse(known=known, epoch=self._epoch)

        return self._node.call("CacheBlocks", request.context, operate)

    def free(self, request: pb.FreeRequest) -> bytes:
        """Free."""

        def operate(session: Session) -> pb.FreeResponse:
            mode: FreeMode = convert.free_mode(request.mode)
            result = self._depot.free(session, request.request_id, mode, request.did_not_run)
            return pb.FreeResponse(known=result.known, ticket=result.ticket, epoch=self._epoch)

        return self._node.call("Free", request.context, operate)

    def return_blocks(self, request: pb.ReturnBlocksRequest) -> bytes:
        """ReturnBlocks."""

        def operate(session: Session) -> pb.ReturnBlocksResponse:
            num_blocks = self._depot.return_blocks(session, request.ticket)
            return pb.ReturnBlocksResponse(num_blocks=num_blocks, epoch=self._epoch)

        return self._node.call("ReturnBlocks", request.context, operate)

    def reset_prefix_cache(self, request: pb.ResetPrefixCacheRequest) -> bytes:
        """ResetPrefixCache."""

        def operate(_: Session) -> pb.ResetPrefixCacheResponse:
            if request.drain_id:
                result = self._depot.drain_state(request.drain_id)
            else:
                result = self._node.reset_prefix_cache(
                    convert.reset_mode(request.mode),
                    convert.reset_scope(request.scope) if request.HasField("scope") else None,
                    request.deadline_seconds if request.HasField("deadline_seconds") else None,
                )
            return convert.reset_response(result, epoch=self._epoch)

        return self._node.call("ResetPrefixCache", request.context, operate)

    def step(self, request: pb.StepRequest) -> bytes:
        """Step, and each message of StepStream: one sequence, interchangeable replies."""
        context: types_pb2.CallContext = request.context

        def operate(session: Session) -> pb.StepResponse:
            limit = self._step_operations_max
            # What the runs do not count is refused later, but must be few to get there.
            num_operations = max(len(request.runs), _num_rows(request))
            if num_operations <= limit:
                num_operations = sum(run.count for run in request.runs)
            if num_operations > limit:
                raise ResourceExhausted(
                    f"a Step holds at most {limit} operations, not {num_operations}",
                    reason="STEP_TOO_LARGE",
                    field="runs",
                )
            result = self._depot.step(session, convert.step(request))
            op_seq = context.op_seq if context.HasField("op_seq") else None
            return convert.step_response(result, op_seq=op_seq, epoch=self._epoch)

        return self._node.call("Step", context, operate)

    async def _step_stream(self, _: object, context: Context) -> None:
        """An error ends the stream; the session, and what it holds, stay."""
        method = "StepStream"
        counts = self._rpcs.count(method)
        task = asyncio.current_task()
        assert task is not None
        try:
            slot = self._rpcs.stream()
        except ResourceExhausted as error:
            failed = self._rpcs.failure(error, method)
            counts.add(failed.code.name, 0.0)
            await failed.abort(context)
        with slot:
            await self._answer_all(context, counts, task)

    async def _answer_all(
        self, context: Context, counts: RpcCounts, task: asyncio.Task[None]
    ) -> None:
        while True:
            raw = await self._read(context, task)
            if raw is None:
                return
            began = perf_counter()
            try:
                reply = self.step(pb.StepRequest.FromString(raw))
            except Exception as error:
                failed = self._rpcs.failure(error, counts.method)
                counts.add(failed.code.name, perf_counter() - began)
                await failed.abort(context)
            counts.add("OK", perf_counter() - began)
            try:
                await context.write(reply)
            except grpc.aio.InternalError:
                return  # the client is gone

    async def _read(self, context: Context, task: asyncio.Task[None]) -> bytes | None:
        """The next request, None after the last. Ends the stream when the server stops."""
        if not self._node.draining_streams:
            self._reading.add(task)
            try:
                raw = await context.read()
                return raw if isinstance(raw, bytes) else None
            except asyncio.CancelledError:
                if not self._node.draining_streams:
                    raise
            finally:
                self._reading.discard(task)
        try:
            self._node.require_streams()
        except Unavailable as stopping:
            await self._rpcs.failure(stopping, "StepStream").abort(context)
        raise AssertionError("streams are ending")

    def end_streams(self) -> None:
        """End every StepStream, each once its current request is answered."""
        for task in list(self._reading):
            task.cancel()


def _num_rows(request: pb.StepRequest) -> int:
    """Operations that the columns hold."""
    num_bytes = sum(len(columns.handles) for columns in (request.grow, request.cache, request.free))
    return len(request.admissions) + num_bytes // 4
