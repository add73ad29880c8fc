"""The devices of a pool: what is named, and what a device's bytes can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from kvcore.memory.layout import TensorView

if TYPE_CHECKING:
    import torch

POISON = 0xFF
"""Fills a block that nobody has written: NaN in bfloat16, float16, float32 and both fp8."""


@dataclass(frozen=True, slots=True)
class Device:
    """The CPU (``index`` None), or a CUDA device. ``str`` is torch's name of it."""

    index: int | None = None

    def __str__(self) -> str:
        return "cpu" if self.index is None else f"cuda:{self.index}"


def parse_devices(text: str) -> tuple[Device, ...]:
    """Devices from ``cpu``, ``cuda:N`` or ``cuda:N,M``, one a tensor-parallel rank, in order.

    ValueError for anything else, and for a device that is named twice.
    """
    if text == "cpu":
        return (Device(),)
    kind, colon, listed = text.partition(":")
    numbers = listed.split(",")
    if kind != "cuda" or not colon or not all(n.isascii() and n.isdigit() for n in numbers):
        raise ValueError(f"must be cpu, cuda:N or cuda:N,M for several ranks, got {text!r}")
    indexes = [int(number) for number in numbers]
    if len(set(indexes)) != len(indexes):
        raise ValueError(f"{text!r} names a device twice: each holds one rank")
    return tuple(Device(index) for index in indexes)


MappingT_co = TypeVar("MappingT_co", covariant=True)


class DeviceMemory(ABC, Generic[MappingT_co]):
    """The bytes of one rank, zeroed when made. ``mapping`` says how others map them."""

    nbytes: int

    @property
    @abstractmethod
    def mapping(self) -> MappingT_co:
        """What another process needs to map the bytes."""

    @abstractmethod
    def tensor(self, view: TensorView) -> torch.Tensor:
        """A writable view, valid for as long as it lives, even after ``close``."""

    @abstractmethod
    def poison(self, ranges: list[tuple[int, int]]) -> None:
        """Fill ranges (offset, bytes) with POISON; done, for every process, when it returns."""

    @abstractmethod
    def close(self) -> None:
        """Give the bytes up; whoever maps them keeps them. May be called again."""
