"""``kvdepot pull``: copy cached blocks out of a server."""

from __future__ import annotations

from collections import defaultdict
from typing import BinaryIO

import click
from rich.progress import MofNCompleteColumn, SpinnerColumn, TextColumn

from kvclient.cli.options import json_option, print_json, progress, server_option
from kvclient.client import Client
from kvclient.events import BlockStored
from kvclient.values import BlockStatus

_BLOCKS_A_CALL = 4096
_HEX_DIGITS = 64
_HEX_DIGITS_XXHASH = 32


@click.command()
@click.argument("hashes", nargs=-1, metavar="[HASH]...")
@server_option
@click.option(
    "--all", "everything", is_flag=True, help="Pull every block of the group that is cached now."
)
@click.option(
    "--group", default=0, show_default=True, metavar="N", help="KV cache group of the blocks."
)
@click.option(
    "--output",
    type=click.File("wb"),
    metavar="FILE",
    help="Write the blocks' bytes there ('-': stdout).",
)
@json_option
def pull(
    hashes: tuple[str, ...],
    target: str,
    everything: bool,
    group: int,
    output: BinaryIO | None,
    as_json: bool,
) -> None:
    """Pull cached blocks by hash (in hex) and verify their checksums.

    Status 1 if one is not there. With --all --json every hash is listed.
    """
    if bool(hashes) == everything:
        raise click.UsageError("give the hashes of blocks, or --all")
    counts = dict.fromkeys(BlockStatus, 0)
    num_bytes = 0
    blocks = []
    named = [parse_hash(text) for text in hashes]
    with Client(target) as client:
        wanted = cached_hashes(client).get(group, []) if everything else named
        with progress(
            SpinnerColumn(), TextColumn("pulling"), MofNCompleteColumn(), TextColumn("blocks")
        ) as bar:
            task = bar.add_task("", total=len(wanted))
            for start in range(0, len(wanted), _BLOCKS_A_CALL):
                part = wanted[start : start + _BLOCKS_A_CALL]
                for block in client.pull_blocks(part, group, checksums=True):
                    counts[block.status] += 1
                    num_bytes += len(block.data)
                    if output is not None:
                        output.write(block.data)
                    blocks.append((block.block_hash.hex(), block.status.name.lower()))
                    bar.advance(task)
    summary = {status.name.lower(): count for status, count in counts.items()}
    # The bytes may go to standard output.
    to_stderr = output is not None and output.name == "<stdout>"
    if as_json and not to_stderr:
        print_json({"bytes": num_bytes, **summary, "blocks": dict(blocks)})
    else:
        if not everything:
            for name, status in blocks:
                click.echo(f"{name} {status}", err=to_stderr)
        text = ", ".join(f"{count} {name}" for name, count in summary.items())
        click.echo(f"{text}; {num_bytes:,} bytes", err=to_stderr)
    if counts[BlockStatus.READY] < len(wanted) and not everything:
        raise SystemExit(1)


def parse_hash(text: str) -> bytes:
    try:
        block_hash = bytes.fromhex(text)
    except ValueError:
        block_hash = b""
    if 2 * len(block_hash) not in (_HEX_DIGITS, _HEX_DIGITS_XXHASH):
        raise click.BadParameter(
            f"{text!r} is no hash: one has {_HEX_DIGITS} hex digits "
            f"({_HEX_DIGITS_XXHASH} under xxhash_cbor)",
            param_hint="HASH",
        )
    return block_hash


def cached_hashes(client: Client) -> dict[int, list[bytes]]:
    """The hashes of a snapshot by KV cache group, parents first."""
    hashes: defaultdict[int, list[bytes]] = defaultdict(list)
    with client.stream_events(snapshot=True) as batches:
        for batch in batches:
            for event in batch.events:
                if isinstance(event, BlockStored):
                    hashes[event.group].extend(event.block_hashes)
            if batch.snapshot_end:
                break
    return hashes
