"""The command group; every command is a file beside this one."""

from __future__ import annotations

import click

from kvclient.cli.admin import audit, drain, stat
from kvclient.cli.empty import evict, reset
from kvclient.cli.imports import import_
from kvclient.cli.options import shown
from kvclient.cli.pull import pull
from kvclient.cli.replay import demo, replay
from kvclient.cli.serve import serve, unknown_variables
from kvclient.cli.sessions import requests, sessions
from kvclient.cli.transfers import transfers
from kvclient.errors import KVDepotError, Unavailable


class _Group(click.Group):
    """Turns what the client raises into one line and status 1."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except Unavailable as error:
            if error.answered:
                raise click.ClickException(f"{shown(error.message)} ({error.reason})") from error
            raise click.ClickException(
                "no kvdepot server answers there; start one with `kvdepot serve`, or name it "
                f"with --server ({error.reason}: {shown(error.message)})"
            ) from error
        except KVDepotError as error:
            raise click.ClickException(f"{shown(error.message)} ({error.reason})") from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvdepot")
@click.pass_context
def main(context: click.Context) -> None:
    """kvdepot: a standalone KV-cache service for LLM inference."""
    if context.invoked_subcommand != "serve":  # which tells it in its log
        for message in unknown_variables():
            click.echo(f"Warning: {message}", err=True)


for command in (
    *(serve, replay, demo),
    *(stat, sessions, requests, transfers, audit),
    *(pull, import_, evict, reset, drain),
):
    main.add_command(command)
