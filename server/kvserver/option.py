"""What an option is made of: its default, how its value is read, and its help."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import field
from fractions import Fraction
from typing import Any

import yaml

from kvcore.memory import Device, parse_devices


def option(default: Any, parse: Callable[[Any], Any], text: str, metavar: str = "") -> Any:
    """A field of a configuration. ``parse`` raises ValueError."""
    return field(default=default, metadata={"parse": parse, "help": text, "metavar": metavar})


def flag_of(name: str) -> str:
    """The flag of the option ``name``."""
    return "--" + name.replace("_", "-")


def integer(low: int, high: int) -> Callable[[Any], int]:
    """A whole number from ``low`` to ``high``."""

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ValueError(f"must be a whole number, got {value!r}")
        try:
            number = int(value)
        except ValueError:
            raise ValueError(f"must be a whole number, got {value!r}") from None
        return _within(low, number, high)

    return parse


def num_bytes(low: int, high: int) -> Callable[[Any], int]:
    """As ``integer``, of bytes: also 512MiB, 4GiB (powers of 1,024) or 3M, 3MB (of 1,000)."""
    return _sized(low, high, "bytes", "such as 512MiB, 4GiB or 3MB", "B?")


def num_tokens(low: int, high: int) -> Callable[[Any], int]:
    """As ``integer``, of tokens: also 3M, 128k (powers of 1,000) or 128Ki (of 1,024)."""
    return _sized(low, high, "tokens", "such as 3M, 128k or 128Ki", "")


_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def _sized(low: int, high: int, noun: str, example: str, end: str) -> Callable[[Any], int]:
    form = re.compile(rf"(\d[\d_]*(?:\.\d+)?) ?(?:([kmgt])(i?))?{end}", re.ASCII | re.IGNORECASE)

    def parse(value: Any) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            return _within(low, value, high)
        found = form.fullmatch(value.strip()) if isinstance(value, str) else None
        if found is not None:
            digits, unit, binary = found.groups(default="")
            number = Fraction(digits.replace("_", ""))
            number *= (1024 if binary else 1000) ** _POWERS[unit.lower()]
            if number.denominator == 1:
                return _within(low, int(number), high)
        raise ValueError(f"must be a number of {noun}, maybe with a unit {example}; got {value!r}")

    return parse


def _within(low: int, number: int, high: int) -> int:
    if number < low:
        raise ValueError(f"must be at least {low}, got {number}")
    if number > high:
        raise ValueError(f"must be at most {high}, got {number}")
    return number


def bytes_shown(number: int) -> str:
    """``number`` in the largest unit in which it is whole, as ``num_bytes`` reads it."""
    power = 0
    while number and power < len(_POWERS) - 1 and number % 1024 == 0:
        number, power = number // 1024, power + 1
    return f"{number}{('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def yaml_value(text: str) -> Any:
    """What YAML gives. ValueError says in one line where it is none."""
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{at}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


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
