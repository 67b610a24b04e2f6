"""Connects the ranks of a communicator: waits for them, and opens and watches their channel."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.agreement.channel import Channel
from mpistrat.agreement.group_channel import GroupChannel
from mpistrat.comm.transport import SoloTransport
from mpistrat.errors import CollectiveTimeoutError, LaunchError
from mpistrat.failures import flight_dumps
from mpistrat.failures.flight_dumps import on_channel_failure, on_end_of_job
from mpistrat.failures.logs import forward_over, stop_over, take_lines
from mpistrat.failures.losses import loss_error, note_lost
from mpistrat.failures.monitor import Address, Handler, Monitor, Question
from mpistrat.failures.peers import MonitorClient
from mpistrat.failures.process_state import process
from mpistrat.failures.shutdown import register_channel
from mpistrat.failures.watchdog import start_watchdog, stop_watchdog
from mpistrat.mpi.launcher import is_on_one_node, keeps_survivors
from mpistrat.mpi.survival import failed_ranks, is_revoked, why_not_tolerant
from mpistrat.mpi.world import (
    attached,
    forget_attached,
    is_attached,
    ranks_of_node,
    started_world,
    world_size,
)
from mpistrat.settings import settings_at_the_end
from mpistrat.system.text import rank_list
from mpistrat.version import (
    CHECKPOINT_FORMAT_VERSION,
    ORDER_VERSION,
    PROTOCOL_VERSION,
    __version__,
)

if TYPE_CHECKING:
    from mpi4py import MPI

_logger = logging.getLogger("mpistrat")

_MASK = 2**64 - 1

_INSTALLED = (
    f"mpistrat {__version__}, order of examples {ORDER_VERSION}, checkpoint format "
    f"{CHECKPOINT_FORMAT_VERSION}, protocol {PROTOCOL_VERSION}"
)
"""Versions that must be the same on all ranks."""


_abandoned: list[_Rendezvous] = []
"""Rendezvous that some ranks never reached. MPI may still write to their memory."""


class _Rendezvous:
    """Nonblocking rendezvous of the ranks of `comm`, some of which may have left the program."""

    # Every version of the package must do the same here, or ranks with different versions would
    # hang: a duplicate, and on it the MAX of three numbers. A rank can poll for any time, and MPI
    # can be finalized while other ranks are missing.

    def __init__(self, comm: MPI.Intracomm, opens: bool, outlives_losses: bool = False) -> None:
        from mpi4py import MPI

        own = int.from_bytes(blake2b(_INSTALLED.encode(), digest_size=8).digest(), "big")
        self.rank, self.size = comm.rank, comm.size
        self.of = comm
        # If a rank dies in Idup, other ranks of Open MPI 5 may crash with a segmentation fault.
        # Shrink survives that, but blocks until all ranks have called it.
        self.comm: MPI.Intracomm
        """Private duplicate, once all ranks have arrived."""
        self._request: MPI.Request
        if outlives_losses:
            shrunk: Any = comm.Shrink()
            self.comm, self._request = shrunk, MPI.REQUEST_NULL
        else:
            self.comm, self._request = comm.Idup()
        # The MAX shows whether any rank opens a channel. With the complement it also shows whether
        # all versions are equal.
        self._send = np.array([opens, own, _MASK - own], np.uint64)
        self._receive = np.zeros_like(self._send)
        self._op = MPI.MAX
        self._is_reducing = False

    @property
    def has_fewer(self) -> bool:
        """Whether ranks were lost before all had arrived, as far as that is known."""
        return not self._request and self.comm.size < self.size

    def is_done(self) -> bool:
        """Return whether every rank has arrived."""
        if not self._request.Test():
            return False
        # The duplicate may be used only once the request of Idup is complete (MPI 4.1,
        # section 7.4.2).
        if not self._is_reducing:
            self._is_reducing = True
            self._request = self.comm.Iallreduce(self._send, self._receive, self._op)
        return bool(self._request.Test())

    def lost_ranks(self) -> list[int] | None:
        """Return the lost ranks, or ``None`` if all may still arrive.

        The list is empty if another rank has revoked the communicator, and no loss is known here.
        """
        lost = failed_ranks(self.of)
        if not lost and not is_revoked(self.of):
            return None
        _abandoned.append(self)
        return lost

    def is_wanted(self) -> bool:
        """Return whether any rank opens a channel; if not, free the duplicate."""
        is_wanted = bool(self._receive[0])
        # Free is collective. The maximum is the same on all ranks, so either all of them free the
        # duplicate, or none does.
        if not is_wanted:
            self.comm.Free()
        return is_wanted

    def check(self) -> None:
        """Raise `LaunchError` on every rank unless all run the same version. **Collective**."""
        _, largest, smallest = self._receive.tolist()
        if largest == _MASK - smallest:
            return
        facts = [_INSTALLED, str(Path(__file__).parents[1]), platform.node()]
        # Use JSON, because the ranks may run different versions.
        text = json.dumps(facts).encode()
        found = [json.loads(each) for each in self._all_gather(text)]
        self.comm.Free()
        groups: dict[tuple[str, str], list[int]] = {}
        for other, (installed, folder, _) in enumerate(found):
            groups.setdefault((installed, folder), []).append(other)
        lines = [
            f"  {rank_list(ranks)}: {installed}, from {folder} on {found[ranks[0]][2]}"
            for (installed, folder), ranks in groups.items()
        ]
        error = LaunchError(
            "The ranks run different versions of mpistrat:\n" + "\n".join(lines) + "\n"
            "Start all ranks with the same installation: look at PYTHONPATH, the environment that "
            "each node activates, and copies on local disks."
        )
        error._is_reported_elsewhere = self.rank != 0
        raise error

    def _all_gather(self, text: bytes) -> list[bytes]:
        """Return the bytes of every rank, without pickle, on whose version ranks may differ."""
        lengths = np.zeros(self.size, np.int64)
        self.comm.Allgather(np.array([len(text)], np.int64), lengths)
        joined = bytearray(int(lengths.sum()))
        self.comm.Allgatherv(text, [joined, lengths.tolist()])
        ends = np.cumsum(lengths).tolist()
        return [bytes(joined[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


_BRISK_S = 0.002
"""How long a wait only yields the core: groups are made by ranks that arrive together."""
_POLL_S = 0.0002
_LONG_POLL_S = 0.002
"""The same after a second, when the wait is longer than that for an answer."""


def open_channel(
    comm: MPI.Intracomm, timeout_s: float | None, outlives_losses: bool = False
) -> Channel:
    """Return the channel of `comm`, or a new one after a `CollectiveError`. **Collective**."""

    def make() -> Channel:
        rendezvous = _Rendezvous(comm, opens=True, outlives_losses=outlives_losses)
        if rendezvous.has_fewer:
            raise loss_error(comm, rendezvous.lost_ranks() or [], "MPIStrategy()")
        if not _wait_for_all(rendezvous, timeout_s, _log_wait):
            raise CollectiveTimeoutError(
                f"Some ranks did not come to MPIStrategy() within {timeout_s:g} s on rank "
                f"{comm.rank} of {comm.size}. Every rank of the communicator must call it."
            )
        return _connected(rendezvous, timeout_s, comm)

    # The channel uses a private duplicate, which lives as long as the communicator.
    channel: Channel = attached(comm, "channel", make, lambda known: known.closed is None)
    return channel


def open_last_channel(limit_s: float, has_failed: bool) -> Channel | None:
    """Return a channel of all ranks, for a rank that ends before it has one. **Collective**."""
    # It matches the channel that the other ranks open for their first strategy. They may never
    # create one, so this gives up after `limit_s` seconds. If all ranks end and none has failed,
    # there is nothing to report, and no channel is opened.
    comm = started_world()
    if comm is None or is_attached(comm, "channel"):
        return None
    if has_failed:
        return open_channel(comm, limit_s)
    # This makes the same calls as `open_channel`, so it matches a rank that creates its first
    # strategy.
    rendezvous = _Rendezvous(comm, opens=False)
    if not _wait_for_all(rendezvous, limit_s) or not rendezvous.is_wanted():
        return None
    channel: Channel = attached(comm, "channel", lambda: _connected(rendezvous, limit_s, comm))
    return channel


def _wait_for_all(
    rendezvous: _Rendezvous,
    limit_s: float | None,
    on_long_wait: Callable[[_Rendezvous, float], None] | None = None,
) -> bool:
    """Wait until all ranks have arrived, and return whether they have within the limit."""
    began = time.monotonic()
    remind_at_s = settings_at_the_end().wait_notice_s
    while not rendezvous.is_done():
        lost = rendezvous.lost_ranks()
        if lost is not None:
            raise loss_error(rendezvous.of, lost, "MPIStrategy()")
        waited_s = time.monotonic() - began
        if limit_s is not None and waited_s > limit_s:
            return False
        if on_long_wait is not None and waited_s > remind_at_s:
            on_long_wait(rendezvous, waited_s)
            on_long_wait = None
        if waited_s < _BRISK_S:
            os.sched_yield()
        else:
            time.sleep(_POLL_S if waited_s < 1 else _LONG_POLL_S)
    return True


def _log_wait(rendezvous: _Rendezvous, waited_s: float) -> None:
    _logger.warning(
        "rank %d of %d has waited for %.0f s in MPIStrategy() for ranks that have not called it "
        "yet. Every rank of the communicator must call it.",
        *(rendezvous.rank, rendezvous.size, waited_s),
    )


def _connected(rendezvous: _Rendezvous, timeout_s: float | None, comm: MPI.Intracomm) -> Channel:
    """Return the channel of the ranks that have arrived, and watch it. **Collective**."""
    from mpi4py import MPI

    from mpistrat.comm.mpi_transport import MpiTransport

    rendezvous.check()
    channel = Channel(MpiTransport(rendezvous.comm), timeout_s)
    channel.is_revoked = functools.partial(is_revoked, comm)
    attached(comm, "ranks of node", lambda: ranks_of_node(rendezvous.comm))  # already known
    _watch(channel, forget_attached(comm, "channel"))
    forward_over(channel)
    register_channel(channel, MPI.Is_finalized, world_size())
    note_lost()
    return channel


def open_group(parent: Channel, key: tuple[str, int], ranks: Sequence[int]) -> Channel:
    """Return the channel of a group of `ranks` of `parent`, cached under `key`. **Collective**.

    All ranks of `parent` must call it, each with its own group.
    """
    # Every rank is in one group, and all groups have the same number of ranks.
    known: Channel | None = parent.groups.get(key)
    if known is not None and known.closed is None:
        return known
    forget = functools.partial(parent.groups.pop, key, None)
    if len(ranks) == 1:
        channel = GroupChannel(SoloTransport(), None, parent, ranks)
        channel.on_free = forget
    else:
        from mpi4py import MPI

        from mpistrat.comm.mpi_transport import MpiTransport

        of_all: Any = parent.transport
        # Use the lowest rank as the colour: it is unique per group, and needs no message.
        comm = of_all.comm.Split(ranks[0], parent.rank)
        channel = GroupChannel(MpiTransport(comm), parent.timeout_s, parent, ranks)
        _watch(channel, forget)
        channel.checks = parent.checks
        register_channel(channel, MPI.Is_finalized, world_size())
    parent.groups[key] = channel
    return channel


def _watch(channel: Channel, forget: Callable[[], object]) -> None:
    """Connect `channel` to its monitors and watchdog, until it is freed. **Collective**."""
    channel.on_failure = on_channel_failure
    if channel.size > 1:
        handlers = {"log": take_lines, "end": _note_end_of_job}
        _connect_peers(
            channel, {ask: functools.partial(do, channel) for ask, do in handlers.items()}
        )
    start_watchdog(channel)
    channel.on_free = functools.partial(_disconnect, channel, forget)


def _disconnect(channel: Channel, forget: Callable[[], object]) -> None:
    """Disconnect `channel` from its monitors and watchdog. **Collective**."""
    channel.transport.occupancy.on_exit = None
    process.channels.remove(channel)
    forget()
    flight_dumps.forget(channel)
    stop_watchdog(channel)
    stop_over(channel, process.channels)
    if channel.peers is not None:
        channel.peers.leave()


def _note_end_of_job(channel: Channel, question: Question) -> dict[str, Any]:
    """Write the flight record before a different rank ends this process too. From any thread."""
    on_end_of_job(channel, int(question["sender"]))
    channel.is_reported = True
    return {}


def _connect_peers(channel: Channel, handlers: Mapping[str, Handler]) -> None:
    """Connect the monitors of `channel`, and agree on the settings of its ranks. **Collective**."""
    choices = settings_at_the_end()
    monitor = _own_monitor() if choices.watch else None
    address = None if monitor is None else [*vars(monitor.address).values()]
    # The key is a secret of this job: a monitor answers only those who know it. Its first digits
    # name the channel.
    key = os.urandom(24).hex() if channel.rank == 0 else ""
    own = [address, key, choices.checks, keeps_survivors(), not why_not_tolerant()]
    facts = channel.exchange(own)
    channel.identity, key = facts[0][1][:16], facts[0][1][16:]
    # One such launcher is enough: if it keeps survivors alive, it sends the signal to all nodes.
    if any(keeps for *_, keeps, _ in facts):
        _ignore_notice()
    # All ranks check if one does, because ranks that check would wait for those that do not.
    channel.checks = any(checks for _, _, checks, *_ in facts)
    channel.is_tolerant = all(tolerates for *_, tolerates in facts)
    if channel.is_tolerant:
        channel.transport.occupancy.on_exit = channel.explain_loss
    # If sockets are forbidden on any rank, the channel has no peers to ask.
    if any(address is None for address, *_ in facts) or monitor is None:
        return
    peers = MonitorClient(channel, key, [Address(*address) for address, *_ in facts])
    peers.join(monitor, handlers)


def _ignore_notice() -> None:
    """Ignore the signal that mpiexec sends to all ranks when one was killed."""
    # By default the signal ends this process before it can report which rank was lost.
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, lambda number, frame: None)


def _own_monitor() -> Monitor | None:
    """Return the monitor of this process, or ``None`` if it cannot open a socket."""
    if process.monitor is None:
        with contextlib.suppress(OSError):
            process.monitor = Monitor("127.0.0.1" if is_on_one_node() else "")
    return process.monitor
