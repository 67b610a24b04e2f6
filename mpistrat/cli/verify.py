"""``mpistrat verify``: whether checkpoint files are sound, to the last byte."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from mpistrat.checkpoint.reader import open_checkpoint
from mpistrat.cli.command import Command
from mpistrat.cli.output import print_error, print_json, print_line
from mpistrat.errors import CheckpointError
from mpistrat.spelling import readable_size

__all__ = ["VERIFY"]


def _add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="+", help="a checkpoint file, or a folder of them (*.h5)")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def _verify(arguments: argparse.Namespace) -> int:
    given: list[Path] = []
    in_folders: list[Path] = []
    try:
        for name in arguments.path:
            if not os.path.exists(name):  # also without a name, which is no folder to look into
                raise ValueError(f"There is no file or folder {name!r}.")
            if os.path.isdir(name):
                in_folders += _find(Path(name))
            else:
                given.append(Path(name))
    except ValueError as error:
        print_error("verify", error)
        return 2
    verdicts: dict[str, dict[str, Any]] = {}
    for path in dict.fromkeys((*given, *in_folders)):
        verdict = _verdict(path)
        if not verdict["sound"] and path in in_folders and not os.path.lexists(path):
            continue  # a job that is running has removed it to keep a newer one
        verdicts[str(path)] = verdict
        if not arguments.json:
            print_line(_spelled(path, verdict))
    if arguments.json:
        print_json(verdicts)
    return 0 if all(verdict["sound"] for verdict in verdicts.values()) else 1


def _find(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder.

    Raises
    ------
    ValueError
        If there are none, or the folder cannot be read.
    """
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise ValueError(f"The folder {folder} cannot be read: {error.strerror}.") from None
    found = sorted(name for name in names if name.endswith(".h5") and not name.startswith("."))
    if not found:
        raise ValueError(f"There is no checkpoint (*.h5) in the folder {folder}.")
    return [folder / name for name in found]


def _verdict(file: Path) -> dict[str, Any]:
    try:
        with open_checkpoint(file) as reader:
            reader.verify()
            return {
                "sound": True,
                "step": reader.header.step,
                "num_variables": len(reader.variables),
                "size_bytes": sum(info.size_bytes for info in reader.variables.values()),
            }
    except CheckpointError as error:
        return {"sound": False, "error": str(error)}


def _spelled(file: Path, verdict: dict[str, Any]) -> str:
    if not verdict["sound"]:
        return f"{file}: NOT SOUND\n{verdict['error']}"
    size = readable_size(verdict["size_bytes"])
    return f"{file}: sound, {verdict['num_variables']} variable(s), {size}"


VERIFY = Command(
    "verify", "Check every digest of checkpoint files.", _add_verify_arguments, _verify
)
