"""Losses of ranks: whether the job can continue without one, and how survivors exit.

MPI_Finalize may wait for a dead rank, so a surviving process ends itself without it. Python does
not reveal the code with which it is about to exit. So this module records the exit codes for which
the program asks, and where the program has stopped.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from mpistrat.agreement.channel import Channel
from mpistrat.agreement.departures import Departure
from mpistrat.errors import CollectiveError
from mpistrat.failures import logs
from mpistrat.failures.process_state import process
from mpistrat.mpi.survival import (
    FLAG,
    failed_ranks_now,
    failed_ranks_soon,
    finalize_within,
    lost_ranks,
    revoke,
    why_not_tolerant,
)
from mpistrat.mpi.world import failed_world_ranks, world_ranks
from mpistrat.native import native_library
from mpistrat.system import exit_hooks
from mpistrat.system.text import rank_list

if TYPE_CHECKING:
    from mpi4py import MPI

_logger = logging.getLogger("mpistrat")

_END_S = 5.0
"""Time limit for MPI_Finalize, which waits for the other ranks."""
_FINALIZE_S = 1.0
"""The same if ranks are lost, because it may wait for them."""

_OUTERMOST = ("<module>", "_run_module_as_main")
"""Name of the outermost code of a program: for a file or `-c`, and for `-m`."""

_INTERRUPTED = 130
"""Exit code of a program that Ctrl-C has ended, by the convention of shells."""


class _ExitCode:
    """Facts about the exit code that are known so far."""

    def __init__(self) -> None:
        self.asked: int | None = None
        """Code of the last call of `sys.exit` or `exit`, even if the program caught it."""
        self.failed: int | None = None
        """Code of an uncaught exception."""
        self.frame: FrameType | None = None
        """Outermost frame of the program, which shows where the program has stopped."""

    def note_exits(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that records its code and calls `leave`, such as `sys.exit`."""

        def noted(status: Any = None, /) -> Any:
            # The system keeps the low 8 bits of a number. Python prints any other object except
            # None, and exits with 1.
            is_number = isinstance(status, int)
            self.asked = int(status) & 0xFF if is_number else int(status is not None)
            return leave(status)

        noted.__name__, noted.__doc__ = getattr(leave, "__name__", "exit"), leave.__doc__
        return noted

    def note_failure(self, failure: exit_hooks.Failure) -> None:
        """Record an uncaught exception."""
        self.failed = _INTERRUPTED if issubclass(failure.kind, KeyboardInterrupt) else 1

    def code(self) -> int | None:
        """Return the exit code of the program, which has ended, or ``None`` if it is unknown."""
        if self.failed is not None:
            return self.failed
        if self.frame is not None and _has_returned(self.frame):
            return 0  # the program has caught any earlier exit
        return self.asked  # `raise SystemExit(3)` is not recorded


_known = _ExitCode()
_is_noting = _is_kept = False


def note_exit_code(only_if_tolerant: bool = False) -> None:
    """Record from now on the exit code for which the program asks.

    With `only_if_tolerant`, only in a job that survives the loss of a rank.
    """
    global _is_noting
    if _is_noting or (only_if_tolerant and why_not_tolerant()):
        return
    _is_noting = True
    sys.exit = _known.note_exits(sys.exit)
    for name in ("exit", "quit"):  # `site` has created them
        leave = getattr(builtins, name, None)
        if leave is not None:
            setattr(builtins, name, _known.note_exits(leave))
    exit_hooks.at(exit_hooks.Phase.FAILED, _known.note_failure)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    if frame is not None and frame.f_code.co_name in _OUTERMOST:
        _known.frame = frame  # otherwise the program is over, and this is one of its exit hooks


def _has_returned(frame: FrameType) -> bool:
    """Return whether the code of a frame has returned, and no exception has left it."""
    # If an exception has left a frame, its last instruction is not a return.
    last = frame.f_lasti
    return last >= 0 and dis.opname[frame.f_code.co_code[last]].startswith("RETURN_")


def end_without_mpi() -> None:
    """Make this process end with the exit code of the program, without waiting for MPI."""
    global _is_kept
    note_exit_code()
    if not _is_kept:
        _is_kept = True
        exit_hooks.at(exit_hooks.Phase.AFTER_LAST_ROUND, _end)


def _bound_end_of_mpi() -> None:
    """Make this process end itself if MPI does not end within some seconds. Only at the end."""
    # If a rank is killed in MPI_Finalize of Open MPI, the others may stay there forever.
    code, library = _known.code(), native_library()
    if library is not None:
        library.end_within(int(_END_S * 1000), 1 if code is None else code)


def _end() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    code, library = _known.code(), native_library()
    # If the code is unknown, only Python knows it, so let Python exit. It does not end MPI again,
    # because it first checks whether MPI has ended.
    is_left = code is None and library is not None and finalize_within(_FINALIZE_S)
    if not (is_left and library.leave_at_exit()):
        os._exit(1 if code is None else code)


_PRINT_S = 0.3
"""Time for a launcher to read the last line."""


def has_proven_tolerance(comm: MPI.Intracomm) -> bool:
    """Return whether the ranks of `comm` survive the death of one of them. **Collective**."""
    return all(not why for why in comm.allgather(why_not_tolerant()))


@functools.cache
def warn_of_intolerance() -> None:
    """Print once that the whole job will end if a rank is lost."""
    # Print it now: when a rank is lost, the launcher ends this rank too.
    logs.print_line(
        "If a rank of this parameter-server job dies, the whole job ends. If you start it with "
        f"Open MPI's {FLAG}, it continues without a lost worker."
    )


def leave_out(channel: Channel, lost: Collection[int]) -> None:
    """Make this process end without the `lost` ranks: skip the last round and MPI_Finalize."""
    # Open MPI's MPI_Finalize usually ends without them too, but sometimes waits forever.
    if channel in process.channels:
        process.channels.remove(channel)
    process.has_left = True
    logs.flush()
    _logger.info("The job ends without %s.", rank_list(sorted(lost)))
    end_without_mpi()


def outlive_losses() -> None:
    """Make this process exit with the code of its program, even if ranks are lost at its end."""
    process.outlives_losses = True
    process.when_all_have_ended = _bound_end_of_mpi
    note_exit_code()


def find_lost(channel: Channel) -> bool:
    """Return whether ranks of `channel` are known to be dead, even if only MPI knows it."""
    if channel.departures.lost():
        return True
    comm = getattr(channel.transport, "comm", None)
    ranks = [] if comm is None else failed_ranks_now(comm)
    for rank in ranks:
        # Keep the report of a monitor, because it says more.
        channel.departures.found.setdefault(rank, Departure("ended", "gone"))
    return bool(ranks)


def leave_lost(channel: Channel) -> None:
    """Stop using `channel` because ranks of it are lost, and end this process without them."""
    if channel in process.channels:
        process.channels.remove(channel)
    ranks = channel.transport.world_ranks
    process.lost.update(ranks[rank] for rank in channel.departures.lost())
    end_without_mpi()


@contextlib.contextmanager
def explained_losses(comm: MPI.Intracomm, what: str) -> Iterator[None]:
    """Raise a `CollectiveError` on all survivors if a rank of `comm` dies during `what`."""
    try:
        yield
    except Exception as error:  # including errors of data that a dead rank has not sent
        ranks = lost_ranks(comm, error)
        if ranks is None and not (ranks := failed_ranks_soon(comm)):
            raise
        revoke(comm)  # others may wait for this rank elsewhere
        _end_alone(comm)
        if isinstance(error, CollectiveError):
            raise
        raise loss_error(comm, ranks, what) from None


def _end_alone(comm: MPI.Intracomm) -> None:
    """Make this process end without MPI_Finalize, which would crash, if it has no strategy."""
    if not process.channels and (lost := failed_ranks_soon(comm)):
        process.lost.update(world_ranks(comm)[rank] for rank in lost)
        end_without_mpi()


def loss_error(comm: MPI.Intracomm, ranks: Sequence[int], what: str) -> CollectiveError:
    """Return the error for the lost `ranks` of `comm`; an empty list if they are unknown."""
    who = rank_list(ranks) if ranks else "a rank"
    return CollectiveError(
        f"{who} of {comm.size} died, so {what} can never complete on rank {comm.rank}. "
        "comm.Shrink() returns a communicator of the ranks that are left."
    )


def note_lost() -> None:
    """Make this process, which has a strategy without the lost ranks, also end without them."""
    process.lost.update(failed_world_ranks())
    leave_replaced()
    if process.lost:  # MPI_Finalize may wait for them, even if they were in no channel
        end_without_mpi()


def leave_replaced() -> None:
    """Drop channels with lost ranks if the surviving ranks have a newer channel to end on."""
    # Do it now, because at the end the newer channel may be closed.
    channels = process.channels
    for channel in channels:
        process.lost.update(
            channel.transport.world_ranks[rank] for rank in channel.departures.lost()
        )
    kept = [each for each in channels if not _is_replaced(each, channels)]
    if len(kept) < len(channels):
        process.channels = kept
        end_without_mpi()


def _is_replaced(channel: Channel, channels: Sequence[Channel]) -> bool:
    """Return whether `channel` has lost ranks or an error, and the survivors have a newer one."""
    members = set(channel.transport.world_ranks)
    if not process.lost or not (
        members & process.lost or isinstance(channel.closed, CollectiveError)
    ):
        return False
    return _has_newer(channel, channels)


def is_given_up(channel: Channel) -> bool:
    """Return whether ranks have revoked the communicator of `channel`, and have no newer one."""
    return channel.is_revoked() and not _has_newer(channel, process.channels)


def _has_newer(channel: Channel, channels: Sequence[Channel]) -> bool:
    """Return whether the ranks of `channel` that are not lost have a newer open channel."""
    members = set(channel.transport.world_ranks)
    # Channels are registered in the order in which they were opened.
    newer = channels[channels.index(channel) + 1 :]
    return any(
        each.closed is None and members - process.lost <= set(each.transport.world_ranks)
        for each in newer
    )


def leave_without(lost: int, what: str, is_first: bool) -> None:
    """End this process at once, because it cannot continue without the rank `lost`."""
    # Do not raise an exception, because MPI_Finalize would wait for that rank.
    if is_first:
        logs.print_line(f"{rank_list([lost])} {what}")
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_PRINT_S)
    os._exit(1)
