"""Options of the watch, which ``mpistrat watch`` and ``python -m mpistrat.watch`` share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from mpistrat.errors import LaunchError
from mpistrat.native import HOW_TO_COMPILE
from mpistrat.settings import Settings, environment

STARTUP = Path(__file__).parent / "startup"
"""Folder that starts the watch in each rank, for ``PYTHONPATH``."""


def _seconds(text: str) -> str:
    try:
        is_good = 0 < float(text) < float("inf")
    except ValueError:
        is_good = False
    if not is_good:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0.")
    return text


def _seconds_or_none(text: str) -> str:
    return text if text.lower() == "none" else _seconds(text)


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the watch itself."""
    add = parser.add_argument
    add(
        "--after",
        type=_seconds,
        metavar="SECONDS",
        help="how long a proven hang must stand still before it is reported (default: 30)",
    )
    add(
        "--busy-after",
        type=_seconds_or_none,
        metavar="SECONDS",
        help="how long ranks may wait for one that computes or polls; none: for ever "
        "(default: 1800)",
    )
    add("--report-only", action="store_true", help="report once, and leave the job alone")
    add("--json", metavar="FILE", help="also write the report there, only if there is one")


def variables_of(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the variables that the options set. Raise LaunchError for bad ones."""
    variables = environment()
    changes = {"MPISTRAT_WATCH_AFTER_S": variables.get("MPISTRAT_WATCH_AFTER_S", "30")}
    if arguments.after is not None:
        changes["MPISTRAT_WATCH_AFTER_S"] = arguments.after
    if arguments.busy_after is not None:
        changes["MPISTRAT_WATCH_BUSY_AFTER_S"] = arguments.busy_after
    if arguments.report_only:
        changes["MPISTRAT_WATCH_REPORT_ONLY"] = "on"
    if arguments.json is not None:
        changes["MPISTRAT_WATCH_JSON"] = os.path.abspath(arguments.json)
    limits = limits_of(changes)
    if not limits.watch:
        raise LaunchError("MPISTRAT_WATCH=off forbids the sockets that the watch needs. Unset it.")
    if limits.watch_json is not None:
        path = Path(limits.watch_json)
        if path.is_dir() or not path.parent.is_dir():
            raise LaunchError(
                f"{path} cannot be written: its folder must exist, and it must not be a folder."
            )
    if not list(STARTUP.parent.glob("_recorder*.so")):
        raise LaunchError(f"The recorder of the watch is not compiled. {HOW_TO_COMPILE}")
    # Python reads it at its start, before the program.
    folders = os.pathsep.join(filter(None, [str(STARTUP), variables.get("PYTHONPATH", "")]))
    return changes | {"PYTHONPATH": folders}


def limits_of(changes: Mapping[str, str]) -> Settings:
    """Return the settings of this process with `changes` of variables."""
    try:
        return Settings.parse(dict(environment()) | dict(changes))
    except ValueError as error:
        raise LaunchError(str(error)) from None
