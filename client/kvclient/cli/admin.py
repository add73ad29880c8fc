"""``kvdepot stat``, ``audit`` and ``drain``: a server as a whole."""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from kvclient.cli.options import json_option, print_json, server_option, waiting
from kvclient.client import Client
from kvclient.reports import Stats


@click.command()
@server_option
@json_option
def stat(target: str, as_json: bool) -> None:
    """Show a server's figures."""
    with Client(target) as client:
        stats = client.stats()
    if as_json:
        print_json(asdict(stats))
    else:
        Console().print(_stats_table(stats))


@click.command()
@server_option
@json_option
def audit(target: str, as_json: bool) -> None:
    """Check every invariant of a server's pool.

    Status 1 if one is broken.
    """
    # Of a large pool the check takes seconds, in which the server does nothing else.
    with Client(target, timeout_s=300) as client, waiting("auditing"):
        report = client.audit()
    if as_json:
        print_json(asdict(report))
    else:
        for violation in report.violations:
            click.echo(violation)
        for holder in report.holders:
            click.echo(f"in use: {holder}")
        click.echo(
            f"{report.num_blocks_checked} blocks and {report.num_requests_checked} requests "
            f"checked: {len(report.violations)} violations"
        )
    if report.violations:
        raise SystemExit(1)


@click.command()
@server_option
@json_option
def drain(target: str, as_json: bool) -> None:
    """Stop a server, as SIGTERM does.

    It opens no new sessions, and those that are open get a grace to close.
    """
    with Client(target) as client:
        num_sessions = client.drain()
    if as_json:
        print_json({"sessions": num_sessions})
    else:
        click.echo(f"the server stops; it waits for {num_sessions} sessions, within its grace")


def _stats_table(stats: Stats) -> Table:
    table = Table(title="kvdepot", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    usable = stats.num_blocks - 1
    for name, value in (
        ("epoch", stats.epoch),
        ("uptime", f"{stats.uptime_seconds:,.0f} s"),
        ("blocks", f"{usable:,} and the null block"),
        ("  live", f"{stats.blocks.live:,}"),
        ("  cached", f"{stats.blocks.cached:,}"),
        ("  pinned for peers", f"{stats.blocks.pinned:,}"),
        ("  being imported", f"{stats.blocks.in_transfer:,}"),
        ("  quarantined", f"{stats.blocks.quarantined:,}"),
        ("  free", f"{stats.blocks.free:,}"),
        ("usage", f"{stats.usage:.1%}"),
        ("sessions", f"{stats.num_sessions:,}"),
        ("  over, their workers not", f"{stats.num_departed_sessions:,}"),
        ("workers attached", f"{stats.num_workers:,}"),
        ("requests", f"{stats.num_requests:,}"),
        ("tokens queried", f"{stats.prefix_cache_queries:,}"),
        ("tokens hit", _share(stats.prefix_cache_hits, stats.prefix_cache_queries)),
        ("  of preempted requests", _share(stats.preempted_hits, stats.preempted_queries)),
        ("evictions", f"{stats.evictions:,}"),
        ("generation", f"{stats.generation:,}" + (", a reset waits" * stats.reset_pending)),
        ("events", f"{stats.next_event_sequence:,}"),
        ("event subscribers", f"{stats.num_event_subscribers:,}"),
        ("transfers, imports", f"{stats.num_transfers:,}, {stats.num_imports:,}"),
        ("bytes pulled", f"{stats.pulled_bytes:,}"),
    ):
        table.add_row(name, value)
    return table


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else f"{part:,}"
