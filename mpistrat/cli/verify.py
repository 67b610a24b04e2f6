"""``mpistrat verify``: whether checkpoint files are sound, to the last byte."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from mpistrat.checkpoint.reader import open_checkpoint
from mpistrat.cli.command import Command
from mpistrat.cli.output import print_error, print_line
from mpistrat.errors import CheckpointError
from mpistrat.spelling import readable_size

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="+", help="a checkpoint file, or a folder of them (*.h5)")


def _run(arguments: argparse.Namespace) -> int:
    files: list[Path] = []
    for path in map(Path, arguments.path):
        if not os.path.exists(path):
            print_error("verify", f"There is no file or folder {path}.")
            return 2
        found = sorted(path.glob("[!.]*.h5")) if path.is_dir() else [path]
        if not found:
            print_error("verify", f"There is no checkpoint (*.h5) in the folder {path}.")
            return 2
        files += found
    verdicts = [_is_sound(file) for file in files]
    return 0 if all(verdicts) else 1


def _is_sound(file: Path) -> bool:
    try:
        with open_checkpoint(file) as reader:
            reader.verify()
            size_bytes = sum(info.size_bytes for info in reader.variables.values())
            num_variables = len(reader.variables)
    except CheckpointError as error:
        print_line(f"{file}: NOT SOUND\n{error}")
        return False
    print_line(f"{file}: sound, {num_variables} variable(s), {readable_size(size_bytes)}")
    return True


COMMAND = Command("verify", "Check every digest of checkpoint files.", _add_arguments, _run)
