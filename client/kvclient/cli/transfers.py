"""``kvdepot transfers``: what goes from and to a server's peers."""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.table import Table

from kvclient.cli.options import json_option, plain_console, print_json, server_option, shown
from kvclient.cli.sessions import plain_table, span
from kvclient.client import Client
from kvclient.reports import TransferDirection, TransferInfo

_MIB = 1 << 20


@click.command()
@server_option
@json_option
def transfers(target: str, as_json: bool) -> None:
    """List what peers read, and what is imported.

    Only the beginning of an id is shown: whoever knows all of it may read the blocks.
    """
    with Client(target) as client:
        found = client.list_transfers()
    if as_json:
        listed = [asdict(info) | {"direction": info.direction.name.lower()} for info in found]
        print_json({"transfers": listed})
    elif found:
        plain_console().print(_table(found))
    else:
        click.echo("no transfer is open, no import runs")


def _table(found: tuple[TransferInfo, ...]) -> Table:
    table = plain_table(
        *("id", "direction", "peer", "opened", "ends in"),
        *("blocks", "MiB", "done"),
        folded=("peer",),
    )
    for info in found:
        is_import = info.direction is TransferDirection.IN
        table.add_row(
            info.transfer,
            info.direction.name.lower(),
            shown(info.name),
            f"{span(info.age_seconds)} ago",
            span(info.lease_remaining_seconds),
            f"{info.num_blocks:,}",
            f"{info.num_bytes / _MIB:,.1f}",
            f"{info.num_blocks_done:,}" if is_import else "",
        )
    return table
