"""Command line: ``python -m benchmarks.machine``. It starts its jobs itself, so without mpiexec."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.machine import STAGES
from benchmarks.machine.job import can_trace, count_job
from mpistrat.bench.measure import describe_machine
from mpistrat.cli.output import print_line, print_table
from mpistrat.mpi.world import open_world
from mpistrat.system.text import readable_size

_GIB = 2**30
_COLUMNS = {
    "opens": "files opened",
    "looks": "files looked for",
    "descriptors": "descriptors",
    "sockets": "sockets",
    "threads": "threads",
    "anonymous": "own memory",
    "resident": "resident",
    "shared_of_job": "shared, job",
    "page_tables": "page tables",
}
_SIZES = ("anonymous", "resident", "shared_of_job", "page_tables")


def main() -> int:
    """Count, print a table for each number of ranks, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.machine",
        description="Count what the ranks of a job take from this machine.",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 32, 128], metavar="N")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=[*STAGES], metavar="STAGE")
    parser.add_argument(
        "--memory",
        type=float,
        default=5.0,
        metavar="GiB",
        help="leave out jobs that would need more, by what one rank needs (default: %(default)s)",
    )
    parser.add_argument("--limit", type=float, default=600.0, metavar="S", help="limit of one job")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write JSON to FILE")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"benchmark": "machine", **describe_machine(open_world(None))}
    notes = [] if can_trace() else ["strace cannot run here: files and connections are missing."]
    rows = []
    for stage in arguments.stages:
        per_rank = 0.0
        for num_ranks in sorted(arguments.ranks):
            if num_ranks * per_rank > arguments.memory * _GIB:
                notes.append(f"{stage} of {num_ranks} ranks is left out: too little memory.")
                continue
            row = count_job(stage, num_ranks, arguments.limit)
            per_rank = row["memory_of_job"] / num_ranks
            rows.append(row)
            print_table(
                ["per rank", "ranks", *_COLUMNS.values()],
                [[stage, str(num_ranks), *(_cell(row, key) for key in _COLUMNS)]],
            )
    report |= {"num_ranks": sorted(arguments.ranks), "notes": notes, "results": rows}
    for note in notes:
        print_line(note)
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _cell(row: dict[str, Any], key: str) -> str:
    if key not in row:
        return "-"
    return readable_size(row[key]) if key in _SIZES else f"{row[key]:g}"


if __name__ == "__main__":
    sys.exit(main())
