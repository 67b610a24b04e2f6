"""When flight records are dumped: on SIGUSR2, on an error, and at an end that is not healthy.

A folder for the dumps has to be named (``MPISTRAT_FLIGHT_DIR``) before anything is written on
errors. A signal is a question in itself: without the setting, its answer goes to the working
folder.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from mpistrat.epochs import flight_dump
from mpistrat.epochs.callsite import failure_site
from mpistrat.epochs.channel import Channel
from mpistrat.epochs.leaving import Leaving, watch_leaving
from mpistrat.epochs.report import rank_list, text_of

__all__ = ["dump", "install", "on_end_of_job", "on_epoch_error"]

_logger = logging.getLogger("mpistrat")

_DEFAULT_FOLDER = "mpistrat-flight"


class _Process:
    """What this module remembers of the process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.channels: list[Channel] = []
        self.members: dict[Channel, Sequence[int]] = {}
        self.world_size = 1
        self.library: str | None = None
        self.folder: str | None = None
        self.has_failed = False
        self.file_of_leaving: Path | None = None
        self.previous_handler: Any = None
        # Of one thread too: a signal may come while it dumps.
        self.lock = threading.RLock()


_process = _Process()


def install(
    channel: Channel,
    members: Sequence[int],
    world_size: int,
    library: str,
    folder: str | None,
    length: int,
) -> None:
    """Have the flight record of `channel` dumped when it is wanted. Local.

    Parameters
    ----------
    channel : Channel
    members : sequence of int
        The rank in the world of each of its ranks.
    world_size : int
    library : str
        Name and version of the MPI library.
    folder : str or None
        Where dumps go that nobody has asked for; ``None`` for nowhere.
    length : int
        How many collectives to keep.
    """
    channel.flight.resize(length)
    _process.folder, _process.library, _process.world_size = folder, library, world_size
    if channel in _process.members:
        return
    if not _process.channels:
        watch_leaving(_AtTheEnd())
        _listen()
    earlier = sum(list(each) == list(members) for each in _process.members.values())
    channel.flight.channel = f"{rank_list(members)}" + (f" (again: {earlier})" if earlier else "")
    _process.channels.append(channel)
    _process.members[channel] = members


def dump(path: str | os.PathLike[str], channel: Channel, reason: str = "asked for") -> Path:
    """Write the record of this rank, and return the path of the file. Local.

    Parameters
    ----------
    path : path
        As `flight_dump.path_for`.
    channel : Channel
        Of the strategy that asks: dumped with all others that are watched.
    reason : str
    """
    is_watched = channel in _process.members
    channels = _process.channels if is_watched else [channel]
    members = _process.members if is_watched else {channel: range(channel.size)}
    target = flight_dump.path_for(path, members[channel][channel.rank])
    _write(target, channels, members, reason)
    return target


def on_epoch_error(error: BaseException) -> None:
    """Dump the records because the ranks have disagreed, or one did not come. Local."""
    reason = f"{type(error).__name__}: {error}".split("\n")[0]
    _dump_failure(reason)


def on_end_of_job(channel: Channel, rank: int) -> None:
    """Dump the records because `rank` of `channel` ends this process too. Local, any thread."""
    if not _process.has_failed and _process.file_of_leaving is None:
        members = _process.members.get(channel, range(channel.size))
        _dump_failure(f"rank {members[rank]} ends the job")


def _write(
    target: Path,
    channels: Sequence[Channel],
    members: Mapping[Channel, Sequence[int]],
    reason: str,
) -> None:
    world_size = _process.world_size if members is _process.members else channels[0].size
    parts = [
        flight_dump.channel_part(each.describe(), members[each], each.flight.entries)
        for each in channels
    ]
    rank = members[channels[0]][channels[0].rank]
    content = flight_dump.document(parts, rank, world_size, _process.library, reason, __name__)
    with _process.lock:
        flight_dump.write(target, content)


def _dump_by_itself(folder: str, reason: str) -> Path | None:
    """Dump where the program has not asked: what goes wrong is told, and not raised."""
    first = _process.channels[0]
    rank = _process.members[first][first.rank]
    target = flight_dump.path_for(os.path.join(folder, "flight.rank{rank}.json"), rank)
    try:
        _write(target, _process.channels, _process.members, reason)
    except OSError as error:
        why = error.strerror or error
        _logger.warning("The flight record cannot be written to %s: %s", folder, why)
        return None
    return target


def _can_dump() -> bool:
    return bool(_process.channels) and os.getpid() == _process.pid


def _dump_failure(reason: str) -> None:
    if _can_dump() and _process.folder:
        _process.has_failed = True
        _dump_by_itself(_process.folder, reason)


class _AtTheEnd(Leaving):
    def failed(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # After an epoch error the record is there already, as it was then.
        if not _process.has_failed:
            _dump_failure(
                f"{kind.__name__} at {failure_site(trace)}: {text_of(error)}".split("\n")[0]
            )

    def before_farewell(self) -> None:
        # Others may end this process soon. The record goes again if all ends well.
        if _process.folder and not _process.has_failed:
            _process.file_of_leaving = _dump_by_itself(_process.folder, "left the program")

    def after_farewell(self) -> None:
        if _process.file_of_leaving is not None and all(
            not each.pending and each.all_ended_well() for each in _process.channels
        ):
            _process.file_of_leaving.unlink(missing_ok=True)


def _listen() -> None:
    """Dump on SIGUSR2, also while the main thread is inside the MPI library."""
    if threading.current_thread() is not threading.main_thread():
        return
    _process.previous_handler = signal.getsignal(signal.SIGUSR2)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if previous_writer != -1:  # an event loop has it, which needs it more
        signal.set_wakeup_fd(previous_writer)
        signal.signal(signal.SIGUSR2, _handler(_dump_on_signal))
        return
    signal.signal(signal.SIGUSR2, _handler(lambda: None))
    threading.Thread(
        target=_serve_signals, args=(reader,), name="mpistrat-flight", daemon=True
    ).start()


def _serve_signals(reader: int) -> None:
    """Dump for each SIGUSR2, whose number Python writes to the pipe the moment it comes."""
    while numbers := os.read(reader, 64):
        if signal.SIGUSR2 in numbers:
            _dump_on_signal()


def _handler(act: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        act()
        if callable(_process.previous_handler):
            _process.previous_handler(number, frame)

    return handle


def _dump_on_signal() -> None:
    if not _can_dump():
        return
    target = _dump_by_itself(_process.folder or _DEFAULT_FOLDER, "signal SIGUSR2")
    if target is not None:
        _logger.warning("The flight record is in %s", target.parent)
