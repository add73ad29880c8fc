"""``kvdepot reset`` and ``kvdepot evict``: taking content out of the prefix cache."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from kvclient.cli.options import json_option, print_json, server_option, shown, waiting
from kvclient.client import Client

_LEASE_S = 30.0


@click.command()
@server_option
@click.option(
    "--mode",
    default="refuse",
    show_default=True,
    type=click.Choice(["refuse", "drain", "force"]),
    help="While blocks are in use: refuse and say who holds them; admit nothing and wait for "
    "them; or reset all the same, and let what runs end without its blocks becoming hits.",
)
@click.option("--lora-name", metavar="NAME", help="Only content of this LoRA adapter.")
@click.option("--cache-salt", metavar="SALT", help="Only content with this cache salt.")
@click.option(
    "--timeout-seconds",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="How long a drain may take (default: the server's bound).",
)
@json_option
def reset(
    target: str,
    mode: str,
    lora_name: str | None,
    cache_salt: str | None,
    timeout_seconds: float | None,
    as_json: bool,
) -> None:
    """Empty the prefix cache, as after an update of the weights."""
    if timeout_seconds is not None and mode != "drain":
        raise click.UsageError("--timeout-seconds is for --mode drain")
    with (
        Client(target) as client,
        client.open_session("kvdepot reset", lease_ttl_s=_LEASE_S) as session,
        waiting("waiting for the blocks in use" if mode == "drain" else "reset"),
    ):
        result = session.reset_prefix_cache(
            mode, lora_name=lora_name, cache_salt=cache_salt, timeout_s=timeout_seconds
        )
    if as_json:
        print_json(
            {
                "generation": result.generation,
                "blocks": result.num_blocks_cleared,
                "holders": [asdict(holder) for holder in result.holders],
            }
        )
    else:
        click.echo(
            f"reset: {result.num_blocks_cleared} blocks lost their content; generation "
            f"{result.generation} has begun"
        )
        for holder in result.holders:
            click.echo(f"still in use, but no hits any more: {shown(str(holder))}")


class _BlockId(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    name = "block id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        if not (text.isascii() and text.isdigit() and int(text)):
            self.fail(
                f"{text!r} is no block id: they are whole numbers from 1, as block tables have "
                "them, and no hashes",
                param,
                ctx,
            )
        return int(text)


@click.command()
@click.argument("block_ids", nargs=-1, required=True, type=_BlockId(), metavar="ID...")
@server_option
@json_option
def evict(block_ids: tuple[int, ...], target: str, as_json: bool) -> None:
    """Take blocks out of the prefix cache, by block id.

    Who holds one keeps it; it is a hit for nobody any more.
    """
    with Client(target) as client:
        num_evicted = client.evict_blocks(block_ids)
    if as_json:
        print_json({"evicted": num_evicted})
    else:
        click.echo(f"{num_evicted} of {len(set(block_ids))} blocks had content and lost it")
