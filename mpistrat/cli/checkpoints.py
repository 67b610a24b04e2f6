"""Checkpoint commands: ``mpistrat inspect`` and ``verify``."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.checkpoint.format import BITS_OF_FLOATS, FORMAT
from mpistrat.checkpoint.nodes import read_attribute
from mpistrat.checkpoint.reader import CheckpointReader, open_checkpoint
from mpistrat.checkpoint.state_json import plain_state
from mpistrat.cli.data_checks import verify_data
from mpistrat.cli.data_files import inspect_data, is_data_file
from mpistrat.cli.diff import in_short
from mpistrat.cli.output import (
    Command,
    check_can_draw,
    check_can_write,
    is_terminal,
    on_one_line,
    print_error,
    print_json,
    print_line,
    print_note,
    print_table,
    tree_labels,
)
from mpistrat.cli.statistics import draw, numbers_of, summarize
from mpistrat.errors import CheckpointCorruptError, CheckpointError, DataError
from mpistrat.system.text import counted, readable_size

_MODES = ("synchronization", "aggregation")
"""Columns that only ``--full`` shows, because few users need them."""
_STATISTICS = ("min", "max", "mean", "nan_count")


def _add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="a checkpoint, a folder of them, or an HDF5 data file"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--stats",
        action="store_true",
        help="also show minimum, maximum, mean and number of NaN (checkpoints)",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="PNG",
        help="also draw the distribution of each variable into PNG (checkpoints)",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="show long state in full, and all facts about variables and the file (checkpoints)",
    )


def _inspect(arguments: argparse.Namespace) -> int:
    if os.path.isdir(arguments.file):
        try:
            arguments.file = _newest_in(Path(arguments.file))
        except ValueError as error:
            print_error("inspect", error)
            return 2
    if is_data_file(arguments.file):
        return inspect_data(arguments)
    note = ""
    try:
        if arguments.plot:
            check_can_draw()
            check_can_write(arguments.plot)
        with open_checkpoint(arguments.file) as reader:
            content = _content(reader, arguments.stats)
            if arguments.plot:
                note = draw(reader, arguments.plot)
    except CheckpointError as error:
        print_error("inspect", error)
        return 2
    except ValueError as error:
        print_error("inspect", error)
        return 2
    if arguments.json:
        print_json(content)
    else:
        _print_for_people(arguments.file, content, arguments.full)
    if note:
        print_note("inspect", note)
    return 0


def _newest_in(folder: Path) -> str:
    """Return the newest checkpoint of a folder, and say how many there are."""
    files = _find(folder)
    found = [path for path in files if not is_data_file(str(path))]
    if not found:
        names = ", ".join(path.name for path in files[:5])
        raise ValueError(
            f"The folder {folder} has no checkpoints, only data files. Name one of them: {names}."
        )
    try:
        newest = max(found, key=lambda path: path.stat().st_mtime_ns)
    except OSError as error:  # a running job has removed one since
        raise ValueError(f"The folder {folder} is changing: {error.strerror}. Try again.") from None
    count = counted(len(found), "checkpoint")
    print_note("inspect", f"{newest} is the newest of {count} in the folder.")
    return str(newest)


def _content(reader: CheckpointReader, with_statistics: bool) -> dict[str, Any]:
    variables = {}
    for name, info in reader.variables.items():
        variables[name] = {
            "shape": list(info.shape),
            "dtype": info.dtype_name,
            "synchronization": info.synchronization,
            "aggregation": info.aggregation,
            "trainable": info.trainable,
            "digest": info.digest,
        }
        if with_statistics:
            variables[name] |= asdict(summarize(numbers_of(reader, name)))
    content = {
        "attributes": reader.header.attributes() | {"digest": reader.header.digest()},
        "variables": variables,
        "state": {name: plain_state(reader.read_state(name)) for name in reader.state_paths},
    }
    components = {
        name: {"shape": list(shape), "dtype": str(dtype)}
        for name, (shape, dtype) in reader.replicas.items()
    }
    return content | ({"replicas": components} if components else {})


def _print_for_people(file: str, content: dict[str, Any], in_full: bool) -> None:
    header = content["attributes"]
    step = "unknown step" if header["step"] < 0 else f"step {header['step']}"
    text = (
        f"{file}: {step}, {_local_time(header['created'])}, "
        f"{counted(header['num_replicas'], 'replica')}, mpistrat {header['mpistrat_version']}"
    )
    if in_full:
        text += f", format version {header['format_version']}, {header['mpi_library']}"
    print_line(on_one_line(text))
    variables: dict[str, dict[str, Any]] = content["variables"]
    if variables:
        shown = [n for n in _STATISTICS if all(n in each for each in variables.values())]
        modes = (*(_MODES if in_full else ()), "trainable")
        print_table(
            ("variable", "shape", "dtype", *modes, "size", *shown),
            _rows(variables, tuple(content["state"]), modes, shown),
        )
    if content["state"]:
        as_text = json.dumps if in_full else in_short
        rows = [(name, as_text(value)) for name, value in content["state"].items()]
        print_table(("state", "value"), rows)
    components: dict[str, dict[str, Any]] = content.get("replicas", {})
    if components:
        columns = ("components of replicas", "shape", "dtype", "size")
        print_table(columns, [(name, *_array_cells(each)) for name, each in components.items()])
    size = readable_size(sum(_size_bytes(each) for each in variables.values()))
    text = f"{counted(len(variables), 'variable')}, {size}"
    if content["state"]:
        text += f"; state of {counted(len(content['state']), 'other object')}"
    if components:
        text += f"; components of {counted(len(components), 'variable')}"
    print_line(text)


def _local_time(created: str) -> str:
    """Return the time of a header in seconds, in the local time zone."""
    try:
        return datetime.fromisoformat(created).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError):  # an attribute of a file, which anything may have written
        return created


def _rows(
    variables: dict[str, dict[str, Any]],
    states: tuple[str, ...],
    modes: Sequence[str],
    shown: list[str],
) -> list[list[object]]:
    """Return one row per variable: as a tree on a terminal, with full paths for grep and awk."""
    # Arrays in the state of an object, such as a PyTorch module, have no modes.
    inner = {name for name in variables if name.startswith(tuple(f"{each}/" for each in states))}
    labels = tree_labels(variables) if is_terminal() else ((name, name) for name in variables)

    def cells(variable: dict[str, Any], is_inner: bool) -> list[object]:
        shape, dtype, size = _array_cells(variable)
        of_modes = ["-" if is_inner else variable[key] for key in modes]
        return [shape, dtype, *of_modes, size, *(_number(variable[key]) for key in shown)]

    blank = [""] * (3 + len(modes) + len(shown))
    return [
        [label, *(cells(variables[name], name in inner) if name in variables else blank)]
        for label, name in labels
    ]


def _array_cells(array: dict[str, Any]) -> tuple[object, object, object]:
    return tuple(array["shape"]), array["dtype"], readable_size(_size_bytes(array))


def _size_bytes(variable: dict[str, Any]) -> int:
    dtype = np.dtype(BITS_OF_FLOATS.get(variable["dtype"], variable["dtype"]))
    return int(math.prod(variable["shape"]) * dtype.itemsize)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


INSPECT = Command(
    "inspect",
    "Show the contents of a checkpoint or data file.",
    _add_inspect_arguments,
    _inspect,
    "inspect files",
    """\
See what a file contains: the variables of a checkpoint with their shapes, step and other state,
or the fields of an HDF5 data file with advice on a layout that is read faster in shuffled order.
It needs neither MPI nor the program that wrote the file.

  mpistrat inspect runs/digits/checkpoint-30.h5 --stats
""",
)


def _add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", nargs="+", metavar="PATH", help="a checkpoint, or a folder of them (*.h5)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _verify(arguments: argparse.Namespace) -> int:
    given: list[Path] = []
    in_folders: list[Path] = []
    try:
        for name in arguments.path:
            if not os.path.exists(name):  # an empty name too, which Path takes for the folder "."
                raise ValueError(f"There is no file or folder {name!r}.")
            if os.path.isdir(name):
                in_folders += _find(Path(name))
            else:
                given.append(Path(name))
    except ValueError as error:
        print_error("verify", error)
        return 2
    verdicts: dict[str, dict[str, Any]] = {}
    are_usable = True
    for path in dict.fromkeys((*given, *in_folders)):
        try:
            verdict = _verdict(path, path in in_folders)
        except CheckpointError as error:  # the file cannot be used as a checkpoint
            print_error("verify", error)
            are_usable = False
            continue
        if verdict is None:
            print_note("verify", f"{path} was skipped: it is a data file, not a checkpoint.")
            continue
        if not verdict["sound"] and path in in_folders and not os.path.lexists(path):
            continue  # a running job has removed it and keeps a newer one
        verdicts[str(path)] = verdict
        if not arguments.json:
            print_line(*_formatted(path, verdict))
    if arguments.json:
        print_json(verdicts)
    if not all(verdict["sound"] for verdict in verdicts.values()):
        return 1
    return 0 if verdicts and are_usable else 2


def _find(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, or raise ValueError if there are none."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise ValueError(f"The folder {folder} cannot be read: {error.strerror}.") from None
    found = sorted(name for name in names if name.endswith(".h5") and not name.startswith("."))
    if not found:
        raise ValueError(f"There is no checkpoint (*.h5) in the folder {folder}.")
    return [folder / name for name in found]


def _verdict(file: Path, is_in_folder: bool) -> dict[str, Any] | None:
    """Return facts about a file, or ``None`` for a data file in a folder of checkpoints.

    Raises `CheckpointError` if the file cannot be used as a checkpoint, damaged or not.
    """
    if is_data_file(str(file)):
        return None if is_in_folder else verify_data(str(file))
    try:
        with open_checkpoint(file) as reader:
            reader.verify()
            return {
                "sound": True,
                "step": reader.header.step,
                "num_variables": len(reader.variables),
                "size_bytes": sum(info.size_bytes for info in reader.variables.values()),
            }
    except CheckpointCorruptError as error:
        # In a folder, the name shows that it was a checkpoint.
        if not is_in_folder and not hdf5.has_signature(file):
            raise CheckpointError(str(error)) from None
        return {"sound": False, "error": str(error)}
    except CheckpointError as error:
        if not _is_checkpoint(file):
            raise
        # Its format version is unknown here, so nothing in it can be compared with a digest.
        return {"sound": False, "error": str(error)}


def _is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a checkpoint of any format version."""
    try:
        with contextlib.closing(hdf5.open_for_reading(path, DataError)) as file:
            return bool(read_attribute(file.id, "format") == FORMAT)
    except (DataError, OSError, RuntimeError, UnicodeError):
        return False


def _formatted(file: Path, verdict: dict[str, Any]) -> list[str]:
    if not verdict["sound"]:
        return [f"{on_one_line(file)}: ", "DAMAGED", f"\n{verdict['error']}"]
    size = readable_size(verdict["size_bytes"])
    noun = "dataset" if "num_datasets" in verdict else "variable"
    rest = f", {counted(verdict[f'num_{noun}s'], noun)}, {size}"
    return [f"{on_one_line(file)}: ", "ok", rest]


VERIFY = Command(
    "verify",
    "Check that checkpoints and HDF5 files are complete and undamaged.",
    _add_verify_arguments,
    _verify,
    "inspect files",
    """\
Check that checkpoints are complete and undamaged, for example after a full disk, a crash or a
copy. It reads every value and compares it with its checksum. Of other HDF5 files it decodes every
chunk, and checks that no two overlap. The exit code is 1 if a file is damaged or a checkpoint has
a format version that this mpistrat does not read, 2 if a file is neither.

  mpistrat verify runs/digits
""",
)
