"""``kvdepot stat``, ``audit`` and ``drain``: a server as a whole."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvclient.cli.options import json_option, print_json, server_option, shown, waiting
from kvclient.cli.sessions import span
from kvclient.client import Client
from kvclient.description import FileMapping, KVCacheGroup, PoolDescription
from kvclient.reports import SessionState, Stats, TransferDirection


@click.command()
@server_option
@json_option
def stat(target: str, as_json: bool) -> None:
    """Show a server's figures."""
    with Client(target) as client:
        stats = client.stats()
        pool = client.describe_pool()
    if as_json:
        print_json({**asdict(stats), "pool": _pool_json(pool)})
    else:
        Console().print(_stats_table(stats, pool))


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
            click.echo(f"in use: {shown(str(holder))}")
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
        # Before: a server that nothing keeps waiting is gone at once.
        transfers = client.list_transfers()
        sessions = client.list_sessions()
        num_sessions = client.drain()
    if as_json:
        print_json({"sessions": num_sessions, "transfers": len(transfers)})
        return
    click.echo(
        f"the server stops; within its grace it waits for {num_sessions} sessions and "
        f"{len(transfers)} transfers and imports"
    )
    for session in sessions:
        if session.state is SessionState.OPEN:
            who = shown(session.name) or session.session_id
            click.echo(f"session {who} ({session.num_requests} requests)")
    for info in transfers:
        kind = "import" if info.direction is TransferDirection.IN else "transfer"
        click.echo(
            f"{kind} {info.transfer} ({shown(info.name) or 'unnamed'}, {info.num_blocks} blocks, "
            f"ends within {span(info.lease_remaining_seconds)})"
        )


def _stats_table(stats: Stats, pool: PoolDescription) -> Table:
    table = Table(title="kvdepot", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right", overflow="fold")
    usable = stats.num_blocks - 1
    for name, value in (
        ("epoch", stats.epoch),
        ("uptime", f"{stats.uptime_seconds:,.0f} s"),
        ("model", f"{pool.model or 'unnamed'} {pool.weights_revision}".rstrip()),
        ("fingerprint", pool.fingerprint),
        *((f"group {i}", _group(group)) for i, group in enumerate(pool.groups)),
        ("device", _device(pool)),
        ("bytes", f"{_num_bytes(pool):,}"),
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


def _group(group: KVCacheGroup) -> str:
    spec = group.spec
    window = spec.sliding_window or spec.attention_chunk_size or spec.rswa_window
    return f"{group.kind}, {len(group.layer_names)} layers, {group.block_size} tokens a block" + (
        f", window {window}" if window else ""
    )


def _device(pool: PoolDescription) -> str:
    """Where the bytes are, a rank each."""
    places = [
        "cpu" if isinstance(mapping, FileMapping) else f"cuda:{mapping.device_index}"
        for mapping in pool.mappings
    ]
    return ", ".join(places) or "none: the server keeps no bytes"


def _num_bytes(pool: PoolDescription) -> int:
    return sum(mapping.nbytes for mapping in pool.mappings)


def _pool_json(pool: PoolDescription) -> dict[str, Any]:
    return {
        "model": pool.model,
        "weights_revision": pool.weights_revision,
        "fingerprint": pool.fingerprint,
        "groups": [
            {
                "kind": group.kind,
                "num_layers": len(group.layer_names),
                "block_size": group.block_size,
            }
            for group in pool.groups
        ],
        "device": _device(pool) if pool.mappings else None,
        "bytes": _num_bytes(pool),
    }


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else f"{part:,}"
