"""The spec of layers that carry a state instead of attending."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import prod

from kvcore.errors import InvalidArgument
from kvcore.spec.base import (
    DTYPE_BYTES,
    KVCacheSpec,
    RequestLimits,
    cdiv,
    require_dtype,
    require_positive,
)

MAMBA_CACHE_MODES = ("none", "all", "align")
MAMBA_TYPES = ("mamba1", "mamba2", "short_conv", "linear", "gdn_attn", "custom")


@dataclass(frozen=True, slots=True)
class MambaSpec(KVCacheSpec):
    """One block holds one state: tensors of these ``shapes`` and ``dtypes``.

    ``mamba_cache_mode``: "none" keeps one running state; "all" one at every block
    boundary; "align" the running state, and those at boundaries where a step ended.
    ``num_speculative_blocks``: more states, one for each draft token.
    ``page_size_padded``: bytes, when a page is made larger than it need be.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    page_size_padded: int | None = None
    mamba_type: str = "mamba2"
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0

    def __post_init__(self) -> None:
        KVCacheSpec.__post_init__(self)
        if not self.shapes:
            raise InvalidArgument("a state has a tensor", field="shapes")
        for shape in self.shapes:
            for size in shape:
                require_positive("shapes", size)
        if len(self.dtypes) != len(self.shapes):
            raise InvalidArgument(
                f"{len(self.dtypes)} dtypes for {len(self.shapes)} shapes", field="dtypes"
            )
        for dtype in self.dtypes:
            require_dtype("dtypes", dtype)
        for name, known in (("mamba_cache_mode", MAMBA_CACHE_MODES), ("mamba_type", MAMBA_TYPES)):
            if getattr(self, name) not in known:
                raise InvalidArgument(
                    f"{name} {getattr(self, name)!r} is not one of {', '.join(known)}", field=name
                )
        if self.num_speculative_blocks < 0:
            raise InvalidArgument(
                "num_speculative_blocks must not be negative", field="num_speculative_blocks"
            )
        if self.page_size_padded is not None and self.page_size_padded < self.state_bytes:
            raise InvalidArgument(
                f"page_size_padded {self.page_size_padded} is less than the {self.state_bytes} "
                "bytes of a state",
                field="page_size_padded",
            )

    @property
    def kind(self) -> str:
        return "mamba"

    @property
    def uniform_key(self) -> Hashable:
        return ("mamba", self.mamba_cache_mode, self.num_speculative_blocks)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state's tensors, one behind the other."""
        return sum(
            prod(shape) * DTYPE_BYTES[dtype]
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @property
    def page_size_bytes(self) -> int:
        return self.state_bytes if self.page_size_padded is None else self.page_size_padded

    def max_memory_usage_bytes(self, limits: RequestLimits) -> int:
        num_states = {
            "none": 1,
            "align": 2,
            "all": cdiv(limits.max_model_len, self.block_size),
        }[self.mamba_cache_mode]
        return (num_states + self.num_speculative_blocks) * self.page_size_bytes
