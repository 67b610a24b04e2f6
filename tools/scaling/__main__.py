"""Command line of the scaling benchmark: ``make scaling``, or ``python -m tools.scaling``."""

import argparse
import sys

from mpistrat.cli.bench import add_options, run_benchmark
from tools.scaling.benchmark import BENCHMARK

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.scaling", description=BENCHMARK.summary)
    add_options(parser)
    sys.exit(run_benchmark(BENCHMARK, parser.parse_args()))
