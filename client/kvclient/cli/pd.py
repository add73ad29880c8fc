"""``kvdepot demo pd``: prefill on one server, decode on another, proven by bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvclient.cli.options import json_option, print_json, progress, seed_option
from kvclient.imports import TransferPath

if TYPE_CHECKING:
    from kvclient.replay.pd import PDSettings
    from kvclient.replay.pd_report import PDReport

_CAPACITY_TOKENS = 200_000


@click.command()
@click.option(
    "--requests",
    "num_requests",
    default=32,
    show_default=True,
    type=click.IntRange(1),
    metavar="N",
    help="Length of the workload.",
)
@seed_option
@click.option(
    "--model",
    default="tiny",
    show_default=True,
    metavar="NAME",
    help="Shape preset of the servers.",
)
@click.option(
    "--block-size", type=click.IntRange(1), metavar="TOKENS", help="Tokens a block of the servers."
)
@click.option(
    "--path",
    "paths",
    multiple=True,
    type=click.Choice([path.name.lower() for path in TransferPath if path]),
    help="Import only by this way; several are tried in order (default: the best that works).",
)
@click.option("--checksums", is_flag=True, help="Have the importing server verify checksums.")
@json_option
def pd(
    num_requests: int,
    seed: int,
    model: str,
    block_size: int | None,
    paths: tuple[str, ...],
    checksums: bool,
    as_json: bool,
) -> None:
    """Prefill on one server, decode on another.

    Each has a pool of its own. The prefill scheduler computes a prompt; the decode server
    imports its blocks, and its scheduler goes on from there. Every byte is read back.
    """
    try:
        from kvclient.replay.pd import PDSettings
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"the demo needs {error.name}: pip install {error.name}, or 'kvdepot[server]'"
        ) from error
    settings = PDSettings(
        num_requests=num_requests,
        seed=seed,
        paths=tuple(TransferPath[path.upper()] for path in paths),
        checksums=checksums,
    )
    options = ["--model", model, "--capacity-tokens", str(_CAPACITY_TOKENS)]
    options += ["--block-size", str(block_size)] if block_size else []
    report = _run(settings, options)
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    for failure in report.failures:
        click.echo(f"WRONG: {failure}", err=True)
    if not report.ok:
        raise SystemExit(1)


def _run(settings: PDSettings, server_options: list[str]) -> PDReport:
    from kvclient.cli.replay import stopped_by_sigterm
    from kvclient.replay.errors import ReplayError
    from kvclient.replay.pd import run
    from kvclient.replay.server import own_servers

    try:
        with (
            stopped_by_sigterm(),
            own_servers(server_options, 2) as targets,
            progress(
                TextColumn("handing over"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("requests"),
                TimeElapsedColumn(),
            ) as bar,
        ):
            task = bar.add_task("", total=settings.num_requests)
            return run(targets, settings, lambda done: bar.update(task, completed=done))
    except ReplayError as error:
        raise click.ClickException(str(error)) from error


def _print(report: PDReport) -> None:
    prefill, decode = report.prefill, report.decode
    table = Table(title="kvdepot demo pd", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    paths = ", ".join(f"{count} by {path}" for path, count in decode.paths.most_common())
    computed = decode.prompt_tokens - decode.hit_tokens - decode.imported_tokens
    violations = sum(map(len, report.violations.values()))
    rows = [
        ("requests", f"{decode.requests:,} in {report.seconds:,.1f} s"),
        ("prompt tokens", f"{decode.prompt_tokens:,}"),
        ("of them here already", f"{decode.hit_tokens:,}"),
        ("of them imported", f"{decode.imported_tokens:,}"),
        ("of them computed by decode", f"{computed:,}"),
        ("tokens decoded", f"{decode.output_tokens:,}"),
        ("imports", paths or "none"),
        ("imported", f"{decode.blocks_imported:,} blocks, {decode.bytes_imported:,} bytes"),
        ("prompts released by notice", f"{prefill.released:,}"),
        ("prompts released by deadline", f"{prefill.overdue:,}"),
        ("blocks verified before use", f"{decode.blocks_verified:,}"),
        ("blocks read again at the end", f"{decode.blocks_reread:,}"),
        ("wrong bytes", f"{decode.wrong_bytes:,}"),
        ("audit of both servers", f"{violations} violations"),
        ("outcome", "[green]all right" if report.ok else f"[red]{len(report.failures)} WRONG"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    parts = Table(title="time to the first token, ms")
    parts.add_column("part", style="bold")
    parts.add_column("p50", justify="right")
    parts.add_column("max", justify="right")
    for part, (p50, most) in report.parts().items():
        parts.add_row(part, f"{p50:.2f}", f"{most:.2f}")
    console = Console()
    console.print(table)
    console.print(parts)
