"""Connect a communicator: its channel, and everything that watches it."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from mpistrat.agreement.channel import Channel
from mpistrat.errors import EpochTimeoutError
from mpistrat.failures.flight_dumps import on_channel_failure, on_end_of_job
from mpistrat.failures.logs import forward_over, take_lines
from mpistrat.failures.monitor import Question
from mpistrat.failures.peers import connect_peers
from mpistrat.failures.shutdown import register_channel
from mpistrat.failures.watchdog import start_watchdog
from mpistrat.mpi.world import attached, started_world, world_size

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["open_channel", "open_last_channel"]

_POLL_S = 0.0002


def open_channel(comm: MPI.Intracomm, timeout_s: float | None) -> Channel:
    """Return the channel of `comm`, a fresh one after an `EpochError`. **Collective**."""
    from mpi4py import MPI

    from mpistrat.comm.mpi_transport import MpiTransport

    def make() -> Channel:
        channel = Channel(MpiTransport(_duplicate(comm, timeout_s)), timeout_s)
        channel.on_failure = on_channel_failure
        if channel.size > 1:
            handlers = {"log": take_lines, "end": _note_end_of_job}
            connect_peers(
                channel, {ask: functools.partial(do, channel) for ask, do in handlers.items()}
            )
        forward_over(channel)
        register_channel(channel, MPI.Is_finalized, world_size())
        start_watchdog(channel)
        return channel

    # The channel works on a private duplicate, which lives as long as the communicator.
    channel: Channel = attached(comm, "channel", make, lambda known: known.closed is None)
    return channel


def open_last_channel(grace_s: float) -> Channel | None:
    """Return a channel of all ranks for one that fails before it has any. **Collective**."""
    # It matches the one that the other ranks open for their first strategy. They may never make
    # one, so this gives up after `grace_s` seconds.
    comm = started_world()
    return None if comm is None else open_channel(comm, grace_s)


def _note_end_of_job(channel: Channel, question: Question) -> dict[str, Any]:
    """Leave a record before another rank ends this process too, from any thread."""
    on_end_of_job(channel, int(question["sender"]))
    channel.is_reported = True
    return {}


def _duplicate(comm: MPI.Intracomm, timeout_s: float | None) -> MPI.Intracomm:
    duplicate, request = comm.Idup()
    began = time.monotonic()
    while not request.Test():
        if timeout_s is not None and time.monotonic() - began > timeout_s:
            raise EpochTimeoutError(
                f"Some ranks did not come to MPIStrategy() within {timeout_s:g} s on rank "
                f"{comm.rank} of {comm.size}. Every rank of the communicator must make it."
            )
        time.sleep(_POLL_S)
    return duplicate
