"""Bytes on a CUDA device, shared with other processes by CUDA IPC.

Not run on a GPU yet: what a CPU can check of it is tested, the rest is in tests/gpu.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcore.errors import InvalidArgument, ResourceExhausted
from kvcore.memory.device import POISON, Device, DeviceMemory
from kvcore.memory.layout import TensorView

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CudaIpcMapping:
    """What another process needs to map an allocation: all fields are plain values.

    They are those that ``torch.UntypedStorage._share_cuda_`` gives and
    ``_new_shared_cuda`` takes. ``device_index`` is this process's; ``device_uuid`` tells
    another one which of its devices that is. ``handle`` is the CUDA runtime's 64 bytes of
    the allocation within which the pool begins at ``offset_bytes``, with what torch puts
    before them. The reference counter, in shared memory, is torch's; ``event_handle`` is of
    the event after which the bytes are zeroed.
    """

    device_index: int
    device_uuid: str
    handle: bytes
    nbytes: int
    offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


def share(storage: Any, device_uuid: str) -> CudaIpcMapping:
    """The fields of a torch storage on a CUDA device.

    Shared once, however many map it: torch's counter, which each of them lowers, does not
    decide when the memory goes. The server keeps it until its process ends.
    """
    (
        device_index,
        handle,
        nbytes,
        offset_bytes,
        ref_counter_handle,
        ref_counter_offset,
        event_handle,
        event_sync_required,
    ) = storage._share_cuda_()
    return CudaIpcMapping(
        device_index=device_index,
        device_uuid=device_uuid,
        handle=handle,
        nbytes=nbytes,
        offset_bytes=offset_bytes,
        ref_counter_handle=ref_counter_handle,
        ref_counter_offset=ref_counter_offset,
        event_handle=event_handle,
        event_sync_required=event_sync_required,
    )


class CudaMemory(DeviceMemory[CudaIpcMapping]):
    """One allocation on one device.

    InvalidArgument, of the field ``device``, when there is no such device here;
    ResourceExhausted when it has too little memory.
    """

    def __init__(self, nbytes: int, device: Device) -> None:
        import torch

        self.nbytes = nbytes
        require_device(device)
        free, _ = torch.cuda.mem_get_info(device.index)
        try:
            if nbytes > free:
                raise torch.OutOfMemoryError
            self._bytes: torch.Tensor | None = torch.zeros(
                nbytes, dtype=torch.uint8, device=str(device)
            )
        except torch.OutOfMemoryError:
            raise ResourceExhausted(
                f"the pool needs {nbytes} bytes on {device}, which has {free} free: name fewer "
                "blocks or another device",
                reason="MAPPING_TOO_LARGE",
                field="num_blocks",
            ) from None
        torch.cuda.synchronize(device.index)
        uuid = str(torch.cuda.get_device_properties(device.index).uuid)
        self._mapping = share(self._bytes.untyped_storage(), uuid)

    @property
    def mapping(self) -> CudaIpcMapping:
        """The CUDA IPC handle, and what belongs to it."""
        return self._mapping

    def tensor(self, view: TensorView) -> torch.Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, view.dtype)
        count = self.nbytes // dtype.itemsize
        flat = self._all()[: count * dtype.itemsize].view(dtype)
        return flat.as_strided(view.shape, view.strides, view.offset_bytes // dtype.itemsize)

    def poison(self, ranges: list[tuple[int, int]]) -> None:
        import torch

        for offset, nbytes in ranges:
            self._all()[offset : offset + nbytes].fill_(POISON)
        torch.cuda.synchronize(self._all().device)

    def close(self) -> None:
        self._bytes = None

    def _all(self) -> torch.Tensor:
        assert self._bytes is not None
        return self._bytes


def require_device(device: Device) -> None:
    """InvalidArgument if torch finds no such CUDA device on this machine."""
    import torch

    assert device.index is not None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.index < count:
        return
    if count:
        reason = f"there are only cuda:0 to cuda:{count - 1} here"
    elif torch.version.cuda is None:
        reason = f"torch {torch.__version__} is a build without CUDA: install one with it"
    else:
        reason = "torch finds no CUDA device here: look at nvidia-smi and CUDA_VISIBLE_DEVICES"
    raise InvalidArgument(f"{device} cannot be had: {reason}, or name cpu", field="device")
