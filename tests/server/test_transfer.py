"""PullBlocks: every hash answered, every byte right."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvdepot.v1 import event_pb2, transfer_pb2
from serving import BLOCK_SIZE, Serve, Served, refused, tokens

PROMPT = tokens(*range(1, 11))
BLOCK_BYTES = BLOCK_SIZE * 128


def pull(served: Served, hashes: list[bytes], **request: Any) -> list[Any]:
    """All messages of one call."""
    return list(
        served.transfer.PullBlocks(
            transfer_pb2.PullBlocksRequest(block_hashes=hashes, **request), timeout=20
        )
    )


def ready_hashes(served: Served) -> list[bytes]:
    """The index, by snapshot."""
    stream = served.event.StreamEvents(event_pb2.StreamEventsRequest(snapshot=True), timeout=20)
    found: list[bytes] = []
    for batch in stream:
        found += [h for event in batch.events for h in event.block_stored.block_hashes]
        if batch.snapshot_end:
            break
    stream.cancel()
    return found


@pytest.mark.parametrize("layout", ["block", "layer"])
def test_bytes_written_through_the_mapping_are_pulled(serve: Serve, layout: str) -> None:
    served = serve(layout=layout)
    scheduler = served.open()
    slots = scheduler.admit("a", PROMPT)
    pool = scheduler.opened.pool
    page = pool.groups[0].spec.page_size_bytes
    block_ids = list(slots.new_blocks[0].ids)[:2]
    with Path(pool.mappings[0].file.path).open("r+b") as mapping:
        for block_id in block_ids:
            for number, layer in enumerate(pool.layers):
                mapping.seek(layer.offset_bytes + block_id * layer.block_stride_bytes)
                mapping.write(bytes([block_id * 16 + number]) * page)
    scheduler.cache("a", 10)

    hashes = ready_hashes(served)
    (message,) = pull(
        served,
        [hashes[0], b"?" * 32, hashes[1]],
        fingerprint=pool.fingerprint,
        checksums=True,
    )
    assert message.first_index == 0
    assert list(message.statuses) == [
        transfer_pb2.BLOCK_STATUS_READY,
        transfer_pb2.BLOCK_STATUS_MISSING,
        transfer_pb2.BLOCK_STATUS_READY,
    ]
    expected = [
        b"".join(bytes([block_id * 16 + number]) * page for number in range(len(pool.layers)))
        for block_id in block_ids
    ]
    assert message.data == b"".join(expected)
    assert list(message.checksums) == [zlib.crc32(block) for block in expected]
    assert served.stats().pulled_bytes == 2 * BLOCK_BYTES


def test_a_block_not_yet_written_is_pending(served: Served) -> None:
    scheduler = served.open()
    scheduler.admit("known", PROMPT)
    scheduler.free("known")
    scheduler.free("known")
    hashes = ready_hashes(served)
    scheduler.reset()
    scheduler.admit("again", PROMPT, step=9, completed_step=8)
    (message,) = pull(served, hashes)
    assert set(message.statuses) == {transfer_pb2.BLOCK_STATUS_PENDING}
    assert message.data == b""


def test_messages_are_cut_at_one_mebibyte(serve: Serve) -> None:
    served = serve(num_blocks=4097, block_size=16, max_model_len=1 << 20)
    scheduler = served.open()
    scheduler.admit("long", tokens(*range(16 * 1200 + 1)))
    scheduler.free("long")
    hashes = ready_hashes(served)
    assert len(hashes) == 1200
    messages = pull(served, hashes)
    assert [len(message.data) for message in messages] == [1 << 20, 1 << 20, 176 * 2048]
    assert [message.first_index for message in messages] == [0, 512, 1024]
    assert sum(len(message.statuses) for message in messages) == 1200
    assert not messages[0].checksums


def test_the_pool_is_described(served: Served) -> None:
    described = served.transfer.DescribePool(transfer_pb2.DescribePoolRequest())
    opened = served.open().opened
    assert described.pool == opened.pool
    assert described.epoch == opened.epoch


@pytest.mark.parametrize(
    ("request_fields", "options", "code", "field"),
    [
        pytest.param(
            {"fingerprint": "other"},
            {},
            grpc.StatusCode.FAILED_PRECONDITION,
            "fingerprint",
            id="another pool's",
        ),
        pytest.param({"group": 1}, {}, grpc.StatusCode.INVALID_ARGUMENT, "group", id="group"),
        pytest.param(
            {"block_hashes": [b"h" * 32, b"short"]},
            {},
            grpc.StatusCode.INVALID_ARGUMENT,
            "block_hashes[1]",
            id="short hash",
        ),
        pytest.param(
            {"block_hashes": [b""]},
            {"hash_scheme": "xxhash_cbor"},
            grpc.StatusCode.INVALID_ARGUMENT,
            "block_hashes[0]",
            id="empty hash",
        ),
        pytest.param({}, {"no_memory": True}, grpc.StatusCode.FAILED_PRECONDITION, "", id="none"),
    ],
)
def test_refused(
    serve: Serve,
    request_fields: dict[str, Any],
    options: dict[str, Any],
    code: grpc.StatusCode,
    field: str,
) -> None:
    served = serve(**options)
    request = transfer_pb2.PullBlocksRequest(**request_fields)
    detail = refused(lambda: list(served.transfer.PullBlocks(request, timeout=20)), code)
    assert detail.field == field


def test_no_hashes_are_no_messages(served: Served) -> None:
    assert pull(served, []) == []


# Of this model the same block, asked for again and again, is more than anybody buffers.
LARGE = {"model": "qwen2-0.5b"}


def large_request(served: Served) -> transfer_pb2.PullBlocksRequest:
    scheduler = served.open()
    scheduler.admit("a", PROMPT)
    scheduler.cache("a", 10)
    return transfer_pb2.PullBlocksRequest(block_hashes=ready_hashes(served)[:1] * 2000)


def test_a_peer_that_reads_nothing_is_cut_off(serve: Serve) -> None:
    served = serve(**LARGE, max_pulls=1, pull_stall_seconds=0.5)
    request = large_request(served)
    slow = served.transfer.PullBlocks(request, timeout=30)
    slow.initial_metadata()
    detail = refused(
        lambda: list(served.transfer.PullBlocks(request, timeout=20)),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )
    assert detail.reason == "TOO_MANY_PULLS" and detail.retryable
    time.sleep(1.0)
    # Its place is another's now, though it has not heard that yet.
    few = transfer_pb2.PullBlocksRequest(block_hashes=request.block_hashes[:1])
    assert len(list(served.transfer.PullBlocks(few, timeout=20))) == 1
    assert refused(lambda: list(slow), grpc.StatusCode.RESOURCE_EXHAUSTED).reason == "STALLED"
    served.assert_clean()


def test_a_peer_killed_while_it_pulls_is_no_error(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(**LARGE)
    code = (
        "import sys, time, grpc\n"
        "call = grpc.insecure_channel(sys.argv[1]).unary_stream(sys.argv[2])\n"
        "stream = call(sys.stdin.buffer.read())\n"
        "next(stream); print('reading', flush=True); time.sleep(60)"
    )
    method = "/kvdepot.v1.KVTransferService/PullBlocks"
    peer = subprocess.Popen(
        [sys.executable, "-c", code, served.target, method],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert peer.stdin is not None and peer.stdout is not None
    with peer.stdin as request, peer.stdout as output:
        request.write(large_request(served).SerializeToString())
        request.close()
        assert output.readline() == b"reading\n"
        peer.kill()
        peer.wait(20)
    counts = served.server._rpcs.count("PullBlocks")
    deadline = time.monotonic() + 20
    while not counts.codes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert counts.codes == {"CANCELLED": 1}
    assert caplog.messages == []
    served.assert_clean()


def test_a_file_cut_short_is_told_and_the_server_goes_on(served: Served) -> None:
    scheduler = served.open()
    scheduler.admit("a", PROMPT)
    scheduler.cache("a", 10)
    os.truncate(scheduler.opened.pool.mappings[0].file.path, 100)
    hashes = ready_hashes(served)
    detail = refused(lambda: pull(served, hashes), grpc.StatusCode.DATA_LOSS)
    assert detail.reason == "MAPPING_TRUNCATED"
    assert scheduler.free("a").known
    served.assert_clean()
