"""Losses of ranks: whether the job can go on without one, and how a process leaves then."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from mpistrat.agreement.channel import Channel
from mpistrat.agreement.departures import Departure
from mpistrat.errors import CollectiveError
from mpistrat.failures import logs
from mpistrat.failures.exit_code import bound_end_of_mpi, end_without_mpi, note_exit_code
from mpistrat.failures.process_state import process
from mpistrat.mpi.survival import (
    FLAG,
    failed_ranks_now,
    failed_ranks_soon,
    lost_ranks,
    revoke,
    why_not_tolerant,
)
from mpistrat.mpi.world import failed_world_ranks, world_ranks
from mpistrat.system.text import rank_list

if TYPE_CHECKING:
    from mpi4py import MPI

_logger = logging.getLogger("mpistrat")

_PRINT_S = 0.3
"""For a launcher to read the last line."""


def has_proven_tolerance(comm: MPI.Intracomm) -> bool:
    """Return whether the ranks of `comm` outlive one that dies. **Collective**."""
    return all(not why for why in comm.allgather(why_not_tolerant()))


@functools.cache
def warn_of_intolerance() -> None:
    """Print once what a lost rank will mean: when one is lost, the launcher ends this rank too."""
    logs.print_line(
        "If a rank of this parameter-server job dies, the whole job ends. Started with Open MPI's "
        f"{FLAG}, it goes on without a worker."
    )


def leave_out(channel: Channel, lost: Collection[int]) -> None:
    """Have this process end without the ranks that are `lost`: no last round, no end of MPI."""
    # MPI_Finalize of Open MPI mostly ends without them too, but sometimes waits for ever.
    if channel in process.channels:
        process.channels.remove(channel)
    process.has_left = True
    logs.flush()
    _logger.info("The job ends without %s.", rank_list(sorted(lost)))
    end_without_mpi()


def outlive_losses() -> None:
    """Have this process end as its program does, also where ranks are lost at its end."""
    process.outlives_losses = True
    process.when_all_have_ended = bound_end_of_mpi
    note_exit_code()


def find_lost(channel: Channel) -> bool:
    """Return whether ranks of `channel` are known to be dead, also to MPI alone."""
    if channel.departures.lost():
        return True
    comm = getattr(channel.transport, "comm", None)
    ranks = [] if comm is None else failed_ranks_now(comm)
    for rank in ranks:
        # What a monitor has reported says more, and stays.
        channel.departures.found.setdefault(rank, Departure("ended", "gone"))
    return bool(ranks)


def leave_lost(channel: Channel) -> None:
    """End the use of `channel` on this rank, as others are lost, and the job without them."""
    if channel in process.channels:
        process.channels.remove(channel)
    ranks = channel.transport.world_ranks
    process.lost.update(ranks[rank] for rank in channel.departures.lost())
    end_without_mpi()


@contextlib.contextmanager
def explained_losses(comm: MPI.Intracomm, what: str) -> Iterator[None]:
    """Raise a `CollectiveError` where a rank of `comm` dies during `what`, on all that are left."""
    try:
        yield
    except Exception as error:  # also of data that a dead rank has not sent
        ranks = lost_ranks(comm, error)
        if ranks is None and not (ranks := failed_ranks_soon(comm)):
            raise
        revoke(comm)  # others may wait for this rank elsewhere
        _end_alone(comm)
        if isinstance(error, CollectiveError):
            raise
        raise loss_error(comm, ranks, what) from None


def _end_alone(comm: MPI.Intracomm) -> None:
    """Have this process end by itself where it has no strategy: the end of MPI would crash."""
    if not process.channels and (lost := failed_ranks_soon(comm)):
        process.lost.update(world_ranks(comm)[rank] for rank in lost)
        end_without_mpi()


def loss_error(comm: MPI.Intracomm, ranks: Sequence[int], what: str) -> CollectiveError:
    """Return the error for the lost `ranks` of `comm`, which are unknown where there are none."""
    who = rank_list(ranks) if ranks else "a rank"
    return CollectiveError(
        f"{who} of {comm.size} died, so {what} can never complete on rank {comm.rank}. "
        "comm.Shrink() returns a communicator of the ranks that are left."
    )


def note_lost() -> None:
    """Have this process, which has made a strategy without lost ranks, end without them too."""
    process.lost.update(failed_world_ranks())
    leave_replaced()
    if process.lost:  # the end of MPI may wait for them, also where they were in no channel
        end_without_mpi()


def leave_replaced() -> None:
    """Drop the channels with lost ranks whose other ranks have a newer one, to end on that."""
    # Now, not at the end: then the newer one may be closed.
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
    """Return whether the ranks of `channel` but those that are lost have a newer one."""
    members = set(channel.transport.world_ranks)
    if not process.lost or not (
        members & process.lost or isinstance(channel.closed, CollectiveError)
    ):
        return False
    return _has_newer(channel, channels)


def is_given_up(channel: Channel) -> bool:
    """Return whether ranks of `channel` have given up its communicator, for none that is newer."""
    return channel.is_revoked() and not _has_newer(channel, process.channels)


def _has_newer(channel: Channel, channels: Sequence[Channel]) -> bool:
    """Return whether the ranks of `channel` but those that are lost have a newer one."""
    members = set(channel.transport.world_ranks)
    # Channels are registered in the order in which they were opened.
    newer = channels[channels.index(channel) + 1 :]
    return any(
        each.closed is None and members - process.lost <= set(each.transport.world_ranks)
        for each in newer
    )


def leave_without(lost: int, what: str, is_first: bool) -> None:
    """End this process at once, because nothing can go on without the rank that is `lost`."""
    # Not by an exception: the end of MPI would wait for that rank.
    if is_first:
        logs.print_line(f"{rank_list([lost])} {what}")
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_PRINT_S)
    os._exit(1)
