"""Command line of the benchmarks: ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import BENCHMARKS, BEST
from mpistrat.cli.bench import add_options, run_benchmark


def main(given: Sequence[str] | None = None) -> int:
    """Run the benchmark that the arguments name, and return the exit code. **Collective**."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the package, compared with its peers. Start it under mpirun or srun.",
    )
    parser.add_argument(
        "what",
        nargs="?",
        metavar="WHAT",
        choices=BENCHMARKS,
        default="allreduce",
        help=f"one of {', '.join(BENCHMARKS)} (default: %(default)s)",
    )
    add_options(parser)
    parser.add_argument(
        "--best",
        action="store_true",
        help="compare all_reduce with the best settings of the MPI library; this starts its ranks "
        "itself, so run it without mpirun",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="number of ranks that --best starts (default: 2)"
    )
    arguments = parser.parse_args(given)
    benchmark = BENCHMARKS[arguments.what]
    if arguments.best:
        benchmark = BEST.get(arguments.what, benchmark)
    return run_benchmark(benchmark, arguments)


if __name__ == "__main__":
    sys.exit(main())
