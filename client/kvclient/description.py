"""What a server says of its pool: groups of layers, and where their tensors lie."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MambaState:
    """One tensor of a Mamba layer's state."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """What a layer keeps of each token, and for how long.

    ``kind`` is vLLM's name of it, ``block_size`` is in tokens, a page is one block of one
    layer, padding included. ``head_size_v`` 0: K and V are one vector. Windows are in
    tokens, and None where the kind has none.
    """

    kind: str
    block_size: int
    page_size_bytes: int
    num_kv_heads: int = 0
    head_size: int = 0
    head_size_v: int = 0
    dtype: str = ""
    kv_quant_mode: str = "none"
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    rswa_window: int | None = None
    sink_len: int | None = None
    mamba_states: tuple[MambaState, ...] = ()
    mamba_cache_mode: str | None = None
    num_speculative_blocks: int = 0


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share block tables. ``layer_specs``: one a layer, where they differ.

    ``needs_zeroing``: workers zero its new blocks before the step that writes them first,
    with ``Pool.zero_blocks``.
    """

    spec: KVCacheSpec
    layer_names: tuple[str, ...]
    layer_specs: tuple[KVCacheSpec, ...] = ()
    is_eagle_group: bool = False
    needs_zeroing: bool = False

    @property
    def kind(self) -> str:
        """Of attention."""
        return self.spec.kind

    @property
    def block_size(self) -> int:
        """Tokens a block, on one rank."""
        return self.spec.block_size


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor over the pool's mapping, blocks first; strides are in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Block ``b`` of the layer begins at ``offset_bytes + b * block_stride_bytes``.

    ``views`` begin with the layer's own tensor, of Mamba its states; behind it, where K
    and V are quantised, its parts.
    """

    name: str
    offset_bytes: int
    block_stride_bytes: int
    group: int
    views: tuple[TensorView, ...] = ()


@dataclass(frozen=True, slots=True)
class FileMapping:
    """A file of ``nbytes`` on the server's host; ``huge_pages``: it lies in huge pages."""

    path: str
    nbytes: int
    huge_pages: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaIpcMapping:
    """An allocation on a CUDA device of the server's host, to be opened by CUDA IPC.

    ``device_index`` is the server's number of the device, ``device_uuid`` everybody's.
    The rest is what ``torch.UntypedStorage._new_shared_cuda`` takes.
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


PoolMapping = FileMapping | CudaIpcMapping
"""Where the bytes of one rank are."""


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """A server's pool; block 0 is never handed out. ``mappings`` are those of the ranks that
    it holds, from ``tensor_parallel_rank`` on, and none when the server keeps no bytes. Hits
    are multiples of ``scheduler_block_size`` tokens.
    """

    epoch: str
    fingerprint: str
    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    layout: str
    layers: tuple[LayerLayout, ...]
    mappings: tuple[PoolMapping, ...]
    hash_scheme: str
    hash_seed: str
    hash_block_size: int
    max_model_len: int
    enable_prefix_caching: bool
    scheduler_block_size: int
    decode_context_parallel_size: int
    prefill_context_parallel_size: int
    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    model: str = ""
    weights_revision: str = ""

    @property
    def mapping_path(self) -> str:
        """The pool's file; empty when it has none: no bytes, or on CUDA devices."""
        first = self.mappings[0] if self.mappings else None
        return first.path if isinstance(first, FileMapping) else ""

    @property
    def table_block_sizes(self) -> tuple[int, ...]:
        """Tokens that one entry of a block table stands for, by group, over all ranks."""
        ranks = self.decode_context_parallel_size * self.prefill_context_parallel_size
        return tuple(group.block_size * ranks for group in self.groups)
