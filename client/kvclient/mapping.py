"""The bytes of one rank of a server's pool, mapped into this process.

torch is imported when a tensor is asked for or the bytes are on a CUDA device, numpy when
an array is.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import finalize

from kvclient.description import CudaIpcMapping, FileMapping, PoolMapping, TensorView
from kvclient.errors import FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


class MappedBytes(Protocol):
    """What a mapping can do. Views keep it alive."""

    device: str
    """torch's name of where it is."""

    def tensor(self, view: TensorView) -> torch.Tensor:
        """A writable view."""

    def array(
        self, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]
    ) -> npt.NDArray[np.uint8]:
        """A writable view of bytes; InvalidArgument where numpy cannot look."""

    def zero(self, offset: int, stride: int, nbytes: int, block_ids: Sequence[int]) -> None:
        """Zero ``nbytes`` of each block; block ``b`` begins at ``offset + b * stride``."""


def open_mapping(mapping: PoolMapping, at_end: Callable[[], None] | None = None) -> MappedBytes:
    """Maps the bytes for reading and writing.

    ``at_end`` is called when nobody refers to the mapping or a view of it any more (but
    not at the process's end). FailedPrecondition when the bytes cannot be reached from
    here.
    """
    if isinstance(mapping, FileMapping):
        return MappedFile(mapping, at_end)
    return MappedCuda(mapping, at_end)


class MappedFile:
    """The CPU's: a file."""

    device = "cpu"

    def __init__(self, mapping: FileMapping, at_end: Callable[[], None] | None) -> None:
        try:
            fd = os.open(mapping.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise FailedPrecondition(
                f"cannot open the pool's mapping: {error}", reason="MAPPING_UNREACHABLE"
            ) from error
        try:
            size = os.fstat(fd).st_size
            if size != mapping.nbytes:
                raise FailedPrecondition(
                    f"{mapping.path} has {size} bytes, the server says {mapping.nbytes}",
                    reason="MAPPING_MISMATCH",
                )
            self._mapping = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        if mapping.huge_pages:
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        if at_end is not None:
            finalize(self._mapping, at_end).atexit = False

    def tensor(self, view: TensorView) -> torch.Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, view.dtype)
        count = len(self._mapping) // dtype.itemsize
        return torch.frombuffer(self._mapping, dtype=dtype, count=count).as_strided(
            view.shape, view.strides, view.offset_bytes // dtype.itemsize
        )

    def array(
        self, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]
    ) -> npt.NDArray[np.uint8]:
        import numpy as np

        return np.ndarray(shape, np.uint8, buffer=self._mapping, offset=offset, strides=strides)

    def zero(self, offset: int, stride: int, nbytes: int, block_ids: Sequence[int]) -> None:
        zeros = bytes(nbytes)
        for block_id in block_ids:
            start = offset + block_id * stride
            self._mapping[start : start + nbytes] = zeros


class MappedCuda:
    """A CUDA device's: an allocation of the server's, opened by CUDA IPC.

    Not run on a GPU yet.
    """

    def __init__(self, mapping: CudaIpcMapping, at_end: Callable[[], None] | None) -> None:
        import torch

        index = _local_index(mapping)
        self.device = f"cuda:{index}"
        storage = open_storage(mapping, index)
        self._bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if at_end is not None:

            def after_last_write() -> None:
                torch.cuda.synchronize(index)
                at_end()

            finalize(storage, after_last_write).atexit = False

    def tensor(self, view: TensorView) -> torch.Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, view.dtype)
        count = self._bytes.numel() // dtype.itemsize
        flat = self._bytes[: count * dtype.itemsize].view(dtype)
        return flat.as_strided(view.shape, view.strides, view.offset_bytes // dtype.itemsize)

    def array(
        self, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]
    ) -> npt.NDArray[np.uint8]:
        raise InvalidArgument(
            f"the bytes are on {self.device}, where numpy cannot look: take Pool.layer",
            field="layer",
        )

    def zero(self, offset: int, stride: int, nbytes: int, block_ids: Sequence[int]) -> None:
        import torch

        num_blocks = max(block_ids, default=-1) + 1
        pages = self._bytes.as_strided((num_blocks, nbytes), (stride, 1), offset)
        index = torch.tensor(list(block_ids), dtype=torch.int64, device=self._bytes.device)
        pages.index_fill_(0, index, 0)


def open_storage(mapping: CudaIpcMapping, device_index: int) -> Any:
    """The storage of a mapping on this process's CUDA device ``device_index``."""
    import torch

    return torch.UntypedStorage._new_shared_cuda(
        device_index,
        mapping.handle,
        mapping.nbytes,
        mapping.offset_bytes,
        mapping.ref_counter_handle,
        mapping.ref_counter_offset,
        mapping.event_handle,
        mapping.event_sync_required,
    )


def _local_index(mapping: CudaIpcMapping) -> int:
    """This process's number of the device, which may not be the server's."""
    import torch

    if not torch.cuda.is_available():
        raise FailedPrecondition(
            f"the pool's bytes are on the server's cuda:{mapping.device_index} (GPU "
            f"{mapping.device_uuid}), and torch {torch.__version__} finds no CUDA device in "
            "this process: run it where the GPU is, with a CUDA build of torch",
            reason="NO_CUDA",
        )
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == mapping.device_uuid:
            return index
    raise FailedPrecondition(
        f"the pool's bytes are on GPU {mapping.device_uuid}, which this process does not see: "
        "look at CUDA_VISIBLE_DEVICES, or run it on the server's host",
        reason="DEVICE_NOT_VISIBLE",
    )
