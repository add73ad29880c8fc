"""What can be known of CUDA memory without a GPU: names, refusals, the fields of a handle."""

from __future__ import annotations

from typing import Any

import pytest

from block_pages import block_pages
from building import config, full, groups_config, window
from kvcore.errors import InvalidArgument, ResourceExhausted
from kvcore.memory import Device, PoolMemory, parse_devices
from kvcore.memory.cuda import CudaIpcMapping, share

torch = pytest.importorskip("torch")

WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


@pytest.mark.parametrize(
    ("text", "names"),
    [("cpu", ["cpu"]), ("cuda:0", ["cuda:0"]), ("cuda:3,1", ["cuda:3", "cuda:1"])],
)
def test_devices(text: str, names: list[str]) -> None:
    assert [str(device) for device in parse_devices(text)] == names


@pytest.mark.parametrize(
    "text", ["", "cuda", "cuda:", "cuda:x", "cuda:-1", "cuda:0,", "cuda:0,0", "gpu:0", "cpu:0"]
)
def test_what_names_no_device(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be cpu, cuda:N or|names a device twice"):
        parse_devices(text)


@WITHOUT_CUDA
def test_without_cuda_the_device_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"cuda:1 cannot be had: .*, or name cpu") as caught:
        PoolMemory(config(5), devices=[Device(1)])
    assert caught.value.field == "device"


def test_a_device_for_every_rank() -> None:
    with pytest.raises(InvalidArgument, match="1 devices for 2 ranks"):
        PoolMemory(config(5, tensor_parallel_size=2, num_ranks=2), "/nowhere", name="x")


class FakeStorage:
    """What torch answers of a storage on a device, with the types that it has."""

    handle = bytes(range(65))

    def _share_cuda_(self) -> tuple[Any, ...]:
        return (1, self.handle, 4096, 512, b"/torch_7_9", 3, bytes(64), True)


def test_the_fields_of_a_handle() -> None:
    assert share(FakeStorage(), "GPU-1") == CudaIpcMapping(
        device_index=1,
        device_uuid="GPU-1",
        handle=FakeStorage.handle,
        nbytes=4096,
        offset_bytes=512,
        ref_counter_handle=b"/torch_7_9",
        ref_counter_offset=3,
        event_handle=bytes(64),
        event_sync_required=True,
    )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices of 1 MiB, whose memory is this process's."""
    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1 << 20, 1 << 30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: type("Properties", (), {"uuid": f"GPU-{index}"}),
    )
    monkeypatch.setattr(torch, "zeros", lambda n, dtype, device: zeros(n, dtype=dtype))
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", FakeStorage._share_cuda_)
    monkeypatch.setattr(torch.UntypedStorage, "handle", FakeStorage.handle, raising=False)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("layout", ["block", "layer"])
def test_a_pool_over_two_devices(layout: str) -> None:
    pools = groups_config(5, full(), window(8), layout=layout, tensor_parallel_size=2, num_ranks=2)
    with PoolMemory(pools, devices=parse_devices("cuda:1,0")) as memory:
        assert memory.path == ""
        assert memory.nbytes == pools.kv_cache.pool_bytes
        first, second = memory.mappings
        assert isinstance(first, CudaIpcMapping) and isinstance(second, CudaIpcMapping)
        assert (first.device_uuid, second.device_uuid) == ("GPU-1", "GPU-0")
        for rank in (0, 1):
            view = memory.layer("layer.0", rank=rank)
            assert isinstance(view, torch.Tensor)
            assert not view.any()
            view[3].fill_(rank + 1)
        # 4 tokens of 16 elements of bfloat16, K and V.
        assert block_pages(memory, 3) == b"\x80\x3f" * 128 + b"\0\x40" * 128
        memory.poison([3])
        for rank in (0, 1):
            poisoned = torch.isnan(memory.layer("layer.1", rank=rank)).flatten(1).all(dim=1)
            assert poisoned.tolist() == [False, False, False, True, False]
    memory.close()
    assert view[3].isnan().all()  # whoever maps it keeps the bytes


@pytest.mark.usefixtures("cuda")
def test_too_small_a_device_is_refused() -> None:
    with pytest.raises(ResourceExhausted, match=r"needs 2560000 bytes on cuda:0, which has") as e:
        PoolMemory(config(10_000), devices=[Device(0)])
    assert e.value.field == "num_blocks"
    with pytest.raises(InvalidArgument, match="only cuda:0 to cuda:1 here"):
        PoolMemory(config(5), devices=[Device(2)])
