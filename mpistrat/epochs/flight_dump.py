"""A flight record as a JSON file: one for each rank, for ``mpistrat explain``."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mpistrat.epochs.callsite import UNKNOWN_PLACE
from mpistrat.epochs.flight import FlightEntry, Place
from mpistrat.epochs.report import rank_spans, spell
from mpistrat.files import write_atomically
from mpistrat.version import __version__

__all__ = ["FORMAT", "FORMAT_VERSION", "channel_part", "document", "path_for", "write"]

FORMAT = "mpistrat-flight"
FORMAT_VERSION = 1
_MAX_FRAMES = 30


def path_for(path: str | os.PathLike[str], rank: int) -> Path:
    """Return the file of `rank` that `path` means. Local.

    Parameters
    ----------
    path : path
        A folder, or a file name with ``{rank}`` in it.
    rank : int

    Raises
    ------
    TypeError
        If it is no path.
    ValueError
        If it names one file, which the ranks would write in turn.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"dump_flight_record: path must be a str or a path, not {path!r}.")
    text = os.fspath(path)
    if "{rank}" in text:
        return Path(text.replace("{rank}", str(rank)))
    if text.endswith(".json") or os.path.isfile(text):
        raise ValueError(
            f"dump_flight_record: {text!r} names one file, but each rank writes its own. Give a "
            "folder, or put {rank} into the name, as in 'flight.{rank}.json'."
        )
    return Path(text) / f"flight.rank{rank}.json"


def write(path: Path, content: dict[str, Any]) -> None:
    """Write the document to `path`, whole or not at all, making folders that miss. Local."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def document(
    channels: Sequence[dict[str, Any]],
    rank: int,
    world_size: int,
    library: str | None,
    reason: str,
    asked_by: str,
) -> dict[str, Any]:
    """Return the record of `channels` in JSON values. Local, from any thread.

    Parameters
    ----------
    channels : sequence of dict
        Each as `channel_part` returns it.
    rank, world_size : int
        Of this process in the world.
    library : str or None
        Name and version of the MPI library.
    reason : str
        Why the record is dumped.
    asked_by : str
        The module that has the record dumped. Its part of the stack is not shown.
    """
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "reason": reason,
        "rank": rank,
        "size": world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "program": sys.argv[0] if sys.argv else "",
        "versions": _versions(),
        "mpi_library": library,
        "wall_clock_ns": time.time_ns(),
        "monotonic_ns": time.monotonic_ns(),
        "stack": _main_stack((__name__, asked_by)),
        "channels": list(channels),
    }


def _versions() -> dict[str, str]:
    from importlib import metadata  # takes longer than the rest of this module

    found = {"mpistrat": __version__, "python": platform.python_version()}
    for package in ("numpy", "mpi4py"):
        found[package] = metadata.version(package)
    return found


def _main_stack(hidden: Sequence[str]) -> list[str]:
    """Return where the main thread is, innermost last, but for the frames of modules `hidden`."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    if innermost is None:
        return []
    # The dump itself is on top where the main thread makes it.
    shown = [
        f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
        for frame, line in traceback.walk_stack(innermost)
        if frame.f_globals.get("__name__") not in hidden
    ]
    return shown[:_MAX_FRAMES][::-1]


def channel_part(
    channel: dict[str, Any], members: Sequence[int], entries: Iterable[FlightEntry]
) -> dict[str, Any]:
    """Return the part on one channel, of which `Channel.describe` says `channel`. Local."""
    part = {"members": rank_spans(members)} | channel
    return part | {"entries": [_entry(each) for each in list(entries)]}


def _entry(entry: FlightEntry) -> dict[str, Any]:
    kind, name, owner, *details = entry.signature
    details_given = [detail for detail in details if detail != ()]
    site, function = _spelled_place(entry.place)
    return {
        "number": entry.number,
        "kind": kind,
        "name": name,
        "strategy": owner,
        "details": [*filter(None, [entry.words]), *map(spell, details_given)],
        **dict(zip(("runs", "merge_calls", "updates", "failures"), entry.counters, strict=True)),
        "site": site,
        "function": function,
        "state": entry.state,
        "began_ns": entry.began_ns,
        "agreed_ns": entry.agreed_ns,
        "ended_ns": entry.ended_ns,
    }


def _spelled_place(place: Place) -> tuple[str, str]:
    if place is None:
        return UNKNOWN_PLACE, ""
    code, instruction = place
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    return f"{os.path.basename(code.co_filename)}:{line}", code.co_name
