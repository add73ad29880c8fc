"""``kvdepot sessions`` and ``kvdepot requests``: who is at work on a server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import click
from rich import box
from rich.measure import Measurement
from rich.table import Table

from kvclient.cli.options import json_option, plain_console, print_json, server_option, shown
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
        print_table(_sessions_table(found), _short_sessions_table(found))
    else:
        click.echo("no session is open")


@click.command()
@server_option
@click.option(
    "--session",
    "session_id",
    default="",
    metavar="ID",
    help="Only those of a session; the beginning of its id will do.",
)
@click.option(
    "--limit",
    default=1000,
    show_default=True,
    type=click.IntRange(1),
    metavar="N",
    help="List at most so many, the oldest first.",
)
@json_option
def requests(target: str, session_id: str, limit: int, as_json: bool) -> None:
    """List the requests, of all sessions or one, with what they hold."""
    with Client(target) as client:
        session_id = _whole_id(client, session_id)
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
        print_table(_requests_table(found), _short_requests_table(found))
    else:
        click.echo("no request is known")
    if more:
        click.echo(f"there are more than these {limit}: say --limit", err=True)


def _whole_id(client: Client, beginning: str) -> str:
    """Of the session whose id begins so; ``beginning`` if there is none."""
    if not beginning:
        return ""
    ids = [info.session_id for info in client.list_sessions()]
    found = [session_id for session_id in ids if session_id.startswith(beginning)]
    if len(found) > 1:
        raise click.BadParameter(
            f"{len(found)} sessions begin with {beginning!r}: give more of the id",
            param_hint="--session",
        )
    return found[0] if found else beginning


def _requests(client: Client, session_id: str) -> Iterator[RequestInfo]:
    token = ""
    while True:
        page = client.list_requests(session_id, page_size=_PAGE_SIZE, page_token=token)
        yield from page.requests
        token = page.next_page_token
        if not token:
            return


def _sessions_table(found: tuple[SessionInfo, ...]) -> Table:
    table = plain_table("id", "name", "state", "opened", "lease", *_COUNTS, folded=("name",))
    for info in found:
        table.add_row(
            info.session_id,
            shown(info.name),
            info.state.name.lower(),
            f"{span(info.age_seconds)} ago",
            _lease(info),
            *_counts(info),
        )
    return table


def _short_sessions_table(found: tuple[SessionInfo, ...]) -> Table:
    # Of a departed session the lease is over, which says the state as well.
    table = plain_table(
        "id", "name", "lease", "requests", "tokens", "blocks", "held", "workers", folded=("name",)
    )
    for info in found:
        is_over = info.state is SessionState.DEPARTED
        lease = "over" if is_over else span(info.lease_remaining_seconds)
        table.add_row(info.session_id[:_SHORT], shown(info.name), lease, *_counts(info))
    return table


_COUNTS = ("requests", "tokens", "blocks", "quarantined", "workers")


def _counts(info: SessionInfo) -> tuple[str, ...]:
    return (
        f"{info.num_requests:,}",
        f"{info.num_tokens:,}",
        f"{info.num_blocks:,}",
        f"{info.num_quarantined_blocks:,}",
        f"{info.num_workers:,}",
    )


def _requests_table(found: list[RequestInfo]) -> Table:
    table = plain_table(
        *("session", "id", "state", "lora"),
        *("tokens", "prompt", "computed", "blocks", "preemptions"),
        folded=("id", "lora"),
    )
    for info in found:
        table.add_row(
            info.session_id,
            shown(info.request_id),
            info.state.name.lower(),
            shown(info.lora_name or ""),
            f"{info.num_tokens:,}",
            f"{info.num_prompt_tokens:,}",
            f"{info.num_computed_tokens:,}",
            f"{info.num_blocks:,}",
            f"{info.num_preemptions:,}",
        )
    return table


def _short_requests_table(found: list[RequestInfo]) -> Table:
    table = plain_table("session", "id", "state", "tokens", "computed", "blocks", folded=("id",))
    for info in found:
        table.add_row(
            info.session_id[:_SHORT],
            shown(info.request_id),
            info.state.name.lower(),
            f"{info.num_tokens:,}",
            f"{info.num_computed_tokens:,}",
            f"{info.num_blocks:,}",
        )
    return table


def plain_table(*columns: str, folded: tuple[str, ...]) -> Table:
    """``folded`` are those that callers name, and may be long; the others keep their width."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in _NUMERIC else "left",
            no_wrap=name not in folded,
            overflow="fold",
        )
    return table


_NUMERIC = (*_COUNTS, "held", "prompt", "computed", "preemptions", "MiB", "done")
# Of a session's id: enough to tell them apart, and for --session.
_SHORT = 8


def print_table(full: Table, short: Table) -> None:
    """``full`` if the terminal is wide enough for it, else ``short``."""
    console = plain_console()
    unbounded = console.options.update(max_width=1 << 16)
    fits = Measurement.get(console, unbounded, full).maximum <= console.width
    console.print(full if fits else short)


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
