"""``kvdepot serve``: the server's own command line, if the server is installed."""

from __future__ import annotations

import os
from difflib import get_close_matches

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


def unknown_variables() -> list[str]:
    """What is to be said of KVDEPOT_* variables that kvdepot does not have.

    Without the server's packages its variables are not known: only what looks like
    KVDEPOT_SERVER is told then.
    """
    known = "KVDEPOT_SERVER"
    given = [name for name in os.environ if name.startswith("KVDEPOT_") and name != known]
    if not given:
        return []
    try:
        from kvserver.environment import unknown
        from kvserver.sources import option_names
    except ModuleNotFoundError:
        return [
            f"{name} is no variable of kvdepot and is ignored; did you mean {known}?"
            for name in given
            if get_close_matches(name.upper(), [known], cutoff=0.85)
        ]
    return unknown(os.environ, option_names())
