"""Options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import Progress, ProgressColumn

Function = TypeVar("Function", bound=Callable[..., Any])

DEFAULT_TARGET = "127.0.0.1:50051"


def server_option(function: Function) -> Function:
    """Which server to ask."""
    return click.option(
        "--server",
        "target",
        default=DEFAULT_TARGET,
        show_default=True,
        envvar="KVDEPOT_SERVER",
        show_envvar=True,
        metavar="TARGET",
        help="HOST:PORT or unix:/path of a running server.",
    )(function)


def json_option(function: Function) -> Function:
    """Machine-readable output."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(function)


def seed_option(function: Function) -> Function:
    """What random choices begin with."""
    return click.option(
        "--seed",
        default=0,
        show_default=True,
        type=click.IntRange(0),
        metavar="N",
        help="Of the workload and of all tokens.",
    )(function)


def shown(text: str) -> str:
    """``text`` that a client or a peer chose, for a terminal: on one line, and no command to it."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def plain_console() -> Console:
    """Writes what is given to it, also where that looks like rich's markup: a request may be
    called ``[/INST]``.
    """
    return Console(markup=False, emoji=False, highlight=False)


def print_json(value: dict[str, Any]) -> None:
    """``value`` on standard output."""
    click.echo(json.dumps(value, indent=2))


def progress(*columns: ProgressColumn) -> Progress:
    """Goes to standard error, so that standard output stays clean, and only to a terminal."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def waiting(text: str) -> AbstractContextManager[object]:
    """``text`` while something takes its time; as with progress, only to a terminal."""
    console = Console(stderr=True)
    return console.status(text) if console.is_terminal else nullcontext()
