"""The pool's bytes on all its devices: the same layout, and the same block ids, on each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvcore.errors import InvalidArgument, NotFound
from kvcore.memory.cuda import CudaIpcMapping, CudaMemory
from kvcore.memory.device import Device
from kvcore.memory.file import FileMapping, FileMemory
from kvcore.memory.layout import LayerLayout, layer_layouts
from kvcore.spec import DepotConfig

if TYPE_CHECKING:
    import torch


class PoolMemory:
    """Owns the bytes of every rank until ``close``.

    One allocation a device: on the CPU the file ``directory/kvdepot-NAME.pool``, on a CUDA
    device its memory. See FileMemory and CudaMemory for what is refused.
    """

    def __init__(
        self,
        config: DepotConfig,
        directory: str = "",
        *,
        name: str = "",
        devices: Sequence[Device] = (Device(),),
        huge_pages: bool = True,
    ) -> None:
        if len(devices) != config.num_ranks:
            raise InvalidArgument(
                f"{len(devices)} devices for {config.num_ranks} ranks", field="device"
            )
        self.config = config
        self.layouts = {layout.name: layout for layout in layer_layouts(config)}
        self._places = self._find_places()
        self.ranks: list[FileMemory | CudaMemory] = []
        nbytes = config.kv_cache.pool_bytes
        try:
            for device in devices:
                self.ranks.append(
                    FileMemory(nbytes, directory, name=name, huge_pages=huge_pages)
                    if device.index is None
                    else CudaMemory(nbytes, device)
                )
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of one rank."""
        return self.ranks[0].nbytes

    @property
    def path(self) -> str:
        """The file; empty when the bytes are on CUDA devices."""
        memory = self.ranks[0]
        return memory.path if isinstance(memory, FileMemory) else ""

    @property
    def mappings(self) -> list[FileMapping | CudaIpcMapping]:
        """What other processes map, one a rank."""
        return [memory.mapping for memory in self.ranks]

    def layer(
        self, name: str, *, kv_first: bool = False, rank: int = 0
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """A writable view of a layer, blocks first; of Mamba a tuple, one a state.

        K and V apart: ``(num_blocks, 2, block_size, num_kv_heads, head_size)``, of which
        ``kv_first`` swaps the first two dimensions over the same bytes. K and V heads of
        two sizes: ``(num_blocks, block_size, num_kv_heads, head_size + head_size_v)``.
        MLA: ``(num_blocks, block_size, head_size)``. Quantised heads carry their scale.
        A view is valid for as long as it lives, even after ``close``. ``rank`` counts the
        pool's own.
        """
        views = self._layout(name).views
        if kv_first and (views[0].name != "kv" or len(views[0].shape) != 5):
            raise InvalidArgument(f"layer {name!r} keeps no K and V apart", field="kv_first")
        memory = self.ranks[rank]
        if views[0].name == "state":
            return tuple([memory.tensor(view) for view in views])
        tensor = memory.tensor(views[0])
        return tensor.transpose(0, 1) if kv_first else tensor

    def parts(self, name: str, *, rank: int = 0) -> dict[str, torch.Tensor]:
        """Views of what quantised K and V consist of: data and scales, by name."""
        memory, views = self.ranks[rank], self._layout(name).views
        return {view.name: memory.tensor(view) for view in views if view.name[1:2] == "_"}

    def poison(self, block_ids: Iterable[int]) -> None:
        """Fill the blocks, of every group and rank, so that what is not written reads as NaN."""
        ranges = [
            (first + block_id * stride, nbytes)
            for block_id in block_ids
            for first, stride, nbytes in self._places
        ]
        for memory in self.ranks:
            memory.poison(ranges)

    def close(self) -> None:
        """Removes the file, gives device memory back. May be called again."""
        for memory in self.ranks:
            memory.close()

    def __enter__(self) -> PoolMemory:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _find_places(self) -> list[tuple[int, int, int]]:
        """What a block consists of, in few pieces: the first byte, from block to block, bytes."""
        sizes, _ = self.config.kv_cache.places
        if self.config.layout == "block":
            return [(0, sum(sizes), sum(sizes))]
        num_blocks = self.config.kv_cache.num_blocks
        return [(sum(sizes[:place]) * num_blocks, n, n) for place, n in enumerate(sizes)]

    def _layout(self, name: str) -> LayerLayout:
        layout = self.layouts.get(name)
        if layout is None:
            raise NotFound(f"there is no layer {name!r}", reason="UNKNOWN_LAYER", field="name")
        return layout
