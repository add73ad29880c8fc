"""A replay's report, for people."""

from __future__ import annotations

from rich.table import Table

from kvclient.replay.report import Report


def report_table(report: Report) -> Table:
    """The figures."""
    tally, peer, settings = report.tally, report.peer, report.settings
    table = Table(title="kvdepot replay", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    rows = [
        ("trace", settings.trace or "generated"),
        ("schedulers", f"{settings.schedulers}"),
        ("requests", f"{tally.requests:,} in {report.seconds:,.1f} s"),
        ("tokens hit", _share(tally.hit_tokens, tally.query_tokens)),
        ("trace blocks hit", _share(tally.hit_trace_blocks, tally.trace_blocks, digits=2)),
        ("operations", f"{tally.operations:,}, {tally.operations / report.seconds:,.0f} a second"),
        ("scheduler steps", f"{tally.steps:,}"),
        ("preemptions", f"{tally.preemptions:,}"),
        ("refusals to allocate", f"{tally.refusals:,}"),
        ("hits changed before allocation", f"{tally.hits_changed:,}"),
        *(
            [
                ("sessions opened anew", f"{tally.reopened:,}"),
                ("requests admitted again", f"{tally.readmitted:,}"),
            ]
            if tally.reopened
            else []
        ),
        ("evictions", f"{report.stats.evictions:,} of {report.stats.num_blocks - 1:,} blocks"),
        ("tokens written", f"{tally.tokens_written:,}"),
        ("hit blocks verified", f"{tally.blocks_verified:,}"),
        *(
            [("window blocks verified", f"{tally.blocks_in_windows:,}")]
            if tally.blocks_in_windows
            else []
        ),
        ("computed blocks read again", f"{tally.blocks_reread:,}"),
        ("blocks pulled and verified", f"{peer.blocks_pulled:,} ({peer.bytes_pulled:,} bytes)"),
        ("events", f"{peer.events:,}"),
        ("event mirror", _mirror(report)),
        ("audit", f"{len(report.violations)} violations"),
        ("outcome", "[green]all right" if report.ok else f"[red]{len(report.failures)} WRONG"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def latency_table(report: Report) -> Table:
    """What the calls took."""
    table = Table(title="latency as the schedulers saw it, ms")
    table.add_column("RPC", style="bold")
    for name in ("calls", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    for rpc, latency in report.latencies().items():
        numbers = (latency.p50_ms, latency.p90_ms, latency.p99_ms, latency.max_ms)
        table.add_row(rpc, f"{latency.calls:,}", *[f"{number:.2f}" for number in numbers])
    return table


def explanation(report: Report) -> str:
    """What one just saw."""
    tally, peer = report.tally, report.peer
    hit = tally.hit_tokens / tally.query_tokens if tally.query_tokens else 0.0
    lines = [
        f"{report.settings.schedulers} scheduler processes shared one KV-cache pool over gRPC and "
        f"served {tally.requests:,} chat turns.",
        f"{hit:.0%} of the prompt tokens were in the cache already, whichever scheduler had "
        "computed them.",
        f"Every computed token wrote real bytes; {tally.blocks_verified:,} hit blocks were read "
        f"back, and {peer.blocks_pulled:,} more pulled by a peer process, "
        + ("each with the bytes of its own prefix." if report.ok else "not all of them right."),
        *(
            [
                "The pool was too small on purpose: "
                f"{report.stats.evictions:,} blocks were evicted and "
                f"{tally.preemptions:,} requests preempted and admitted again."
            ]
            if report.stats.evictions
            else []
        ),
        f"A follower rebuilt the index from {peer.events:,} events"
        + (f", begun anew {peer.begun_anew} times: it lagged" if peer.begun_anew else "")
        + "; it "
        + ("equals the server's." if report.mirror_equal else "DIFFERS from the server's."),
    ]
    return "\n".join(lines)


def _share(part: int, whole: int, digits: int = 1) -> str:
    return f"{part / whole:.{digits}%} ({part:,} of {whole:,})" if whole else "none"


def _mirror(report: Report) -> str:
    if report.mirror_equal is None:
        return "not followed"
    blocks = f"{report.peer.blocks_mirrored:,} blocks"
    return f"equal, {blocks}" if report.mirror_equal else f"[red]differs, {blocks}"
