"""``mpistrat rechunk``: a file of data written anew, with chunks that suit shuffled reading."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from mpistrat import hdf5
from mpistrat.cli.command import Command
from mpistrat.cli.output import print_error, print_line
from mpistrat.data.compression import COMPRESSIONS, compression
from mpistrat.data.rechunk import Report, rechunk
from mpistrat.data.rechunk_plan import DEFAULT_CHUNK_BYTES
from mpistrat.errors import DataError
from mpistrat.spelling import parse_size, readable_size, readable_time

__all__ = ["COMMAND"]

_MAX_CHUNK_BYTES = 2**31
"""HDF5 holds chunks below 4 GiB; far smaller ones read faster."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN", help="an HDF5 file")
    parser.add_argument("target", metavar="OUT", help="the file to write")
    parser.add_argument(
        "--chunk-bytes",
        type=_chunk_bytes,
        default=DEFAULT_CHUNK_BYTES,
        metavar="SIZE",
        help="size of a chunk of the widest field, such as 1MiB (default: 256KiB)",
    )
    parser.add_argument(
        "--compression",
        choices=COMPRESSIONS,
        default="keep",
        help="how chunks are compressed (default: as they are)",
    )
    parser.add_argument("--level", type=int, help="of the compression; higher is smaller, slower")
    parser.add_argument(
        "--no-shuffle",
        action="store_true",
        help="do not group the bytes of numbers before they are compressed",
    )
    parser.add_argument("--threads", type=_positive, help="(default: one for each core)")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT where it exists")


def _chunk_bytes(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 1 <= size <= _MAX_CHUNK_BYTES:
        raise argparse.ArgumentTypeError(
            f"a chunk has 1 B to {readable_size(_MAX_CHUNK_BYTES)}, not {text}"
        )
    return size


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {number}")
    return number


def _run(arguments: argparse.Namespace) -> int:
    source, target = arguments.source, arguments.target
    try:
        chosen = compression(arguments.compression, arguments.level, not arguments.no_shuffle)
    except ValueError as error:
        print_error("rechunk", error)
        return 2
    if os.path.exists(target) and not arguments.overwrite:
        print_error("rechunk", f"{target} exists. Choose another name, or add --overwrite.")
        return 2
    if not os.path.isfile(source):
        print_error("rechunk", f"There is no file {source}.")
        return 2
    old_bytes, begun_s = os.path.getsize(source), perf_counter()
    try:
        with _progress() as report:
            done = rechunk(source, target, arguments.chunk_bytes, chosen, arguments.threads, report)
    except DataError as error:
        print_error("rechunk", error)
        return 1
    except (OSError, RuntimeError) as error:
        reason = hdf5.words_of(error)
        print_error("rechunk", f"{source} cannot be written anew: {reason}. {target} is as it was.")
        return 1
    except KeyboardInterrupt:
        print_error("rechunk", f"interrupted; {target} is as it was.")
        return 130
    print_line(
        f"{target}: {done.num_datasets} data set(s) of {readable_size(done.num_bytes)} with new "
        f"chunks, written and read back in {readable_time(perf_counter() - begun_s)}; the file has "
        f"{readable_size(done.stored_bytes)}, {source} {readable_size(old_bytes)}"
    )
    return 0


@contextmanager
def _progress() -> Iterator[Report]:
    """Yield a function that shows how far the work is, where a person looks on."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as progress:
        tasks = {}

        def report(step: str, num_bytes: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = progress.add_task(step, total=total)
            progress.update(tasks[step], advance=num_bytes)

        yield report


COMMAND = Command(
    "rechunk",
    "Write an HDF5 file anew, with chunks that suit shuffled reading.",
    _add_arguments,
    _run,
)
