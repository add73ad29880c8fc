"""Mapping a pool on CUDA devices, as far as a machine without a GPU can tell."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest

from kvclient import convert_pool
from kvclient.description import CudaIpcMapping, FileMapping, PoolDescription
from kvclient.errors import FailedPrecondition, InvalidArgument
from kvclient.pool import map_pool
from kvcore.memory.cuda import CudaIpcMapping as ServersMapping
from kvdepot.v1 import types_pb2
from kvserver import convert_pool as servers_convert_pool

torch = pytest.importorskip("torch")

FIELDS = {
    "device_index": 1,
    "device_uuid": "3f0c8f0e-0000-4000-8000-00000000000a",
    "handle": bytes(range(65)),
    "nbytes": 9 * 256,
    "offset_bytes": 1 << 33,
    "ref_counter_handle": b"/torch_7_9",
    "ref_counter_offset": 3,
    "event_handle": bytes(range(64)),
    "event_sync_required": True,
}
MAPPING = CudaIpcMapping(**FIELDS)


def test_a_handle_travels_field_by_field() -> None:
    sent = servers_convert_pool.pool_mapping(ServersMapping(**FIELDS)).SerializeToString()
    assert convert_pool.pool_mapping(types_pb2.PoolMapping.FromString(sent)) == MAPPING


@pytest.fixture(scope="module")
def description(serve: Any) -> PoolDescription:
    """A pool of 9 blocks in two layers, said to be on a device."""
    server = serve(num_blocks=9, num_layers=2, num_kv_heads=1, head_size=16, dtype="bfloat16")
    with server.client() as client:
        found: PoolDescription = client.describe_pool()
    (mapping,) = found.mappings
    mapping = dataclasses.replace(MAPPING, nbytes=mapping.nbytes)
    return dataclasses.replace(found, mappings=(mapping,))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_without_cuda_it_is_refused(description: PoolDescription) -> None:
    with pytest.raises(FailedPrecondition, match=r"GPU 3f0c8f0e.*finds no CUDA device") as caught:
        map_pool(description)
    assert caught.value.reason == "NO_CUDA"


class FakeCuda:
    """Two devices, whose memory is this process's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, uuids: list[str]) -> None:
        self.opened: list[tuple[Any, ...]] = []
        self.synchronized: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda index: type("Properties", (), {"uuid": uuids[index]}),
        )
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronized.append)
        monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", self.open, raising=True)

    def open(self, *arguments: Any) -> Any:
        self.opened.append(arguments)
        return torch.zeros(arguments[2], dtype=torch.uint8).untyped_storage()


def test_the_device_is_found_by_what_it_is(
    description: PoolDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch, ["other", MAPPING.device_uuid])
    pool = map_pool(description)
    (mapping,) = description.mappings
    assert isinstance(mapping, CudaIpcMapping)
    assert cuda.opened == [
        (
            *(1, mapping.handle, mapping.nbytes, mapping.offset_bytes),
            *(b"/torch_7_9", 3, mapping.event_handle, True),
        )
    ]
    assert pool.device == "cuda:1"
    assert pool.description.mapping_path == ""
    view = pool.layer(1)
    assert isinstance(view, torch.Tensor)
    assert view.shape == (9, 2, 4, 1, 16)
    view.fill_(1)
    pool.zero_blocks(0, [3, 8])
    assert view.flatten(1).any(dim=1).tolist() == [i not in (3, 8) for i in range(9)]
    with pytest.raises(InvalidArgument, match=r"numpy cannot look: take Pool\.layer"):
        pool.layer_bytes(1)


def test_a_device_that_is_not_seen(
    description: PoolDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda(monkeypatch, ["other"])
    with pytest.raises(FailedPrecondition, match="CUDA_VISIBLE_DEVICES") as caught:
        map_pool(description)
    assert caught.value.reason == "DEVICE_NOT_VISIBLE"


def test_the_attachment_ends_after_the_last_view_and_its_writes(
    description: PoolDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch, ["other", MAPPING.device_uuid])
    closed: list[list[int]] = []

    class Attachment:
        def close(self) -> None:
            closed.append(list(cuda.synchronized))

    attachment: Any = Attachment()
    with map_pool(description, attachment) as pool:
        view = pool.layer(0)
    with pytest.raises(FailedPrecondition, match="the pool is closed"):
        pool.layer(0)
    del pool
    gc.collect()
    assert closed == []
    del view
    gc.collect()
    assert closed == [[1]]


@pytest.mark.parametrize("rank", [None, 1, 4], ids=str)
def test_a_worker_of_several_says_which_it_is(
    description: PoolDescription, monkeypatch: pytest.MonkeyPatch, rank: int | None
) -> None:
    cuda = FakeCuda(monkeypatch, ["other", MAPPING.device_uuid])
    (first,) = description.mappings
    assert isinstance(first, CudaIpcMapping)
    second = dataclasses.replace(first, device_index=0, device_uuid="other")
    both = dataclasses.replace(
        description, mappings=(first, second), tensor_parallel_size=4, tensor_parallel_rank=2
    )
    with pytest.raises(InvalidArgument, match="ranks 2 to 3 of 4") as caught:
        map_pool(both, rank=rank)
    assert caught.value.field == "rank"
    assert map_pool(both, rank=3).device == "cuda:0"
    assert len(cuda.opened) == 1


def test_the_path_is_that_of_a_file(description: PoolDescription) -> None:
    on_file = dataclasses.replace(description, mappings=(FileMapping("/a", 1),))
    assert on_file.mapping_path == "/a"
    assert dataclasses.replace(description, mappings=()).mapping_path == ""
