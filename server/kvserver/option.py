"""What an option is made of: its default, how its value is read, and its help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

from kvcore.memory import Device, parse_devices


def option(default: Any, parse: Callable[[Any], Any], text: str, metavar: str = "") -> Any:
    """A field of a configuration. ``parse`` raises ValueError."""
    return field(default=default, metadata={"parse": parse, "help": text, "metavar": metavar})


def integer(low: int, high: int) -> Callable[[Any], int]:
    """A whole number from ``low`` to ``high``."""

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ValueError(f"must be a whole number, got {value!r}")
        try:
            number = int(value)
        except ValueError:
            raise ValueError(f"must be a whole number, got {value!r}") from None
        if not low <= number <= high:
            raise ValueError(f"must be between {low} and {high}, got {number}")
        return number

    return parse


def real(low: float, high: float) -> Callable[[Any], float]:
    """A number from ``low`` to ``high``."""

    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError(f"must be a number, got {value!r}")
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"must be a number, got {value!r}") from None
        if not low <= number <= high:
            raise ValueError(f"must be between {low} and {high}, got {number}")
        return number

    return parse


def text(value: Any) -> str:
    """Any text."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"must be text, got {value!r}")
    return str(value)


def devices(value: Any) -> tuple[Device, ...]:
    """Devices, one a rank."""
    return parse_devices(text(value))


def choice(*choices: str) -> Callable[[Any], str]:
    """One of ``choices``."""

    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, got {value!r}")
        return str(value)

    return parse


def one_of(*choices: str) -> str:
    """The metavar of a choice."""
    return "{" + ",".join(choices) + "}"


def boolean(value: Any) -> bool:
    """True or false, in the usual words."""
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in words:
        raise ValueError(f"must be true or false, got {value!r}")
    return words[str(value).lower()]
