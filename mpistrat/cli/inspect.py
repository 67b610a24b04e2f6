"""``mpistrat inspect``: what a checkpoint file holds."""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.checkpoint.reader import CheckpointReader, open_checkpoint
from mpistrat.cli import histograms
from mpistrat.cli.command import Command
from mpistrat.cli.inspect_data import holds_data, inspect_data
from mpistrat.cli.output import is_terminal, print_error, print_json, print_line, print_table
from mpistrat.cli.statistics import summarize
from mpistrat.cli.tree import tree_labels
from mpistrat.errors import CheckpointError
from mpistrat.spelling import readable_size

__all__ = ["INSPECT"]

_COLUMNS = ("variable", "shape", "dtype", "synchronization", "aggregation", "trainable", "size")
_STATISTICS = ("min", "max", "mean", "nan_count")


def _add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="a checkpoint, or a file of data")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument(
        "--stats", action="store_true", help="read the values: smallest, largest, mean, NaN count"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="PNG", help="also draw a histogram of each variable into it"
    )


def _inspect(arguments: argparse.Namespace) -> int:
    if holds_data(arguments.file):
        return inspect_data(arguments)
    note = ""
    try:
        if arguments.plot:
            histograms.check_can_draw(arguments.plot)
        with open_checkpoint(arguments.file) as reader:
            content = _content(reader, arguments.stats)
            if arguments.plot:
                note = histograms.draw(reader, arguments.plot)
    except CheckpointError as error:
        print_error("inspect", error)
        return 1 if os.path.isfile(arguments.file) else 2
    except ValueError as error:
        print_error("inspect", error)
        return 2
    if arguments.json:
        print_json(content)
    else:
        _print_for_people(arguments.file, content)
    if note:
        print_error("inspect", note)
    return 0


def _content(reader: CheckpointReader, with_statistics: bool) -> dict[str, Any]:
    variables = {}
    for name, info in reader.variables.items():
        variables[name] = {
            "shape": list(info.shape),
            "dtype": str(info.dtype),
            "synchronization": info.synchronization,
            "aggregation": info.aggregation,
            "trainable": info.trainable,
            "digest": info.digest,
        }
        if with_statistics:
            variables[name] |= asdict(summarize(reader.read_pieces(name)))
    return {
        "attributes": asdict(reader.header) | {"digest": reader.header.digest},
        "variables": variables,
        "state": {name: reader.read_state(name) for name in reader.state_paths},
    }


def _print_for_people(file: str, content: dict[str, Any]) -> None:
    header = content["attributes"]
    step = "unknown step" if header["step"] < 0 else f"step {header['step']}"
    print_line(
        f"{file}: {step}, {header['created']}, {header['num_replicas']} replica(s), "
        f"mpistrat {header['mpistrat_version']}, format version {header['format_version']}, "
        f"MPI library: {header['mpi_library']}"
    )
    variables: dict[str, dict[str, Any]] = content["variables"]
    if variables:
        shown = [n for n in _STATISTICS if all(n in each for each in variables.values())]
        print_table((*_COLUMNS, *shown), _rows(variables, shown))
    if content["state"]:
        rows = [(name, json.dumps(value)) for name, value in content["state"].items()]
        print_table(("state", "value"), rows)
    size = readable_size(sum(_size_bytes(each) for each in variables.values()))
    print_line(f"{len(variables)} variable(s), {size}; {len(content['state'])} with other state")


def _rows(variables: dict[str, dict[str, Any]], shown: list[str]) -> list[list[object]]:
    """Return a row for each variable: a tree for people, whole paths for grep and awk."""
    labels = tree_labels(variables) if is_terminal() else ((name, name) for name in variables)
    blank = [""] * (len(_COLUMNS) - 1 + len(shown))
    return [
        [label, *(_cells(variables[name], shown) if name in variables else blank)]
        for label, name in labels
    ]


def _cells(variable: dict[str, Any], shown: list[str]) -> list[object]:
    modes = [variable[key] for key in _COLUMNS[3:6]]
    shape = tuple(variable["shape"])
    size = readable_size(_size_bytes(variable))
    return [shape, variable["dtype"], *modes, size, *(_number(variable[key]) for key in shown)]


def _size_bytes(variable: dict[str, Any]) -> int:
    return int(math.prod(variable["shape"]) * np.dtype(variable["dtype"]).itemsize)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


INSPECT = Command("inspect", "Show what a checkpoint file holds.", _add_inspect_arguments, _inspect)
