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
from types import FrameType
from typing import Any

from mpistrat.epochs import flight_dump, leaving
from mpistrat.epochs.callsite import failure_site
from mpistrat.epochs.channel import Channel
from mpistrat.epochs.leaving import Phase
from mpistrat.epochs.process_state import own
from mpistrat.epochs.report import rank_list, text_of

__all__ = ["dump", "install", "on_end_of_job", "on_epoch_error"]

_logger = logging.getLogger("mpistrat")

_DEFAULT_FOLDER = "mpistrat-flight"


class _Dumps:
    """What is to be dumped, and where to.

    Attributes
    ----------
    members : dict
        For each channel the rank in the world of each of its ranks.
    """

    def __init__(self) -> None:
        self.members: dict[Channel, Sequence[int]] = {}
        self.library: str | None = None
        self.folder: str | None = None
        self.has_failed = False
        self.file_of_leaving: Path | None = None
        self.previous_handler: Any = None
        # Of one thread too: a signal may come while it dumps.
        self.lock = threading.RLock()


_dumps = _Dumps()


def install(
    channel: Channel,
    members: Sequence[int],
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
    library : str
        Name and version of the MPI library.
    folder : str or None
        Where dumps go that nobody has asked for; ``None`` for nowhere.
    length : int
        How many collectives to keep.
    """
    channel.flight.resize(length)
    _dumps.folder, _dumps.library = folder, library
    if channel in _dumps.members:
        return
    if not _dumps.members:
        leaving.at(Phase.FAILED, _on_uncaught)
        leaving.at(Phase.BEFORE_LAST_ROUND, _before_last_round)
        leaving.at(Phase.AFTER_LAST_ROUND, _after_last_round)
        _listen()
    earlier = sum(list(each) == list(members) for each in _dumps.members.values())
    channel.flight.channel = f"{rank_list(members)}" + (f" (again: {earlier})" if earlier else "")
    _dumps.members[channel] = members


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
    is_watched = channel in _dumps.members
    members = _dumps.members if is_watched else {channel: range(channel.size)}
    target = flight_dump.path_for(path, members[channel][channel.rank])
    _write(target, members, reason)
    return target


def on_epoch_error(error: BaseException) -> None:
    """Dump the records because the ranks have disagreed, or one did not come. Local."""
    reason = f"{type(error).__name__}: {error}".split("\n")[0]
    _dump_failure(reason)


def on_end_of_job(channel: Channel, rank: int) -> None:
    """Dump the records because `rank` of `channel` ends this process too. Local, any thread."""
    if not _dumps.has_failed and _dumps.file_of_leaving is None:
        members = _dumps.members.get(channel, range(channel.size))
        _dump_failure(f"rank {members[rank]} ends the job")


def _write(target: Path, members: Mapping[Channel, Sequence[int]], reason: str) -> None:
    first = next(iter(members))
    world_size = own.world_size if members is _dumps.members else first.size
    parts = [
        flight_dump.channel_part(each.describe(), members[each], each.flight.entries)
        for each in members
    ]
    rank = members[first][first.rank]
    content = flight_dump.document(parts, rank, world_size, _dumps.library, reason, __name__)
    with _dumps.lock:
        flight_dump.write(target, content)


def _dump_by_itself(folder: str, reason: str) -> Path | None:
    """Dump where the program has not asked: what goes wrong is told, and not raised."""
    first = next(iter(_dumps.members))
    rank = _dumps.members[first][first.rank]
    target = flight_dump.path_for(os.path.join(folder, "flight.rank{rank}.json"), rank)
    try:
        _write(target, _dumps.members, reason)
    except OSError as error:
        why = error.strerror or error
        _logger.warning("The flight record cannot be written to %s: %s", folder, why)
        return None
    return target


def _can_dump() -> bool:
    return bool(_dumps.members) and not own.is_fork


def _dump_failure(reason: str) -> None:
    if _can_dump() and _dumps.folder:
        _dumps.has_failed = True
        _dump_by_itself(_dumps.folder, reason)


def _on_uncaught(failure: leaving.Failure) -> None:
    # After an epoch error the record is there already, as it was then.
    if not _dumps.has_failed:
        kind, error, trace = failure
        _dump_failure(f"{kind.__name__} at {failure_site(trace)}: {text_of(error)}".split("\n")[0])


def _before_last_round() -> None:
    # Others may end this process soon. The record goes again if all ends well.
    if _dumps.folder and not _dumps.has_failed:
        _dumps.file_of_leaving = _dump_by_itself(_dumps.folder, "left the program")


def _after_last_round() -> None:
    if _dumps.file_of_leaving is not None and all(
        not each.pending and each.all_ended_well() for each in _dumps.members
    ):
        _dumps.file_of_leaving.unlink(missing_ok=True)


def _listen() -> None:
    """Dump on SIGUSR2, also while the main thread is inside the MPI library."""
    if threading.current_thread() is not threading.main_thread():
        return
    _dumps.previous_handler = signal.getsignal(signal.SIGUSR2)
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
        if callable(_dumps.previous_handler):
            _dumps.previous_handler(number, frame)

    return handle


def _dump_on_signal() -> None:
    if not _can_dump():
        return
    target = _dump_by_itself(_dumps.folder or _DEFAULT_FOLDER, "signal SIGUSR2")
    if target is not None:
        _logger.warning("The flight record is in %s", target.parent)
