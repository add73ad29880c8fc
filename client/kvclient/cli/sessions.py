"""``kvdepot sessions`` and ``kvdepot requests``: who is at work on a server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from kvclient.cli.options import json_option, print_json, server_option
from kvclient.client import Client
from kvclient.reports import RequestInfo, SessionInfo, SessionState

_PAGE_SIZE = 1000


@click.command()
@server_option
@json_option
def sessions(target: str, as_json: bool) -> None:
    """List the sessions, with their leases and what they hold."""
    with Client(target) as client:
        found = client.list_sessions()
    if as_json:
        print_json(
            {"sessions": [asdict(info) | {"state": info.state.name.lower()} for info in found]}
        )
    elif found:
        Console().print(_sessions_table(found))
    else:
        click.echo("no session is open")


@click.command()
@server_option
@click.option("--session", "session_id", default="", metavar="ID", help="Only those of a session.")
@click.option(
    "--limit",
    default=1000,
    show_default=True,
    type=click.IntRange(1),
    help="List at most so many, the oldest first.",
)
@json_option
def requests(target: str, session_id: str, limit: int, as_json: bool) -> None:
    """List the requests, of all sessions or one, with what they hold."""
    with Client(target) as client:
        found: list[RequestInfo] = []
        more = False
        for info in _requests(client, session_id):
            more = len(found) == limit
            if more:
                break
            found.append(info)
    if as_json:
        listed = [asdict(info) | {"state": info.state.name.lower()} for info in found]
        print_json({"requests": listed, "more": more})
        return
    if found:
        Console().print(_requests_table(found))
    else:
        click.echo("no request is known")
    if more:
        click.echo(f"there are more than these {limit}: say --limit", err=True)


def _requests(client: Client, session_id: str) -> Iterator[RequestInfo]:
    token = ""
    while True:
        page = client.list_requests(session_id, page_size=_PAGE_SIZE, page_token=token)
        yield from page.requests
        token = page.next_page_token
        if not token:
            return


def _sessions_table(found: tuple[SessionInfo, ...]) -> Table:
    table = _table("id", "name", "state", "opened", "lease", *_COUNTS)
    for info in found:
        table.add_row(
            info.session_id,
            info.name,
            info.state.name.lower(),
            f"{span(info.age_seconds)} ago",
            _lease(info),
            f"{info.num_requests:,}",
            f"{info.num_tokens:,}",
            f"{info.num_blocks:,}",
            f"{info.num_quarantined_blocks:,}",
            f"{info.num_workers:,}",
        )
    return table


_COUNTS = ("requests", "tokens", "blocks", "quarantined", "workers")


def _requests_table(found: list[RequestInfo]) -> Table:
    table = _table(
        *("session", "id", "state", "lora"),
        *("tokens", "prompt", "computed", "blocks", "preemptions"),
    )
    for info in found:
        table.add_row(
            info.session_id,
            info.request_id,
            info.state.name.lower(),
            info.lora_name or "",
            f"{info.num_tokens:,}",
            f"{info.num_prompt_tokens:,}",
            f"{info.num_computed_tokens:,}",
            f"{info.num_blocks:,}",
            f"{info.num_preemptions:,}",
        )
    return table


def _table(*columns: str) -> Table:
    table = Table()
    for name in columns:
        numeric = name in _NUMERIC
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric)
    return table


_NUMERIC = (*_COUNTS, "prompt", "computed", "preemptions")


def _lease(info: SessionInfo) -> str:
    if info.state is SessionState.DEPARTED:
        return "over"
    left, whole = span(info.lease_remaining_seconds), span(info.lease_ttl_seconds)
    return f"{left} of {whole}"


def span(seconds: float) -> str:
    """A time in plain words, such as 0.4 s, 12 s, 3 min, 5 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, unit in ((1, "s"), (60, "min"), (3600, "h")):
        if seconds < 120 * size or unit == "h":
            break
    return f"{seconds / size:,.0f} {unit}"
