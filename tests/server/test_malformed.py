"""Random damage to every RPC's bytes: always a typed answer, never a dead server.

Valid requests of a live session, half of them mutated at the byte level, half with values
replaced by others of their type, and sent raw.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvdepot.v1 import admin_pb2, cache_pb2, event_pb2, transfer_pb2, types_pb2
from serving import BLOCK_SIZE, Scheduler, Served, int32s, refused, tokens

IN_FLIGHT = 50
PROMPT = tokens(*range(1, 11))

EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.DATA_LOSS,
}

_CONTENT = cache_pb2.RequestContent(
    tokens=PROMPT,
    extra_keys=types_pb2.ExtraKeys(
        lora_name="adapter",
        lora_id=3,
        cache_salt="salt",
        multimodal=[types_pb2.MultimodalItem(identifier="cat", offset=1, length=3)],
    ),
    num_prompt_tokens=10,
)
_SLOTS = cache_pb2.SlotRequest(
    request_id="r1",
    content=_CONTENT,
    lookup=True,
    max_new_tokens=9,
    new_tokens_alignment=BLOCK_SIZE,
    num_lookahead_tokens=2,
)

Make = Callable[[types_pb2.CallContext], Message]

# One valid request of every RPC, given a live session's context.
REQUESTS: dict[str, Make] = {
    "KVCacheService/OpenSession": lambda _: cache_pb2.OpenSessionRequest(
        name="n", fingerprint="", lease_ttl_seconds=30.0
    ),
    "KVCacheService/KeepAlive": lambda c: cache_pb2.KeepAliveRequest(
        session_id=c.session_id, epoch=c.epoch
    ),
    "KVCacheService/CloseSession": lambda c: cache_pb2.CloseSessionRequest(context=c),
    "KVCacheService/GetComputedBlocks": lambda c: cache_pb2.GetComputedBlocksRequest(
        context=c, request_id="r1", content=_CONTENT
    ),
    "KVCacheService/AllocateSlots": lambda c: cache_pb2.AllocateSlotsRequest(
        context=c, slots=_SLOTS
    ),
    "KVCacheService/CacheBlocks": lambda c: cache_pb2.CacheBlocksRequest(
        context=c, request_id="r0", num_computed_tokens=10
    ),
    "KVCacheService/Free": lambda c: cache_pb2.FreeRequest(
        context=c, request_id="r0", mode=cache_pb2.FREE_MODE_DETACH, did_not_run=True
    ),
    "KVCacheService/ReturnBlocks": lambda c: cache_pb2.ReturnBlocksRequest(context=c, ticket=1),
    "KVCacheService/ResetPrefixCache": lambda c: cache_pb2.ResetPrefixCacheRequest(
        context=c,
        mode=cache_pb2.RESET_MODE_DRAIN,
        scope=cache_pb2.ResetScope(lora_name="adapter", cache_salt="salt"),
        deadline_seconds=5.0,
    ),
    "KVCacheService/Step": lambda c: cache_pb2.StepRequest(
        context=c,
        runs=[cache_pb2.Run(kind=kind, count=1) for kind in (1, 2, 3, 4)],
        on_no_fit=cache_pb2.ON_NO_FIT_CONTINUE,
        token_budget=50,
        admissions=[_SLOTS],
        grow=cache_pb2.GrowColumns(
            handles=int32s(1),
            num_computed_tokens=int32s(10),
            num_new_tokens=int32s(1),
            token_offsets=int32s(10),
            token_counts=int32s(1),
            tokens=tokens(5),
        ),
        cache=cache_pb2.CacheColumns(handles=int32s(1), num_computed_tokens=int32s(11)),
        free=cache_pb2.FreeColumns(handles=int32s(1), modes=b"\2", did_not_run=b"\1"),
    ),
    "KVEventService/StreamEvents": lambda c: event_pb2.StreamEventsRequest(
        epoch=c.epoch, from_sequence=0
    ),
    "KVTransferService/DescribePool": lambda _: transfer_pb2.DescribePoolRequest(),
    "KVTransferService/OpenTransfer": lambda c: transfer_pb2.OpenTransferRequest(
        request=transfer_pb2.SessionRequest(
            session_id=c.session_id, epoch=c.epoch, request_id="r0"
        ),
        lease_ttl_seconds=30.0,
        name="n",
        contents=True,
    ),
    "KVTransferService/RenewTransfer": lambda _: transfer_pb2.RenewTransferRequest(transfer_id="t"),
    "KVTransferService/CloseTransfer": lambda _: transfer_pb2.CloseTransferRequest(transfer_id="t"),
    "KVTransferService/ImportBlocks": lambda _: transfer_pb2.ImportBlocksRequest(
        peer="r0",
        groups=[transfer_pb2.GroupHashes(block_hashes=[b"h" * 32] * 3)],
        paths=[transfer_pb2.TRANSFER_PATH_GRPC],
        checksums=True,
        deadline_seconds=5.0,
    ),
    "KVTransferService/AttachWorker": lambda c: transfer_pb2.AttachWorkerRequest(
        session_id=c.session_id, epoch=c.epoch, name="worker 0"
    ),
    "KVAdminService/GetStats": lambda _: admin_pb2.GetStatsRequest(),
    "KVAdminService/Audit": lambda _: admin_pb2.AuditRequest(),
    "KVAdminService/ListSessions": lambda _: admin_pb2.ListSessionsRequest(),
    "KVAdminService/ListRequests": lambda c: admin_pb2.ListRequestsRequest(
        session_id=c.session_id, page_size=3, page_token="1"
    ),
    "KVAdminService/ListTransfers": lambda _: admin_pb2.ListTransfersRequest(),
    "KVAdminService/EvictBlocks": lambda _: admin_pb2.EvictBlocksRequest(block_ids=[1, 2, 32]),
    "KVAdminService/Drain": lambda _: admin_pb2.DrainRequest(),
}
REQUESTS["KVCacheService/StepStream"] = REQUESTS["KVCacheService/Step"]
# These answer until they are cancelled: one message or the initial metadata will do.
ENDLESS = {"KVEventService/StreamEvents", "KVTransferService/AttachWorker"}
STREAMED = {*ENDLESS, "KVTransferService/ImportBlocks"}
# Served by another process, at an address of its own.
ELSEWHERE = {"KVTransferService/PullBlocks"}


def test_no_rpc_is_left_out() -> None:
    served = {
        f"{service.name}/{method.name}"
        for module in (admin_pb2, cache_pb2, event_pb2, transfer_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert REQUESTS.keys() == served - ELSEWHERE


def damaged(chance: random.Random, raw: bytes) -> bytes:
    """``raw`` with bits flipped, bytes inserted, cut out, or repeated."""
    data = bytearray(raw)
    for _ in range(chance.choice((1, 1, 1, 2, 4, 16))):
        position = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0 if position < len(data):
                data[position] ^= 1 << chance.randrange(8)
            case 1 if position < len(data):
                data[position] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                data[position:position] = chance.randbytes(chance.randrange(1, 12))
            case 3:
                del data[position : position + chance.randrange(1, 12)]
            case _:
                data[position:position] = data[position : position + chance.randrange(1, 40)]
    return bytes(data)


def misused(chance: random.Random, message: Message) -> None:
    """Replace some values of ``message``, in place, by others of their type."""
    for field in message.DESCRIPTOR.fields:
        if field.name in ("session_id", "epoch") or chance.random() < 0.6:
            continue
        if field.message_type is not None:
            if field.is_repeated:
                for part in getattr(message, field.name):
                    misused(chance, part)
            elif message.HasField(field.name) or chance.random() < 0.3:
                getattr(message, field.name).SetInParent()
                misused(chance, getattr(message, field.name))
        elif field.is_repeated:
            getattr(message, field.name).append(any_value(chance, field))
        else:
            setattr(message, field.name, any_value(chance, field))


def any_value(chance: random.Random, field: FieldDescriptor) -> Any:
    """A value of the field's type: near, plausible, or extreme."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            values = [chance.choice((-1, 0, 1, 2, 10, 11, 1 << 30)) for _ in range(3)]
            column = int32s(*values[: chance.randrange(4)])
            return chance.choice((b"", b"\1", b"\xff" * 5, PROMPT, PROMPT * 9, column, b"h" * 32))
        case FieldDescriptor.CPPTYPE_STRING:
            return chance.choice(("", "r0", "r1", "r2", "\0", "é" * 900))
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.CPPTYPE_UINT64:
            return chance.choice((0, 1, 2, 3, 1 << 31, (1 << 64) - 1))
        case FieldDescriptor.CPPTYPE_ENUM:
            return chance.choice((0, 1, 2, 3, 4, 5, -1, (1 << 31) - 1))
    return chance.choice((0, 1, 2, 4, 8, 10, 11, 16, 1000, 1 << 31, (1 << 32) - 1))


def reopened(served: Served) -> Scheduler:
    """A session with one running request, r0."""
    scheduler = served.open()
    scheduler.admit("r0", PROMPT)
    return scheduler


@pytest.mark.parametrize(
    "num_calls",
    [pytest.param(200, id="200"), pytest.param(2000, marks=pytest.mark.slow, id="2000")],
)
@pytest.mark.parametrize("method", REQUESTS)
def test_no_bytes_break_the_server(served: Served, method: str, num_calls: int) -> None:
    chance = random.Random(f"{method} {num_calls}")
    codes: Counter[grpc.StatusCode] = Counter()
    send = sender(served, method)
    streaming = streams(method)
    served.data_plane.peers["r0"] = served.server

    def settle(answer: Any) -> None:
        try:
            if streaming:
                if method in ENDLESS:
                    answer.initial_metadata()
                    if not answer.done():
                        answer.cancel()
                        codes[grpc.StatusCode.OK] += 1
                        return
                for _ in islice(answer, 3):
                    pass
            else:
                answer.result()
            codes[answer.code()] += 1
        except grpc.RpcError as error:
            codes[error.code()] += 1

    for _ in range(num_calls // IN_FLIGHT):
        scheduler = reopened(served)
        context = scheduler.context(
            **({"step": 1, "completed_step": 1} if chance.random() < 0.3 else {})
        )
        valid = REQUESTS[method](context)
        raws = []
        for number in range(IN_FLIGHT):
            message = type(valid)()
            message.CopyFrom(valid)
            if number % 2:
                misused(chance, message)
            raw = message.SerializeToString()
            raws.append(raw if number % 2 else damaged(chance, raw))
        answers = [send(raw) for raw in raws]
        for answer in answers:
            settle(answer)
        served.loop.call(lambda s=scheduler: close_all(served))
    assert codes.total() == num_calls
    assert set(codes) <= EXPECTED, codes
    assert len(codes) > 1, codes
    served.assert_clean()
    assert reopened(served).lookup("alive", PROMPT).num_computed_tokens >= 0


def streams(method: str) -> bool:
    """Whether it answers with a stream."""
    return method in STREAMED or method.endswith("Stream")


def sender(served: Served, method: str) -> Callable[[bytes], Any]:
    """Starts a call of ``method`` with these bytes."""
    path = f"/kvdepot.v1.{method}"
    channel = served.channel
    if method in STREAMED:
        return lambda raw: channel.unary_stream(path)(raw, timeout=60)
    if method.endswith("Stream"):
        return lambda raw: channel.stream_stream(path)(iter([raw]), timeout=60)
    return lambda raw: channel.unary_unary(path).future(raw, timeout=60)


def close_all(served: Served) -> None:
    """End every session, in process, so that none runs into the limit, and drain no more."""
    node = served.server.node
    node.draining = False
    node.transfers.end_all()
    for session in list(node.depot.sessions.values()):
        node.close_session(session)


@pytest.mark.parametrize("method", REQUESTS)
def test_what_is_no_message_is_an_invalid_argument(served: Served, method: str) -> None:
    call = sender(served, method)(b"\xff\xff\xff")
    drain: Callable[[], Any] = (lambda: list(call)) if streams(method) else call.result
    detail = refused(drain, grpc.StatusCode.INVALID_ARGUMENT)
    assert detail.reason == "MALFORMED_MESSAGE"
    served.assert_clean()
