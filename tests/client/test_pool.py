"""The pool's bytes: written through the mapping, read in other processes, pulled over gRPC."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import zlib
from typing import Any

import pytest

from kvclient import Client, convert
from kvclient.errors import DataLoss, FailedPrecondition, InternalError, InvalidArgument, NotFound
from kvclient.events import BlockStored
from kvclient.pool import map_pool
from kvclient.slots import slot_mapping
from kvclient.values import BlockStatus, Content, PoolDescription, SlotRequest
from kvdepot.v1 import transfer_pb2

torch = pytest.importorskip("torch")

LOOK = """
import sys
from kvclient import Client
from kvclient.pool import map_pool
from kvclient.slots import slot_mapping
pool = map_pool(Client(sys.argv[1]).describe_pool())
slots = slot_mapping([int(block) for block in sys.argv[2].split(",")], pool.block_size, 0, 10)
for number in range(len(pool.layer_names)):
    key, value = pool.read_slots(number, slots)
    assert key[:, 0, 0].tolist() == [token + 16 * number for token in range(10)], key[:, 0, 0]
    assert value[:, 0, 15].tolist() == [-1.0] * 10
    pool.layer(number)[0, 0, 0, 0, 0] = 77 + number
"""


@pytest.mark.parametrize("layout", ["block", "layer"])
def test_three_see_the_same_bytes(serve: Any, layout: str) -> None:
    server = serve(layout=layout)
    with server.client() as client, client.open_session() as session:
        pool = map_pool(session.pool)
        result = session.allocate_slots(SlotRequest("a", Content(range(10)), lookup=True))
        (table,) = result.new_blocks
        slots = slot_mapping(table, pool.block_size, 0, 10, pad_to=12)
        for number, name in enumerate(pool.layer_names):
            key = torch.arange(12, dtype=torch.bfloat16).add(16 * number)
            pool.write_slots(
                name,
                slots,
                key[:, None, None].expand(12, 1, 16),
                torch.full((12, 1, 16), -1, dtype=torch.bfloat16),
            )
        session.cache_blocks("a", 10)

        subprocess.run(
            [sys.executable, "-c", LOOK, server.target, ",".join(map(str, table))],
            check=True,
            timeout=60,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert [float(pool.layer(i)[0, 0, 0, 0, 0]) for i in (0, 1)] == [77, 78]

        with client.stream_events(snapshot=True) as events:
            stored = [event for event in next(events).events if isinstance(event, BlockStored)]
        hashes = [block_hash for event in stored for block_hash in event.block_hashes]
        assert len(hashes) == 2
        pulled = list(client.pull_blocks([*hashes, bytes(32)], checksums=True))
        assert [block.status for block in pulled] == [
            BlockStatus.READY,
            BlockStatus.READY,
            BlockStatus.MISSING,
        ]
        for block, block_id in zip(pulled[:2], table, strict=False):
            pages = b"".join(pool.layer_bytes(number)[block_id].tobytes() for number in (0, 1))
            assert block.data == pages


def test_views(server: Any) -> None:
    with server.client() as client:
        pool = map_pool(client.describe_pool())
    view = pool.layer(1)
    assert view.shape == (65, 2, 4, 1, 16)
    assert pool.layer(1, kv_first=True).shape == (2, 65, 4, 1, 16)
    view[7, 1, 2, 0, :] = 1
    assert bool((pool.layer(pool.layer_names[1], kv_first=True)[1, 7, 2] == 1).all())
    assert pool.layer_bytes(1).shape == (65, 2, 4, 32)
    assert pool.layer_bytes(1)[7, 1, 2].tobytes() == b"\x80\x3f" * 16
    view[7] = 0
    assert pool.block_table([[3, 4], [5]]).tolist() == [[3, 4], [5, 0]]


@pytest.mark.parametrize("slots", [[65 * 4], [-2], [3, -7]], ids=str)
def test_a_slot_outside_the_pool(server: Any, slots: list[int]) -> None:
    with server.client() as client:
        pool = map_pool(client.describe_pool())
    with pytest.raises(InvalidArgument, match="outside"):
        pool.read_slots(0, slots)


@pytest.mark.parametrize("layer", ["other", 2, -1], ids=str)
def test_no_such_layer(server: Any, layer: str | int) -> None:
    with server.client() as client:
        pool = map_pool(client.describe_pool())
    with pytest.raises(NotFound):
        pool.layer(layer)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mapping_path": ""}, "NO_MAPPING"),
        ({"mapping_path": "/nowhere/at/all"}, "MAPPING_UNREACHABLE"),
        ({"mapping_bytes": 1}, "MAPPING_MISMATCH"),
    ],
    ids=["no-bytes", "another-host", "another-size"],
)
def test_what_cannot_be_mapped(server: Any, change: dict[str, Any], reason: str) -> None:
    with server.client() as client:
        description: PoolDescription = client.describe_pool()
    with pytest.raises(FailedPrecondition) as caught:
        map_pool(dataclasses.replace(description, **change))
    assert caught.value.reason == reason


def test_a_block_that_is_not_written_yet_is_pending(client: Client) -> None:
    with client.open_session() as session:
        session.allocate_slots(SlotRequest("a", Content(range(4)), lookup=True))
        with client.stream_events(snapshot=True) as events:
            assert next(events).events == ()
            session.cache_blocks("a", 4)
            event = next(events).events[0]
        assert isinstance(event, BlockStored)
        (block,) = client.pull_blocks(event.block_hashes)
        assert block.status is BlockStatus.READY


@pytest.mark.parametrize(
    ("data", "checksums", "error"),
    [
        pytest.param(b"abcd", [zlib.crc32(b"ab"), zlib.crc32(b"cd")], None, id="good"),
        pytest.param(b"abxx", [zlib.crc32(b"ab"), zlib.crc32(b"cd")], DataLoss, id="damaged"),
        pytest.param(b"abc", [], InternalError, id="odd"),
        pytest.param(b"abcd", [1], InternalError, id="a-checksum-short"),
    ],
)
def test_pulled_bytes_are_checked(
    data: bytes, checksums: list[int], error: type[Exception] | None
) -> None:
    ready, missing = transfer_pb2.BLOCK_STATUS_READY, transfer_pb2.BLOCK_STATUS_MISSING
    message = transfer_pb2.PullBlocksResponse(
        first_index=1, statuses=[ready, missing, ready], data=data, checksums=checksums
    )
    hashes = [bytes([number]) * 4 for number in range(4)]
    if error is not None:
        with pytest.raises(error):
            list(convert.pulled_blocks(message, hashes))
        return
    found = [(block.block_hash, block.data) for block in convert.pulled_blocks(message, hashes)]
    assert found == [(hashes[1], b"ab"), (hashes[2], b""), (hashes[3], b"cd")]
