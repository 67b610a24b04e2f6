"""Flight dumps: write flight records on SIGUSR2, on an error, or if the job does not end well.

On errors they are written only if ``MPISTRAT_FLIGHT_DIR`` names a folder. On the signal they are
written even without the setting, to a folder in the working folder.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from mpistrat.agreement.channel import Channel
from mpistrat.failures.process_state import process
from mpistrat.system import exit_hooks
from mpistrat.system.callsite import failure_site, format_place, frames_of_threads
from mpistrat.system.exit_hooks import Phase
from mpistrat.system.files import write_atomically
from mpistrat.system.text import format_detail, rank_list, rank_spans, text_of
from mpistrat.tracing.flight_recorder import FlightEntry
from mpistrat.version import __version__

_logger = logging.getLogger("mpistrat")

FORMAT = "mpistrat-flight"
FORMAT_VERSION = 1
_MAX_FRAMES = 30
_DEFAULT_FOLDER = "mpistrat-flight"


class _Dumps:
    """Records to dump, and the folder for them."""

    def __init__(self) -> None:
        self.members: dict[Channel, Sequence[int]] = {}
        """World ranks of the members of each channel."""
        self.is_installed = False
        self.library: str | None = None
        self.folder: str | None = None
        self.has_failed = False
        self.exit_dump: Path | None = None
        self.previous_handler: Any = None
        # It is reentrant, because a signal may interrupt a dump of the same thread.
        self.lock = threading.RLock()


_dumps = _Dumps()


def install(
    channel: Channel,
    members: Sequence[int],
    library: str,
    folder: str | None,
    length: int,
) -> None:
    """Dump the last `length` collectives of `channel` on a signal, an error or a failed end."""
    channel.flight.resize(length)
    _dumps.folder, _dumps.library = folder, library
    if channel in _dumps.members:
        return
    if not _dumps.is_installed:
        _dumps.is_installed = True
        exit_hooks.at(Phase.FAILED, _on_uncaught)
        exit_hooks.at(Phase.BEFORE_LAST_ROUND, _before_last_round)
        exit_hooks.at(Phase.AFTER_LAST_ROUND, _after_last_round)
        _listen()
    earlier = sum(list(each) == list(members) for each in _dumps.members.values())
    channel.flight.channel = f"{rank_list(members)}" + (f" (again: {earlier})" if earlier else "")
    _dumps.members[channel] = members


def forget(channel: Channel) -> None:
    """Stop dumping the flight record of `channel`."""
    _dumps.members.pop(channel, None)


def dump(path: str | os.PathLike[str], channel: Channel, reason: str = "asked for") -> Path:
    """Write the flight record of this rank, and return the path of the file."""
    is_watched = channel in _dumps.members
    members = _dumps.members if is_watched else {channel: range(channel.size)}
    target = _path_for(path, members[channel][channel.rank])
    _write(target, members, reason)
    return target


def on_channel_failure(error: BaseException) -> None:
    """Dump the records because ranks have disagreed, or a rank was missing."""
    reason = f"{type(error).__name__}: {error}".split("\n")[0]
    _dump_failure(reason)


def on_end_of_job(channel: Channel, rank: int) -> None:
    """Dump the records because `rank` of `channel` aborts the job. From any thread."""
    if not _dumps.has_failed and _dumps.exit_dump is None:
        members = _dumps.members.get(channel, range(channel.size))
        _dump_failure(f"rank {members[rank]} ends the job")


def _write(target: Path, members: Mapping[Channel, Sequence[int]], reason: str) -> None:
    first = next(iter(members))
    world_size = process.world_size if members is _dumps.members else first.size
    parts = [
        _channel_part(each.describe() | _replica(each), members[each], each.flight.entries)
        for each in members
    ]
    rank = members[first][first.rank]
    running = next(filter(None, [each.running() for each in members]), None)
    thread = running[0] if running else threading.main_thread().ident or 0
    content = _document(parts, rank, world_size, _dumps.library, reason, _stack(thread))
    with _dumps.lock:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, json.dumps(content, indent=1) + "\n")


def _dump_by_itself(folder: str, reason: str) -> Path | None:
    """Dump without a call of the program, so log errors and do not raise them."""
    first = next(iter(_dumps.members))
    rank = _dumps.members[first][first.rank]
    target = _path_for(os.path.join(folder, "flight.rank{rank}.json"), rank)
    try:
        _write(target, _dumps.members, reason)
    except OSError as error:
        why = error.strerror or error
        _logger.warning("The flight record cannot be written to %s: %s", folder, why)
        return None
    return target


def _can_dump() -> bool:
    return bool(_dumps.members) and not process.is_fork


def _dump_failure(reason: str) -> None:
    if _can_dump() and _dumps.folder:
        _dumps.has_failed = True
        _dump_by_itself(_dumps.folder, reason)


def _on_uncaught(failure: exit_hooks.Failure) -> None:
    # After a `CollectiveError` there is a record from that moment already.
    if not _dumps.has_failed:
        kind, error, trace = failure
        _dump_failure(f"{kind.__name__} at {failure_site(trace)}: {text_of(error)}".split("\n")[0])


def _before_last_round() -> None:
    # Other ranks may end this process soon. If the job ends well, the record is removed again.
    if _can_dump() and _dumps.folder and not _dumps.has_failed:
        _dumps.exit_dump = _dump_by_itself(_dumps.folder, "left the program")


def _after_last_round() -> None:
    if _dumps.exit_dump is not None and all(
        not each.pending and each.all_ended_well() for each in _dumps.members
    ):
        _dumps.exit_dump.unlink(missing_ok=True)


def _listen() -> None:
    """Dump on SIGUSR2, also while the main thread is inside the MPI library."""
    # Python lets only the main thread set signal handlers.
    if threading.current_thread() is not threading.main_thread():
        return
    _dumps.previous_handler = signal.getsignal(signal.SIGUSR2)
    # Python runs handlers between bytecodes of the main thread, which may be inside MPI. But its C
    # code writes to the wake-up descriptor at once.
    reader, writer = os.pipe()
    # A full pipe must not block the signal handler; Python requires this too.
    os.set_blocking(writer, False)
    previous_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if previous_writer != -1:  # an event loop uses it, and needs it more
        signal.set_wakeup_fd(previous_writer)
        signal.signal(signal.SIGUSR2, _handler(_dump_on_signal))
        return
    signal.signal(signal.SIGUSR2, _handler(lambda: None))
    threading.Thread(
        target=_serve_signals, args=(reader,), name="mpistrat-flight", daemon=True
    ).start()


def _serve_signals(reader: int) -> None:
    """Dump on each SIGUSR2. Python writes the number of the signal to the pipe at once."""
    while numbers := os.read(reader, 64):
        if signal.SIGUSR2 in numbers:
            _dump_on_signal()


def _handler(act: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        act()
        if callable(_dumps.previous_handler):
            _dumps.previous_handler(number, frame)

    return handle


def _dump_on_signal() -> None:
    if not _can_dump():
        return
    target = _dump_by_itself(_dumps.folder or _DEFAULT_FOLDER, "signal SIGUSR2")
    if target is not None:
        _logger.warning("The flight record is in %s", target.parent)


def _path_for(path: str | os.PathLike[str], rank: int) -> Path:
    """Return the file of `rank`, in the folder `path` or by a name with ``{rank}`` in it."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"dump_flight_record: path must be a str or a path, not {path!r}.")
    text = os.fspath(path)
    if "{rank}" in text:
        return Path(text.replace("{rank}", str(rank)))
    if text.endswith(".json") or os.path.isfile(text):
        raise ValueError(
            f"dump_flight_record: {text!r} names one file, but each rank writes its own. Pass a "
            "folder, or put {rank} into the name, as in 'flight.{rank}.json'."
        )
    return Path(text) / f"flight.rank{rank}.json"


def _document(
    channels: Sequence[dict[str, Any]],
    rank: int,
    world_size: int,
    library: str | None,
    reason: str,
    stack: Sequence[str],
) -> dict[str, Any]:
    """Return the record of `channels`, each a `_channel_part`, as JSON. From any thread."""
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
        "stack": list(stack),
        "channels": list(channels),
    }


def _versions() -> dict[str, str]:
    from importlib import metadata  # its import takes longer than the rest of this module

    found = {"mpistrat": __version__, "python": platform.python_version()}
    for package in ("numpy", "mpi4py"):
        found[package] = metadata.version(package)
    return found


def _stack(thread: int) -> list[str]:
    """Return the stack of a thread, innermost last, without frames of this module."""
    innermost = frames_of_threads().get(thread)
    if innermost is None:
        return []
    # If the thread itself dumps, its innermost frames belong to the dump.
    shown = [
        f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
        for frame, line in traceback.walk_stack(innermost)
        if frame.f_globals.get("__name__") != __name__
    ]
    return shown[:_MAX_FRAMES][::-1]


def _replica(channel: Channel) -> dict[str, Any]:
    """Return the name of the running replica, if any."""
    running = channel.running()
    return {} if running is None else {"replica": running[1]}


def _channel_part(
    channel: dict[str, Any], members: Sequence[int], entries: Iterable[FlightEntry]
) -> dict[str, Any]:
    """Return the part about one channel; `channel` is the result of `Channel.describe`."""
    part = {"members": rank_spans(members)} | channel
    return part | {"entries": [_entry(each) for each in list(entries)]}


def _entry(entry: FlightEntry) -> dict[str, Any]:
    kind, name, owner, *details = entry.signature
    details_given = [detail for detail in details if detail != ()]
    function = entry.place[0].co_name if entry.place else ""
    return {
        "number": entry.number,
        "kind": kind,
        "name": name,
        "strategy": owner,
        "details": [*filter(None, [entry.extra]), *map(format_detail, details_given)],
        **dict(zip(("runs", "merge_calls", "updates", "failures"), entry.counters, strict=True)),
        "site": format_place(entry.place),
        "function": function,
        "state": entry.state,
        "began_ns": entry.began_ns,
        "agreed_ns": entry.agreed_ns,
        "ended_ns": entry.ended_ns,
    }
