"""``python -m benchmarks``: measures, prints a table of ratios, and with --json writes it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks import bytes as moved
from benchmarks import core, crowd, facade, remote, rpc, scheduler
from benchmarks.pairs import Row, Settings, table

PARTS: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "core": core.rows,
    "rpc": rpc.rows,
    "remote": remote.rows,
    "crowd": crowd.rows,
    "bytes": moved.rows,
    "facade": facade.rows,
    "scheduler": scheduler.rows,
}
QUICK = Settings(num_pairs=2, scale=0.05)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows here, too")
    parser.add_argument("--only", choices=PARTS, help="measure this part alone")
    parser.add_argument("--quick", action="store_true", help="see that it runs; no figures")
    parser.add_argument("--pairs", type=int, metavar="N", help="measure so many pairs, not 11")
    arguments = parser.parse_args()
    settings = QUICK if arguments.quick else Settings(num_pairs=arguments.pairs or 11)
    measured = []
    for part in [arguments.only] if arguments.only else PARTS:
        for row in PARTS[part](settings):
            print(f"{row.ratio:6.2f}  {row.name}", file=sys.stderr, flush=True)
            measured.append(row)
    print(f"Median of {settings.num_pairs} interleaved pairs; {os.cpu_count()} cores.\n")
    print(table(measured))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(row) for row in measured], indent=1) + "\n")


if __name__ == "__main__":
    main()
