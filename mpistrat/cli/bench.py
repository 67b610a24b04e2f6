"""``mpistrat bench``: measure this machine, with the peers in the same run."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path

from mpistrat.cli.command import Command
from mpistrat.cli.output import print_json, print_line, print_table

__all__ = ["COMMAND"]

_NAMES = ("agreement", "allreduce", "optimizers")
_SIZES = (8, 2**10, 2**16, 2**20, 2**22, 2**24, 2**26)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=_NAMES, default="allreduce")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=_SIZES, metavar="BYTES", help="array sizes"
    )
    parser.add_argument("--samples", type=int, default=15, help="samples for each median")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")


def _run(arguments: argparse.Namespace) -> int:
    # MPI starts here, not when the command line is read.
    from mpistrat.bench import BENCHMARKS
    from mpistrat.bench.benchmark import Choices
    from mpistrat.world import library_version, open_world

    benchmark = BENCHMARKS[arguments.what]
    rows = benchmark.measure(Choices(arguments.samples, tuple(arguments.sizes)))
    world = open_world(None)
    if world.rank != 0:
        return 0
    report = {
        "benchmark": arguments.what,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "mpi_library": library_version(),
        "num_ranks": world.size,
        "num_nodes": len(world.hosts),
        "samples": arguments.samples,
        "results": rows,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.json:
        print_json(report)
        return 0
    print_line(f"{report['mpi_library']}; {world.size} ranks on {report['machine']}; medians")
    print_table(
        [column.title for column in benchmark.columns],
        [[column.spell(row) for column in benchmark.columns] for row in rows],
    )
    return 0


COMMAND = Command(
    "bench",
    "Time collectives and optimizers beside peers, under mpiexec.",
    _add_arguments,
    _run,
)
