"""``kvdepot import``: have a server pull cached blocks from a peer."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import click
from rich.progress import MofNCompleteColumn, SpinnerColumn, TextColumn

from kvclient.cli.options import json_option, print_json, progress, server_option, shown
from kvclient.cli.pull import cached_hashes, parse_hash
from kvclient.client import Client
from kvclient.errors import Unavailable
from kvclient.imports import ImportStatus, TransferPath

_PARENTS_SHOWN = 4
_PATHS = [path.name.lower() for path in TransferPath if path is not TransferPath.UNKNOWN]


@click.command("import")
@click.argument("hashes", nargs=-1, metavar="[HASH]...")
@server_option
@click.option("--from", "peer", required=True, metavar="HOST:PORT", help="The server to pull from.")
@click.option("--all", "everything", is_flag=True, help="Import every block that the peer caches.")
@click.option(
    "--group", default=0, show_default=True, metavar="N", help="KV cache group of the hashes."
)
@click.option(
    "--path",
    "paths",
    multiple=True,
    type=click.Choice(_PATHS),
    help="Only by this way; several are tried in order (default: the best that works).",
)
@click.option("--checksums", is_flag=True, help="Verify each block's checksum.")
@click.option(
    "--deadline",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="End it after so long, with what came (default: the server's bound).",
)
@json_option
def import_(
    hashes: tuple[str, ...],
    target: str,
    peer: str,
    everything: bool,
    group: int,
    paths: tuple[str, ...],
    checksums: bool,
    deadline: float | None,
    as_json: bool,
) -> None:
    """Have a server pull cached blocks from a peer.

    They are named by hash (in hex), parents before their children, and go into the server's
    own cache. With --all of every group. Status 1 if one is not here afterwards.
    """
    if bool(hashes) == everything:
        raise click.UsageError("give the hashes of blocks, or --all")
    if everything:
        wanted = _cached_by(peer, target)
    else:
        wanted = {group: [parse_hash(text) for text in hashes]}
    with (
        Client(target) as client,
        client.import_blocks(
            wanted,
            peer,
            paths=[TransferPath[path.upper()] for path in paths],
            checksums=checksums,
            deadline_s=deadline,
        ) as running,
        progress(
            SpinnerColumn(), TextColumn("importing"), MofNCompleteColumn(), TextColumn("blocks")
        ) as bar,
    ):
        task = bar.add_task("", total=sum(map(len, wanted.values())))
        for so_far in running:
            bar.update(task, completed=so_far.num_blocks)
        result = running.result()
    counts = Counter(status for column in result.statuses.values() for status in column)
    summary = {status.name.lower(): counts[status] for status in ImportStatus}
    if as_json:
        failures = [asdict(one) | {"path": one.path.name.lower()} for one in result.failures]
        path = result.path.name.lower()
        parents = {
            number: [block_hash.hex() for block_hash in missing]
            for number, missing in result.missing_parents.items()
        }
        print_json(
            {"bytes": result.num_bytes, "path": path, **summary}
            | {"failures": failures, "missing_parents": parents}
        )
    else:
        for failure in result.failures:
            click.echo(f"{failure.path.name.lower()}: {shown(failure.reason)}", err=True)
        for missing in result.missing_parents.values():
            named = ", ".join(block_hash.hex() for block_hash in missing[:_PARENTS_SHOWN])
            num_more = len(missing) - _PARENTS_SHOWN
            # They are told up to some number.
            more = f" and at least {num_more} more" if num_more > 0 else ""
            click.echo(
                "not attempted: a block is kept only behind its parent, and these parents are "
                f"not here: {named}{more}; name them too, before their children",
                err=True,
            )
        text = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in summary.items())
        click.echo(f"{text}; {result.num_bytes:,} bytes")
    if not result.is_complete:
        raise SystemExit(1)


def _cached_by(peer: str, target: str) -> dict[int, list[bytes]]:
    """What the peer caches, if it is of the content that the server at ``target`` keeps."""
    with Client(target) as client:
        here = client.describe_pool().fingerprint
    try:
        with Client(peer) as client:
            there = client.describe_pool().fingerprint
            wanted = cached_hashes(client)
    except Unavailable as error:
        raise click.ClickException(
            f"the peer {peer} (--from) cannot be asked: {error.message} ({error.reason})"
        ) from error
    if there != here:
        raise click.ClickException(
            f"the peer's blocks are of another content: its fingerprint is {there}, this server's "
            f"{here}; model, dtype, groups, block size or hash scheme differ (FINGERPRINT_MISMATCH)"
        )
    if not wanted:
        raise click.ClickException("the peer caches nothing")
    return wanted
