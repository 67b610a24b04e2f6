"""Command ``mpistrat bench``: time the package, mpi4py and h5py in one run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpistrat.cli.output import (
    Command,
    check_can_draw,
    check_can_write,
    print_error,
    print_heading,
    print_json,
    print_line,
    print_table,
)
from mpistrat.errors import LaunchError
from mpistrat.system.text import counted

if TYPE_CHECKING:
    from mpistrat.bench.benchmark import Benchmark, Choices

_NAMES = ("agreement", "allreduce", "checkpoint", "data", "gradients", "output")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        metavar="WHAT",
        choices=_NAMES,
        default="allreduce",
        help=f"one of {', '.join(_NAMES)} (default: %(default)s)",
    )
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `run_benchmark`."""
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        metavar="BYTES",
        help="sizes of the float32 arrays, for benchmarks that measure several sizes",
    )
    parser.add_argument(
        "--examples",
        type=int,
        metavar="N",
        help="number of examples in the files of the data benchmark",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=15,
        metavar="N",
        help="samples for each median (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="DEVICE",
        help='where the arrays are, such as "gpu" (default: %(default)s)',
    )
    parser.add_argument("--all", action="store_true", help="show all columns of the tables")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON to FILE")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw the results into PNG")


def _run(arguments: argparse.Namespace) -> int:
    # Imported late, so that other commands do not start MPI.
    from mpistrat.bench import BENCHMARKS

    return run_benchmark(BENCHMARKS[arguments.what], arguments)


def run_benchmark(benchmark: Benchmark, arguments: argparse.Namespace) -> int:
    """Measure, print and write the report, and return the exit code. **Collective**."""
    from mpistrat import context
    from mpistrat.bench.measure import describe_machine
    from mpistrat.mpi.world import open_world
    from mpistrat.strategies import MPIStrategy

    collectives = context.collectives_of(MPIStrategy(device="cpu"))
    try:
        with collectives.all_or_none("bench"):
            choices = _choices(benchmark, arguments)
            if collectives.rank == 0:
                _check_files(arguments)
    except (ValueError, OSError) as error:
        if collectives.rank == 0:
            print_error("bench", error)
        return 2
    try:
        findings = benchmark.measure(choices)
    except LaunchError as error:
        if collectives.rank == 0:
            print_error("bench", error)
        return 2
    if collectives.rank != 0:
        return 0
    report: dict[str, Any] = {"benchmark": benchmark.name, **describe_machine(open_world(None))}
    if findings.num_ranks is not None:
        report["num_ranks"] = findings.num_ranks
    report["device"] = choices.device
    report |= {"samples": choices.num_samples, "notes": findings.notes, **findings.tables}
    if arguments.json:
        print_json(report)
    else:
        _print(benchmark, report, show_all=arguments.all)
    try:
        _write_files(benchmark, report, arguments)
    except OSError as error:
        print_error("bench", f"{error.filename} cannot be written: {error.strerror}.")
        return 2
    except ValueError as error:  # a picture cannot be written
        print_error("bench", error)
        return 2
    return 0


def _choices(benchmark: Benchmark, arguments: argparse.Namespace) -> Choices:
    from mpistrat.arrays import Device
    from mpistrat.bench.benchmark import Choices

    if arguments.samples < 1:
        raise ValueError(f"--samples must be at least 1, not {arguments.samples}.")
    sizes = tuple(arguments.sizes or ())
    if sizes and not benchmark.sizes:
        raise ValueError(f"{benchmark.name} does not measure different sizes: leave out --sizes.")
    for size in sizes:
        if size < 4 or size % 4:
            raise ValueError(f"--sizes are bytes of float32 arrays, multiples of 4, not {size}.")
    num_examples = arguments.examples
    if num_examples is not None and not benchmark.num_examples:
        raise ValueError(f"{benchmark.name} reads no examples: leave out --examples.")
    if num_examples is not None and num_examples < 1:
        raise ValueError(f"--examples must be at least 1, not {num_examples}.")
    Device.parse(arguments.device)
    if arguments.device != "cpu" and not benchmark.runs_on_devices:
        raise ValueError(f"{benchmark.name} runs on the host: leave out --device.")
    num_ranks = getattr(arguments, "ranks", None)  # only some programs have this option
    if getattr(arguments, "best", False) and not benchmark.starts_ranks:
        raise ValueError(f"--best is for allreduce, not for {benchmark.name}.")
    if num_ranks is not None and not benchmark.starts_ranks:
        raise ValueError("--ranks is for --best. Start other benchmarks under mpiexec or srun.")
    if num_ranks is not None and num_ranks < 2:
        raise ValueError(f"--ranks must be at least 2, not {num_ranks}.")
    return Choices(
        arguments.samples,
        sizes or benchmark.sizes,
        num_examples or benchmark.num_examples,
        num_ranks or 2,
        arguments.device,
    )


def _check_files(arguments: argparse.Namespace) -> None:
    """Raise ValueError if an output file cannot be written, before anything is measured."""
    if arguments.plot:
        check_can_draw()
    for path in filter(None, (arguments.output, arguments.plot)):
        check_can_write(path)


def _print(benchmark: Benchmark, report: dict[str, Any], show_all: bool) -> None:
    print_line(f"{_heading(report)}; medians")
    for table in benchmark.tables:
        rows = report.get(table.key)
        if not rows:
            continue
        if table.title:
            print_heading(f"{table.title}:")
        columns = table.all_columns if show_all else table.columns
        titles = [column.title for column in columns]
        print_table(titles, [[column.format(row) for column in columns] for row in rows])
    for note in report["notes"]:
        print_line(note)


def _heading(report: dict[str, Any]) -> str:
    machine = report["machine"]
    return (
        f"{report['mpi_library']}; {counted(report['num_ranks'], 'rank')} on "
        f"{counted(report['num_nodes'], 'node')} of {counted(machine['cores'], 'core')} "
        f"({machine['cpu']}), arrays on {report['device']}"
    )


def _write_files(
    benchmark: Benchmark, report: dict[str, Any], arguments: argparse.Namespace
) -> None:
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.plot:
        spread = f"medians of {report['samples']} samples; bands and thin lines are quartiles"
        benchmark.draw(report, f"{_heading(report)}\n{spread}", arguments.plot)


COMMAND = Command(
    "bench",
    "Time collectives, reading and checkpoints, compared with mpi4py and h5py.",
    _add_arguments,
    _run,
    "measure",
    """\
Measure this package on your machine, compared with plain mpi4py or h5py. Start it under mpiexec or
srun. The figures are medians; a speed-up above 1 means that mpistrat is faster.

  mpistrat run -n 2 -m mpistrat bench allreduce --sizes 8 1048576
  mpistrat run -n 2 -m mpistrat bench allreduce --device gpu
""",
)
