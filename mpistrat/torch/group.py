"""Process group of torch.distributed over MPI: its identity, life and end."""

from __future__ import annotations

import logging
import time
import zlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import distributed_c10d

from mpistrat.agreement.channel import Channel
from mpistrat.errors import EpochError, EpochTimeoutError, LaunchError
from mpistrat.mpi.world import thread_level
from mpistrat.strategies.mpi import MPIStrategy
from mpistrat.system.exit_hooks import Phase, at
from mpistrat.system.text import rank_list
from mpistrat.torch.launching import Options, check_place, job_communicator
from mpistrat.torch.messages import Messages
from mpistrat.torch.operations import Operations
from mpistrat.torch.works import GroupQueue

__all__ = ["create_group"]

_logger = logging.getLogger("mpistrat")

_NUM_TAGS = 32767
"""The smallest largest tag that MPI promises."""

_POLL_S = 0.0005


class MpiProcessGroup(Operations, Messages, dist.ProcessGroup):
    """A group of ranks with a communicator, a strategy and a queue for itself.

    Parameters
    ----------
    comm : MPI.Intracomm
        Of the members alone; freed at the end.
    name : str
        Torch's name of the group.
    timeout : timedelta
    options : Options
    """

    def __init__(
        self, comm: MPI.Intracomm, name: str, timeout: timedelta, options: Options
    ) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm = comm
        self._messages = comm.Dup()
        self._strategy = MPIStrategy(comm, "cpu", options.communication_options)
        self._collectives = self._strategy.extended._collectives
        self.set_timeout(timeout)
        self._queue = GroupQueue(f"mpistrat-group-{name}")
        self._name, self._desc = name, "undefined"
        self._bound: torch.device | None = None
        self._store: Any = None
        _open_groups[name] = self

    def _channel(self) -> Channel:
        return self._collectives.channel

    def rank(self) -> int:
        """Return the number of this rank in the group."""
        return self._collectives.rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._collectives.size

    getRank, getSize = rank, size

    def name(self) -> str:
        """Return the name of the backend."""
        return "mpistrat"

    getBackendName = _get_backend_name = name

    @property
    def supports_coalescing(self) -> bool:
        """Whether batches of messages go through `_start_coalescing`."""
        return False

    @property
    def supports_splitting(self) -> bool:
        """Whether groups are made by splitting this one."""
        return False

    def _get_backend(self, device: torch.device) -> MpiProcessGroup:
        if device.type != "cpu":
            raise RuntimeError(
                f"The mpistrat backend moves CPU tensors, and this group has no backend for "
                f"{device.type}."
            )
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _set_default_backend(self, backend_type: Any) -> None:
        pass

    def _register_backend(self, *_: Any) -> None:
        pass

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    @property
    def group_name(self) -> str:
        """Torch's name of the group."""
        return self._name

    def getGroupName(self) -> str:
        """Return the name of the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the program says that the group is for."""
        return self._desc

    def getGroupDesc(self) -> str:
        """Return the description of the group."""
        return self._desc

    @property
    def bound_device_id(self) -> torch.device | None:
        """The device that the program has bound to the group."""
        return self._bound

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._bound = device

    def get_group_store(self) -> Any:
        """Return the store in which the members met."""
        return self._store

    def _start_coalescing(self, device: torch.device) -> None:
        """Do nothing: operations are issued one by one."""

    def _end_coalescing(self, device: torch.device) -> Any:
        """Return a work that is done once all that was issued before is."""
        opts = dist.AllreduceOptions()
        return self._issue("torch.end_coalescing", lambda call: None, [], opts)

    def start_coalescing(self, device: torch.device | None = None) -> None:
        """Do nothing, as `_start_coalescing`."""

    def end_coalescing(self, device: torch.device | None = None) -> Any:
        """Do `_end_coalescing`."""
        return self._end_coalescing(torch.device("cpu"))

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait so long for the other ranks."""
        self._collectives.channel.timeout_s = timeout.total_seconds()

    def split_group(self, *_: Any, **__: Any) -> Any:
        """Refuse: groups are made by new_group."""
        raise NotImplementedError("The mpistrat backend has no split_group. Use dist.new_group.")

    def shutdown(self) -> None:
        """End the queue after what was issued, and free the communicators. **Collective**."""
        if _open_groups.pop(self._name, None) is None:
            return
        self._queue.close()
        try:
            self._strategy.close()
        except EpochError as error:
            # The group is over in any case, and ranks may leave a program without destroying it.
            _logger.info("destroy_process_group of %s: %s", self._name, error)
            return
        self._messages.Free()
        self._comm.Free()

    def abort(self) -> None:
        """End the group at once: what waits for other ranks raises. Local."""
        channel = self._collectives.channel
        if channel.closed is None:
            channel.leave_alone("The process group was aborted", "abort of the process group")

    def __repr__(self) -> str:
        return f"<MpiProcessGroup {self._name!r} rank {self.rank()} of {self.size()}>"


_open_groups: dict[str, MpiProcessGroup] = {}
"""Torch's C++ code holds no reference to groups that Python has made."""


def create_group(opts: Any, pg_options: Any) -> MpiProcessGroup:
    """Return a group for torch. **Collective** over its members."""
    job = job_communicator()
    if thread_level() != "multiple":
        raise LaunchError(
            f"MPI was started with the thread level {thread_level()}, but groups work on threads "
            "of their own. Leave mpi4py.rc.thread_level at multiple."
        )
    options = pg_options if isinstance(pg_options, Options) else Options()
    ranks = list(opts.global_ranks_in_group) or list(range(opts.group_size))
    check_place(ranks, opts.group_rank, opts.group_size)
    _wait_for_members(opts, ranks)
    whole = job.Get_group()
    members = whole.Incl(ranks)
    comm = job.Create_group(members, zlib.crc32(opts.group_id.encode()) % _NUM_TAGS)
    members.Free()
    whole.Free()
    group = MpiProcessGroup(comm, opts.group_id, opts.timeout, options)
    group._store = opts.store
    # Torch's flight recorder needs a backend of C++. The package has its own.
    getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add("mpistrat")
    return group


def _wait_for_members(opts: Any, ranks: list[int]) -> None:
    """Wait until all members are about to make the group, or raise. **Collective**."""
    # MPI would wait without a limit for a rank that never comes.
    own = opts.group_rank
    opts.store.set(f"mpistrat/{own}", "here")
    keys = [f"mpistrat/{rank}" for rank in range(opts.group_size)]
    limit_s, began = opts.timeout.total_seconds(), time.monotonic()
    while not opts.store.check(keys):
        if time.monotonic() - began > limit_s:
            missing = [ranks[rank] for rank, key in enumerate(keys) if not opts.store.check([key])]
            raise EpochTimeoutError(
                f"{rank_list(missing)} did not come to make the process group {opts.group_id!r} "
                f"within the timeout of {limit_s:g} s, on rank {ranks[own]}. Every member must "
                "call new_group, in the same order."
            )
        time.sleep(_POLL_S)


def _end_queues() -> None:
    """Have no thread inside MPI or Python when the interpreter ends."""
    for group in list(_open_groups.values()):
        group._queue.abandon(group.abort)


at(Phase.BEFORE_LAST_ROUND, _end_queues)
