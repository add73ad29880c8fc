"""The pool's bytes: where they lie, and who else may map them.

A page is one block in one layer; what it holds is in page.py. Two layouts of the same
pages: "block" keeps all layers of a block together (``[num_blocks, group_size, page]``),
"layer" all blocks of a layer (``[group_size, num_blocks, page]``). Layers of different
groups share a place, as vLLM's KVCacheTensor.shared_by says: a block is never in use by
two groups. Which place is whose says KVCacheConfig.places.

This package is the only part of kvcore that imports torch, and only when a tensor is
asked for or the bytes are on a device.
"""

from kvcore.memory.cuda import CudaIpcMapping, CudaMemory
from kvcore.memory.device import Device, parse_devices
from kvcore.memory.file import FileMapping, FileMemory, remove_abandoned
from kvcore.memory.layout import LayerLayout, Span, TensorView, joined, layer_layouts
from kvcore.memory.pool import PoolMemory

__all__ = [
    "CudaIpcMapping",
    "CudaMemory",
    "Device",
    "FileMapping",
    "FileMemory",
    "LayerLayout",
    "PoolMemory",
    "Span",
    "TensorView",
    "joined",
    "layer_layouts",
    "parse_devices",
    "remove_abandoned",
]
