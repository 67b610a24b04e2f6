"""Command ``mpistrat diff``: differences between two checkpoints."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from mpistrat.checkpoint.deferred import describe
from mpistrat.checkpoint.format import REPLICAS
from mpistrat.checkpoint.reader import CheckpointReader, open_checkpoint
from mpistrat.checkpoint.state_json import plain_state
from mpistrat.cli.data_checks import differences_of_data
from mpistrat.cli.data_files import is_data_file
from mpistrat.cli.output import (
    Command,
    on_one_line,
    print_error,
    print_json,
    print_line,
    print_table,
)
from mpistrat.cli.statistics import numbers_of, tell_apart
from mpistrat.errors import CheckpointError, DataError
from mpistrat.system.text import counted

_SHORT = 200
"""JSON of up to this many characters is shown in full."""
_SHORT_ROWS = 60
"""JSON of rows with equal keys is shown in full up to this many characters."""
_MAX_KEYS = 4
"""Most keys of such rows that are shown."""
_FEW = 3
"""Up to this many items of a long dict or list are all shown. Otherwise only the first and last."""

_NOUNS = {dict: "dicts", list: "lists", str: "strings", bool: "booleans"} | dict.fromkeys(
    (int, float), "numbers"
)


def in_short(value: Any) -> str:
    """Return a JSON value as text. Long lists, dicts and strings show size, first and last.

    A list of dicts with the same keys, such as a history, shows the number of rows and the keys.
    """
    whole = json.dumps(value)
    if len(whole) <= _SHORT_ROWS:
        return whole
    rows = value["rows"] if isinstance(value, dict) and list(value) == ["rows"] else value
    if isinstance(rows, list) and (keys := _columns(rows)):
        return f"{counted(len(rows), 'row')}: {', '.join(keys)}"
    if len(whole) <= _SHORT:
        return whole
    if isinstance(value, list):
        return _ends("list", value, [in_short(each) for each in _first_and_last(value)])
    if isinstance(value, dict):
        items = list(value.items())
        if len(items) <= _FEW:
            return "{" + ", ".join(map(_pair, items)) + "}"
        return _ends("dict", list(value.values()), list(map(_pair, _first_and_last(items))))
    if isinstance(value, str):
        half = _SHORT // 4
        ends = json.dumps(f"{value[:half]}...{value[-half:]}")
        return f"string of {len(value)} characters: {ends}"
    return whole


def _columns(rows: list[Any]) -> list[str]:
    """Return the keys that all rows have, at most `_MAX_KEYS`, or an empty list."""
    keys = list(rows[0]) if rows and isinstance(rows[0], dict) else []
    if not all(isinstance(row, dict) and list(row) == keys for row in rows):
        return []
    return [*keys[:_MAX_KEYS], "..."] if len(keys) > _MAX_KEYS else keys


def _first_and_last(items: list[Any]) -> list[Any]:
    return items if len(items) <= _FEW else [items[0], items[-1]]


def _pair(item: tuple[str, Any]) -> str:
    return f"{json.dumps(item[0])}: {in_short(item[1])}"


def _ends(kind: str, values: list[Any], shown: list[str]) -> str:
    nouns = {_NOUNS.get(type(value), "nulls") for value in values}
    noun = nouns.pop() if len(nouns) == 1 else "items"
    between = ", ..., " if len(values) > len(shown) else ", "
    return f"{kind} of {len(values)} {noun}: {between.join(shown)}"


_MISSING = object()


def differing_paths(path: str, a: Any, b: Any) -> Iterator[tuple[str, str]]:
    """Yield each path at which two JSON values differ, such as ``rows[3]/loss``."""
    if a is _MISSING or b is _MISSING:
        yield path, f"only in {'b' if a is _MISSING else 'a'}"
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys(chain(a, b)):
            yield from differing_paths(f"{path}/{key}", a.get(key, _MISSING), b.get(key, _MISSING))
    elif isinstance(a, list) and isinstance(b, list):
        for number, (of_a, of_b) in enumerate(zip_longest(a, b, fillvalue=_MISSING)):
            yield from differing_paths(f"{path}[{number}]", of_a, of_b)
    elif a != b and (a == a or b == b):  # NaN equals NaN here
        yield path, f"{in_short(a)} in a, {in_short(b)} in b"


def _add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="a checkpoint or an HDF5 file")
    parser.add_argument("b", metavar="B", help="the file to compare with it")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _diff(arguments: argparse.Namespace) -> int:
    if is_data_file(arguments.a) and is_data_file(arguments.b):
        return _diff_data(arguments)
    try:
        with open_checkpoint(arguments.a) as a, open_checkpoint(arguments.b) as b:
            rows = [*_variables(a, b), *_components(a, b), *_state(a, b, in_full=arguments.json)]
            names = [*{*a.variables, *b.variables}, *{*a.state_paths, *b.state_paths}]
            names += {f"{REPLICAS}/{name}" for name in (*a.replicas, *b.replicas)}
    except CheckpointError as error:
        print_error("diff", error)
        return 2
    if arguments.json:
        print_json({"equal": not rows, "num_paths": len(names), "differences": dict(rows)})
        return 1 if rows else 0
    if not rows:
        both = on_one_line(f"{arguments.a} and {arguments.b} are ")
        print_line(both, "equal", f": {counted(len(names), 'path')}")
        return 0
    print_table(("path", "difference"), rows)
    num_differing = len({path for path, _ in rows}.intersection(names))
    differ = f"{counted(num_differing, 'path')} {'differs' if num_differing == 1 else 'differ'}"
    ending = f"{differ} between a = {arguments.a} and b = {arguments.b}"
    print_line(on_one_line(ending))
    return 1


def _diff_data(arguments: argparse.Namespace) -> int:
    """Compare the datasets of two HDF5 files, and return the exit code."""
    try:
        number, rows = differences_of_data(arguments.a, arguments.b)
    except (DataError, OSError, RuntimeError, KeyError) as error:
        print_error("diff", error)
        return 2
    if arguments.json:
        print_json({"equal": not rows, "num_paths": number, "differences": dict(rows)})
    elif rows:
        print_table(("dataset", "difference"), rows)
        differ = f"{counted(len(rows), 'dataset')} {'differs' if len(rows) == 1 else 'differ'}"
        print_line(on_one_line(f"{differ} between a = {arguments.a} and b = {arguments.b}"))
    else:
        both = on_one_line(f"{arguments.a} and {arguments.b} are ")
        print_line(both, "equal", f": {counted(number, 'dataset')}")
    return 1 if rows else 0


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
        # A variable that is mirrored in one program may be plain in the other, which is AUTO.
        if of_a != of_b and {of_a, of_b} != {"AUTO", "ON_WRITE"}:
            yield f"{key} {of_a} in a, {of_b} in b"


def _values(a: CheckpointReader, b: CheckpointReader, name: str) -> Iterator[str]:
    of_a, of_b = a.variables[name], b.variables[name]
    in_a, in_b = (describe(each.shape, each.dtype_name) for each in (of_a, of_b))
    if in_a != in_b:
        yield f"{in_a} in a, {in_b} in b"
        return
    # Read the values even if the digests are equal, because reading detects damage.
    yield from _differences(numbers_of(a, name), numbers_of(b, name), math.prod(of_a.shape))


def _differences(
    of_a: Iterator[np.ndarray], of_b: Iterator[np.ndarray], num_elements: int
) -> Iterator[str]:
    found = tell_apart(of_a, of_b)
    if found.count:
        counts = f"{found.count} of {counted(num_elements, 'element')}"
        yield f"largest difference {found.largest:.6g}, in {counts}"
    elif found.num_other_bits:
        yield "equal numbers with different bits (signs of zeros, or kinds of NaN)"


def _components(a: CheckpointReader, b: CheckpointReader) -> Iterator[tuple[str, str]]:
    """Yield each SyncOnRead variable whose components differ between the files."""
    for name in sorted({*a.replicas, *b.replicas}):
        path = f"{REPLICAS}/{name}"
        if name not in a.replicas or name not in b.replicas:
            yield path, _only_in(name in a.replicas)
            continue
        in_a, in_b = (describe(*each.replicas[name]) for each in (a, b))
        if in_a != in_b:
            yield path, f"{in_a} in a, {in_b} in b"
            continue
        of_a, of_b = (each.read_replicas(name).reshape(-1) for each in (a, b))
        for difference in _differences(iter([of_a]), iter([of_b]), of_a.size):
            yield path, difference


_MAX_PATHS = 20
"""Most differing paths that are shown for one state."""


def _state(a: CheckpointReader, b: CheckpointReader, in_full: bool) -> Iterator[tuple[str, str]]:
    """Yield each state that differs, followed by the paths in it that differ."""
    for name in sorted({*a.state_paths, *b.state_paths}):
        if name not in a.state_paths or name not in b.state_paths:
            yield name, _only_in(name in a.state_paths)
            continue
        of_a, of_b = (plain_state(each.read_state(name)) for each in (a, b))
        inside = list(differing_paths(name, of_a, of_b))
        if inside:
            as_text = json.dumps if in_full else in_short
            yield name, f"state {as_text(of_a)} in a, {as_text(of_b)} in b"
        shown = inside if in_full else inside[:_MAX_PATHS]
        yield from ((path, what) for path, what in shown if path != name)
        if len(inside) > len(shown):
            yield f"{name}/...", f"{len(inside) - len(shown)} more, which --json shows"


def _only_in(in_a: bool) -> str:
    return f"only in {'a' if in_a else 'b'}"


DIFF = Command(
    "diff",
    "Show the differences between two checkpoints, or two HDF5 files.",
    _add_diff_arguments,
    _diff,
    "inspect files",
    """\
Find out which variables and which other state differ between two checkpoints, and by how much.
Compare two epochs, two runs that should be equal, or one run on two clusters. The exit code is 0
if they are equal, 1 if they differ.

  mpistrat diff runs/a/checkpoint-30.h5 runs/b/checkpoint-30.h5
""",
)
