"""``kvdepot replay`` and ``kvdepot demo``: a trace through the service, proven by bytes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
)

from kvclient.cli.options import json_option, print_json, progress, seed_option
from kvclient.cli.pd import pd

if TYPE_CHECKING:
    from kvclient.replay.report import Report
    from kvclient.replay.settings import ReplaySettings

_CAPACITY_TOKENS = 3_000_000
_DEFAULT = click.core.ParameterSource.DEFAULT
_WHOLE_BLOCK = 1 << 20  # a stride ends with its block anyway


@click.command()
@click.argument("trace", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--server",
    "target",
    metavar="TARGET",
    help="HOST:PORT or unix:/path of a running server (default: one of its own).",
)
@click.option(
    "--schedulers",
    default=2,
    show_default=True,
    type=click.IntRange(1, 64),
    metavar="N",
    help="Scheduler processes that share the pool.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    metavar="N",
    help="Stop after so many requests of the trace.",
)
@click.option(
    "--requests",
    "num_requests",
    default=400,
    show_default=True,
    type=click.IntRange(1),
    metavar="N",
    help="Length of the workload that is generated when no TRACE is given.",
)
@seed_option
@click.option(
    "--model", metavar="NAME", help="Shape preset of the own server, for instance gemma-like."
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="The own server's YAML file, for instance with KV cache groups.",
)
@click.option(
    "--block-size",
    type=click.IntRange(1),
    metavar="TOKENS",
    help="Tokens a block of the own server.",
)
@click.option(
    "--capacity-tokens",
    metavar="TOKENS",
    help="Size of the own server's pool, as `kvdepot serve` takes it, say 128k "
    f"(default: {_CAPACITY_TOKENS // 1_000_000}M).",
)
@click.option(
    "--num-blocks",
    type=click.IntRange(2),
    metavar="N",
    help="The same in blocks, with the null block.",
)
@click.option("--layout", type=click.Choice(["block", "layer"]), help="Of the own server's pool.")
@click.option(
    "--token-budget",
    default=8192,
    show_default=True,
    type=click.IntRange(1),
    metavar="TOKENS",
    help="New tokens in one step of a scheduler.",
)
@click.option(
    "--max-running",
    default=64,
    show_default=True,
    type=click.IntRange(1),
    metavar="N",
    help="Requests that a scheduler runs at a time.",
)
@click.option(
    "--steps-in-flight",
    default=2,
    show_default=True,
    type=click.IntRange(1, 16),
    metavar="N",
    help="Steps scheduled before the first one's bytes are written; 1: none ahead.",
)
@click.option("--one-by-one", is_flag=True, help="Finish each request before the next one.")
@click.option(
    "--decode-stride",
    type=click.IntRange(1),
    metavar="TOKENS",
    help="Output tokens a step, within a block (default: 1; with --one-by-one the block).",
)
@click.option("--no-decode", is_flag=True, help="Compute prompts only.")
@click.option(
    "--unary-every",
    default=8,
    show_default=True,
    type=click.IntRange(0),
    metavar="N",
    help="Every so many requests one goes by unary calls; 0: none.",
)
@click.option("--no-bytes", is_flag=True, help="Keep books only: write, read and pull nothing.")
@click.option(
    "--verify-sample",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Share of the blocks that are read back.",
)
@click.option("--no-follow", is_flag=True, help="No event follower, no peer.")
@click.option(
    "--reopen",
    is_flag=True,
    help="When a session is lost or the server is away, wait for it, open another and go on.",
)
@click.option(
    "--lease-ttl-seconds",
    "lease_ttl_s",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="How long a session may be silent (default: the server's).",
)
@json_option
def replay(
    trace: str | None,
    target: str | None,
    model: str | None,
    config: str | None,
    block_size: int | None,
    capacity_tokens: str | None,
    num_blocks: int | None,
    layout: str | None,
    one_by_one: bool,
    max_running: int,
    decode_stride: int | None,
    no_decode: bool,
    no_bytes: bool,
    no_follow: bool,
    as_json: bool,
    **plain: Any,
) -> None:
    """Replay a trace as schedulers would, and check every byte.

    TRACE is a .jsonl or .jsonl.gz file in the Mooncake project's format; without it a
    workload of chats is generated. A server is started for it unless --server names one.
    Status 1 if a byte, the event mirror or an invariant is wrong.
    """
    if num_blocks is not None and capacity_tokens is not None:
        raise click.UsageError("--num-blocks and --capacity-tokens exclude each other")
    context = click.get_current_context()
    for name in ("model", "block_size", "capacity_tokens", "num_blocks", "layout"):
        if target is not None and _is_given(context, name):
            flag = "--" + name.replace("_", "-")
            raise click.UsageError(f"{flag} is for a server of the replay's own; omit --server")
    settings = _settings(
        trace=trace,
        max_running=1 if one_by_one else max_running,
        decode=not no_decode,
        decode_stride=decode_stride or (_WHOLE_BLOCK if one_by_one else 1),
        with_bytes=not no_bytes,
        pulls_at_end=one_by_one,
        follow=not no_follow,
        **plain,
    )
    if one_by_one and settings.schedulers > 1:
        raise click.UsageError("--one-by-one is for one scheduler: add --schedulers 1")
    size = ["--capacity-tokens", str(capacity_tokens or _CAPACITY_TOKENS)]
    if num_blocks is not None:
        size = ["--num-blocks", str(num_blocks)]
    server = [*size]
    server += ["--config", config] if config else []
    server += ["--model", model] if model else []
    server += ["--block-size", str(block_size)] if block_size else []
    server += ["--layout", layout] if layout else []
    server += ["--no-memory"] if no_bytes else []
    report = _run(settings, target, server)
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    _exit(report)


@click.group(invoke_without_command=True)
@click.option(
    "--requests",
    "num_requests",
    default=400,
    show_default=True,
    type=click.IntRange(1),
    metavar="N",
    help="Length of the workload.",
)
@seed_option
@click.option(
    "--model", default="tiny", show_default=True, metavar="NAME", help="Shape preset of the server."
)
@json_option
@click.pass_context
def demo(context: click.Context, num_requests: int, seed: int, model: str, as_json: bool) -> None:
    """Start a server, replay chats on it, tell what happened.

    Or another demonstration, if one is named.
    """
    if context.invoked_subcommand is not None:
        if given := [name for name in context.params if _is_given(context, name)]:
            flag = given[0].removeprefix("num_")
            raise click.UsageError(f"put --{flag} behind {context.invoked_subcommand}")
        return
    settings = _settings(num_requests=num_requests, seed=seed, max_running=32)
    # Small on purpose: the cache must evict, and at times a request must wait.
    report = _run(settings, None, ["--model", model, "--capacity-tokens", "60000"])
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
        _explain(report)
    _exit(report)


demo.add_command(pd)


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not _DEFAULT


def _settings(**options: Any) -> ReplaySettings:
    try:
        from kvclient.replay.settings import ReplaySettings
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"replaying needs {error.name}: pip install {error.name}, or 'kvdepot[server]'"
        ) from error
    return ReplaySettings(**options)


def _run(settings: ReplaySettings, target: str | None, server_options: list[str]) -> Report:
    from kvclient.replay.errors import ReplayError
    from kvclient.replay.runner import Runner
    from kvclient.replay.server import own_server
    from kvclient.replay.trace import TraceError

    try:
        requests = settings.load_trace()
        longest = max(request.input_length + request.output_length for request in requests)
        if target is None:
            server_options += ["--max-model-len", str(max(longest, 131_072))]
        with (
            stopped_by_sigterm(),
            own_server(server_options) if target is None else nullcontext(target) as address,
            progress(
                TextColumn("replaying"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("requests"),
                TimeElapsedColumn(),
            ) as bar,
        ):
            task = bar.add_task("", total=len(requests))
            runner = Runner(address, settings, lambda done: bar.update(task, completed=done))
            return runner.run(requests)
    except (ReplayError, TraceError) as error:
        raise click.ClickException(str(error)) from error


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM is an exception meanwhile, so that everything started is stopped."""

    def on_terminate(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _print(report: Report) -> None:
    from kvclient.cli.report import latency_table, report_table

    console = Console()
    console.print(report_table(report))
    console.print(latency_table(report))


def _explain(report: Report) -> None:
    from kvclient.cli.report import explanation

    Console().print(explanation(report))


def _exit(report: Report) -> None:
    for failure in report.failures:
        click.echo(f"WRONG: {failure}", err=True)
    if not report.ok:
        raise SystemExit(1)
