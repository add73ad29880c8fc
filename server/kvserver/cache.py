"""KVCacheService: what schedulers call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import perf_counter

import grpc
from google.protobuf.message import Message

from kvcore.errors import ResourceExhausted, Unavailable
from kvcore.operation import FreeMode
from kvcore.session import Session
from kvdepot.v1 import cache_pb2 as pb
from kvdepot.v1 import types_pb2
from kvserver import convert
from kvserver.node import Node
from kvserver.rpc import Context, Handler, Request, RpcCounts, Rpcs, write_then
from kvserver.unread import LARGE_BYTES

SERVICE = pb.DESCRIPTOR.services_by_name["KVCacheService"].full_name


class CacheService:
    """What each RPC does, synchronously. A session's calls answer messages, for Node.call."""

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
        unary, call = self._rpcs.unary, self._call
        return {
            "OpenSession": unary("OpenSession", pb.OpenSessionRequest, self.open_session),
            "KeepAlive": unary("KeepAlive", pb.KeepAliveRequest, self.keep_alive),
            "CloseSession": call("CloseSession", pb.CloseSessionRequest, self._close_session),
            "GetComputedBlocks": call(
                "GetComputedBlocks", pb.GetComputedBlocksRequest, self._get_computed_blocks
            ),
            "AllocateSlots": call("AllocateSlots", pb.AllocateSlotsRequest, self._allocate_slots),
            "CacheBlocks": call("CacheBlocks", pb.CacheBlocksRequest, self._cache_blocks),
            "Free": call("Free", pb.FreeRequest, self._free),
            "ReturnBlocks": call("ReturnBlocks", pb.ReturnBlocksRequest, self._return_blocks),
            "ResetPrefixCache": call(
                "ResetPrefixCache", pb.ResetPrefixCacheRequest, self._reset_prefix_cache
            ),
            "Step": unary("Step", pb.StepRequest, self.step),
            "StepStream": grpc.stream_stream_rpc_method_handler(self._step_stream),
        }

    def _call(
        self,
        method: str,
        request: type[Request],
        operate: Callable[[Session, Request], Message],
    ) -> Handler:
        """A call of a session, in its sequence."""
        return self._rpcs.unary(method, request, partial(self._node.call, method, operate))

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

    def _close_session(
        self, session: Session, _: pb.CloseSessionRequest
    ) -> pb.CloseSessionResponse:
        return pb.CloseSessionResponse(
            num_requests_freed=self._node.close_session(session), epoch=self._epoch
        )

    def _get_computed_blocks(
        self, session: Session, request: pb.GetComputedBlocksRequest
    ) -> pb.GetComputedBlocksResponse:
        content = convert.content(request.content) if request.HasField("content") else None
        hit = self._depot.get_computed_blocks(session, request.request_id, content)
        response = pb.GetComputedBlocksResponse(
            num_computed_tokens=hit.num_computed_tokens,
            handle=hit.handle,
            epoch=self._epoch,
            num_uncached_common_prefix_tokens=hit.num_uncached_common_prefix_tokens,
        )
        convert.fill_block_tables(response.blocks, hit.blocks)
        return response

    def _allocate_slots(
        self, session: Session, request: pb.AllocateSlotsRequest
    ) -> pb.AllocateSlotsResponse:
        result = self._depot.allocate_slots(session, convert.slot_request(request.slots))
        response = pb.AllocateSlotsResponse(epoch=self._epoch)
        convert.fill_slot_result(response.result, result)
        return response

    def _cache_blocks(
        self, session: Session, request: pb.CacheBlocksRequest
    ) -> pb.CacheBlocksResponse:
        content = convert.content(request.content) if request.HasField("content") else None
        known = self._depot.cache_blocks(
            session, request.request_id, content, request.num_computed_tokens
        )
        return pb.CacheBlocksResponse(known=known, epoch=self._epoch)

    def _free(self, session: Session, request: pb.FreeRequest) -> pb.FreeResponse:
        mode: FreeMode = convert.free_mode(request.mode)
        result = self._depot.free(session, request.request_id, mode, request.did_not_run)
        return pb.FreeResponse(known=result.known, ticket=result.ticket, epoch=self._epoch)

    def _return_blocks(
        self, session: Session, request: pb.ReturnBlocksRequest
    ) -> pb.ReturnBlocksResponse:
        num_blocks = self._depot.return_blocks(session, request.ticket)
        return pb.ReturnBlocksResponse(num_blocks=num_blocks, epoch=self._epoch)

    def _reset_prefix_cache(
        self, _: Session, request: pb.ResetPrefixCacheRequest
    ) -> pb.ResetPrefixCacheResponse:
        if request.drain_id:
            result = self._depot.drain_state(request.drain_id)
        else:
            result = self._node.reset_prefix_cache(
                convert.reset_mode(request.mode),
                convert.reset_scope(request.scope) if request.HasField("scope") else None,
                request.deadline_seconds if request.HasField("deadline_seconds") else None,
            )
        return convert.reset_response(result, epoch=self._epoch)

    def step(self, request: pb.StepRequest) -> bytes:
        """Step: one sequence with StepStream, interchangeable replies."""
        return self._node.call("Step", self._step, request)

    def _step(self, session: Session, request: pb.StepRequest) -> pb.StepResponse:
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
        result = self._node.answer_step(session, convert.step(request))
        context: types_pb2.CallContext = request.context
        op_seq = context.op_seq if context.HasField("op_seq") else None
        return convert.step_response(result, op_seq=op_seq, epoch=self._epoch)

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
        unread, reading, read = self._rpcs.unread, self._reading, context.read
        parse = self._rpcs.parser(pb.StepRequest)
        while not self._node.draining_streams:
            reading.add(task)
            try:
                raw = await read()
            except asyncio.CancelledError:
                if not self._node.draining_streams:
                    raise
                break
            finally:
                reading.discard(task)
            if not isinstance(raw, bytes):
                return  # that was the last
            began = perf_counter()
            try:
                unread.require_room(context)
                request = parse(raw)
                reply = self._node.call("Step", self._step, request, finish=False)
            except Exception as error:
                failed = self._rpcs.failure(error, counts.method)
                counts.add(failed.code.name, perf_counter() - began)
                await failed.abort(context)
            release = unread.hold(context, len(reply)) if len(reply) > LARGE_BYTES else None
            try:
                await write_then(context, reply, partial(self._finish, counts, began))
            except grpc.aio.InternalError:
                return  # the client is gone
            finally:
                if release is not None:
                    release(None)
        try:
            self._node.require_streams()
        except Unavailable as stopping:
            await self._rpcs.failure(stopping, "StepStream").abort(context)
        raise AssertionError("streams are ending")

    def _finish(self, counts: RpcCounts, began: float) -> None:
        self._node.finish()
        counts.add("OK", perf_counter() - began)

    def end_streams(self) -> None:
        """End every StepStream, each once its current request is answered."""
        for task in list(self._reading):
            task.cancel()


def _num_rows(request: pb.StepRequest) -> int:
    """Operations that the columns hold."""
    num_bytes = sum(len(columns.handles) for columns in (request.grow, request.cache, request.free))
    return len(request.admissions) + num_bytes // 4
