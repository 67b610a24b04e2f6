"""``mpistrat diff``: where two checkpoint files differ."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator

from mpistrat.checkpoint.reader import CheckpointReader, open_checkpoint
from mpistrat.checkpoint.shapes import describe
from mpistrat.cli.command import Command
from mpistrat.cli.output import print_error, print_json, print_line, print_table
from mpistrat.cli.statistics import tell_apart
from mpistrat.errors import CheckpointError

__all__ = ["DIFF"]


def _add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", help="a checkpoint file")
    parser.add_argument("b", help="another one")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def _diff(arguments: argparse.Namespace) -> int:
    try:
        with open_checkpoint(arguments.a) as a, open_checkpoint(arguments.b) as b:
            rows = [*_variables(a, b), *_state(a, b)]
            num_paths = len({*a.variables, *b.variables}) + len({*a.state_paths, *b.state_paths})
    except CheckpointError as error:
        print_error("diff", error)
        return 1 if os.path.isfile(arguments.a) and os.path.isfile(arguments.b) else 2
    if arguments.json:
        print_json({"equal": not rows, "num_paths": num_paths, "differences": dict(rows)})
        return 1 if rows else 0
    if not rows:
        print_line(f"{arguments.a} and {arguments.b} are equal: {num_paths} path(s)")
        return 0
    print_table(("path", "difference"), rows)
    print_line(f"{len(rows)} path(s) differ between a = {arguments.a} and b = {arguments.b}")
    return 1


def _variables(a: CheckpointReader, b: CheckpointReader) -> Iterator[tuple[str, str]]:
    for name in sorted({*a.variables, *b.variables}):
        if name not in a.variables or name not in b.variables:
            yield name, _only_in(name in a.variables)
            continue
        differences = [*_modes(a, b, name), *_values(a, b, name)]
        if differences:
            yield name, "; ".join(differences)


def _modes(a: CheckpointReader, b: CheckpointReader, name: str) -> Iterator[str]:
    for key in ("synchronization", "aggregation", "trainable"):
        of_a, of_b = getattr(a.variables[name], key), getattr(b.variables[name], key)
        if of_a != of_b:
            yield f"{key} {of_a} in a, {of_b} in b"


def _values(a: CheckpointReader, b: CheckpointReader, name: str) -> Iterator[str]:
    of_a, of_b = a.variables[name], b.variables[name]
    if (of_a.shape, of_a.dtype) != (of_b.shape, of_b.dtype):
        yield f"{describe(of_a.shape, of_a.dtype)} in a, {describe(of_b.shape, of_b.dtype)} in b"
        return
    # Read even where the digests are equal: a damaged file equals nothing.
    found = tell_apart(a.read_pieces(name), b.read_pieces(name))
    if found.count:
        counts = f"{found.count} of {math.prod(of_a.shape)} element(s)"
        yield f"largest difference {found.largest:.6g}, in {counts}"
    elif found.num_other_bits:
        yield "equal numbers in other bits (signs of zeros, or kinds of NaN)"


def _state(a: CheckpointReader, b: CheckpointReader) -> Iterator[tuple[str, str]]:
    for name in sorted({*a.state_paths, *b.state_paths}):
        if name not in a.state_paths or name not in b.state_paths:
            yield name, _only_in(name in a.state_paths)
            continue
        of_a, of_b = a.read_state(name), b.read_state(name)
        if of_a != of_b:
            yield name, f"state {json.dumps(of_a)} in a, {json.dumps(of_b)} in b"


def _only_in(in_a: bool) -> str:
    return f"only in {'a' if in_a else 'b'}"


DIFF = Command("diff", "Show where two checkpoint files differ.", _add_diff_arguments, _diff)
