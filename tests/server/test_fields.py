"""Fields of a message, counted before it is read: few bytes must not become much memory."""

from __future__ import annotations

import random

import grpc
import pytest
from google.protobuf.message import DecodeError

from kvcore.errors import ResourceExhausted
from kvdepot.v1 import cache_pb2, transfer_pb2, types_pb2
from kvserver.fields import require_few_fields
from serving import Serve, detail_of, tokens

STEP = cache_pb2.StepRequest(
    context=types_pb2.CallContext(session_id="s", step=3, completed_step=1 << 40),
    runs=[cache_pb2.Run(kind=cache_pb2.OPERATION_KIND_ADMIT, count=2)],
    admissions=[
        cache_pb2.SlotRequest(request_id="r" * 200, num_new_tokens=300),
        cache_pb2.SlotRequest(
            content=cache_pb2.RequestContent(
                tokens=tokens(1, 2),
                extra_keys=types_pb2.ExtraKeys(
                    multimodal=[types_pb2.MultimodalItem(identifier="i", length=1)] * 3
                ),
            )
        ),
    ],
)
# context and 3, a run and 2, an admission and 2, another, its content and 2 with 3 items of 2.
NUM_FIELDS = 4 + 3 + 3 + 1 + 1 + 2 + 3 * 3


def test_fields_of_messages_within_count() -> None:
    raw = STEP.SerializeToString()
    require_few_fields(raw, cache_pb2.StepRequest.DESCRIPTOR, NUM_FIELDS)
    with pytest.raises(ResourceExhausted) as caught:
        require_few_fields(raw, cache_pb2.StepRequest.DESCRIPTOR, NUM_FIELDS - 1)
    assert caught.value.reason == "TOO_MANY_FIELDS"


@pytest.mark.parametrize(
    "field",
    [
        pytest.param(b"\x12\x00", id="empty message"),
        pytest.param(b"\x12\x02\x08\x01", id="message"),
        pytest.param(b"\x20\x80\x01", id="number"),
        pytest.param(b"\xfa\x01\x00", id="unknown"),
        pytest.param(b"\xf9\x01" + bytes(8), id="unknown of 8 bytes"),
        pytest.param(b"\xfd\x01" + bytes(4), id="unknown of 4 bytes"),
        pytest.param(b"\xfb\x01\xfc\x01", id="unknown group"),
    ],
)
def test_every_kind_of_field_counts(field: bytes) -> None:
    cache_pb2.StepRequest.FromString(9 * field)
    with pytest.raises(ResourceExhausted):
        require_few_fields(9 * field, cache_pb2.StepRequest.DESCRIPTOR, 8)


def test_what_is_in_an_unknown_group_is_no_message() -> None:
    """It looks like a broken admission, and hides none of those behind it."""
    raw = b"\xfb\x01\x2a\x01\xff\xfc\x01" + 1000 * b"\x2a\x00"
    assert len(cache_pb2.StepRequest.FromString(raw).admissions) == 1000
    with pytest.raises(ResourceExhausted):
        require_few_fields(raw, cache_pb2.StepRequest.DESCRIPTOR, 100)


def test_what_is_no_message_is_left_to_its_reader() -> None:
    """Whatever is counted to its end can be read, or its reader refuses it: nobody else does."""
    chance = random.Random(1)
    whole = STEP.SerializeToString()
    num_refused = 0
    for _ in range(3000):
        raw = bytearray(whole[: chance.randint(1, len(whole))])
        for _ in range(chance.randint(0, 3)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        require_few_fields(bytes(raw), cache_pb2.StepRequest.DESCRIPTOR, 10 * len(raw))
        try:
            cache_pb2.StepRequest.FromString(bytes(raw))
        except DecodeError:
            num_refused += 1
    assert num_refused > 500


@pytest.mark.parametrize(
    ("service", "method", "field"),
    [
        pytest.param("KVCacheService", "Step", b"\x2a\x00", id="admissions"),
        pytest.param("KVCacheService", "StepStream", b"\x2a\x00", id="admissions on a stream"),
        pytest.param("KVTransferService", "OpenTransfer", b"\x12\x00", id="groups"),
        pytest.param("KVTransferService", "ImportBlocks", b"\x12\x00", id="groups to import"),
    ],
)
def test_a_message_of_very_many_fields_is_refused_unread(
    serve: Serve, service: str, method: str, field: bytes
) -> None:
    served = serve(max_message_bytes=1 << 20)
    raw = field * (((1 << 20) - 100) // len(field))
    path = f"/kvdepot.v1.{service}/{method}"
    with pytest.raises(grpc.RpcError) as caught:
        list(served.channel.stream_stream(path)(iter([raw]), timeout=30))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail_of(caught.value).reason == "TOO_MANY_FIELDS"


def test_more_groups_than_there_are_name_one_twice(serve: Serve) -> None:
    served = serve()
    group = transfer_pb2.GroupHashes(block_hashes=[bytes(32)])
    with pytest.raises(grpc.RpcError, match="group 0 is named twice"):
        served.transfer.OpenTransfer(transfer_pb2.OpenTransferRequest(groups=[group] * 1000))
