"""``mpistrat bench``: measure this machine, with the peer in the same run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from pathlib import Path

from mpistrat.cli.command import Command
from mpistrat.cli.output import print_json, print_line, print_table, readable_size

__all__ = ["COMMAND"]

_SIZES = (8, 2**10, 2**16, 2**20, 2**22, 2**24, 2**26)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=["allreduce"], default="allreduce")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=_SIZES, metavar="BYTES", help="array sizes"
    )
    parser.add_argument("--samples", type=int, default=15, help="samples for each median")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")


def _run(arguments: argparse.Namespace) -> int:
    # MPI starts here, not when the command line is read.
    from mpistrat.bench.allreduce import measure_allreduce
    from mpistrat.world import library_version, open_world

    results = measure_allreduce(
        [max(4, size // 4 * 4) for size in arguments.sizes], arguments.samples
    )
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
        "results": [dataclasses.asdict(each) | {"ratio": each.ratio} for each in results],
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.json:
        print_json(report)
        return 0
    print_line(f"{report['mpi_library']}; {world.size} ranks on {report['machine']}; medians")
    print_table(
        ["array", "raw Allreduce", "all_reduce", "times faster", "one copy"],
        [
            [
                readable_size(each.num_bytes),
                f"{each.raw_s * 1e6:.1f} us",
                f"{each.ours_s * 1e6:.1f} us",
                f"{each.ratio:.2f}",
                f"{each.copy_s * 1e6:.1f} us",
            ]
            for each in results
        ],
    )
    return 0


COMMAND = Command(
    "bench", "Time all-reductions beside raw MPI; start it with mpiexec.", _add_arguments, _run
)
