"""``kvdepot serve``: the server's own command line, if the server is installed."""

from __future__ import annotations

import click


@click.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(arguments: tuple[str, ...]) -> None:
    """Serve a KV-cache pool. `kvdepot serve --help` lists the options."""
    # Imported here, so that the other commands work without the server's packages; its
    # options are read by the server itself, and so are written once.
    try:
        from kvserver.serve import run
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"the server is not installed ({error.name} is missing): pip install 'kvdepot[server]'"
        ) from error
    raise SystemExit(run(arguments))
