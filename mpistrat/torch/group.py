"""Process group of torch.distributed over MPI: its identity, life and end."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpistrat import context
from mpistrat.agreement.channel import Channel
from mpistrat.errors import CollectiveError
from mpistrat.strategies.mpi import MPIStrategy
from mpistrat.system.exit_hooks import Phase, at
from mpistrat.torch.launching import Options
from mpistrat.torch.messages import Messages
from mpistrat.torch.operations import Operations
from mpistrat.torch.works import GroupQueue

_logger = logging.getLogger("mpistrat")


class Group(Operations, Messages):
    """A group of ranks with a communicator, a strategy and a queue for itself.

    For a class that is one of torch's as well, which is its next base. It frees `comm`, which is of
    the members alone, at its end.
    """

    def __init__(
        self, comm: MPI.Intracomm, name: str, timeout: timedelta, options: Options
    ) -> None:
        torchs: Any = super().__init__
        torchs(comm.rank, comm.size)
        self._comm = comm
        self._messages = comm.Dup()
        self._strategy = MPIStrategy(comm, "cpu", options.communication_options)
        self._collectives = context.collectives_of(self._strategy)
        self._collectives.name_of_close = "torch.destroy_process_group"
        self.set_timeout(timeout)
        self._queue = GroupQueue(f"mpistrat-group-{name}", self._collectives.channel)
        self._name = name
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

    def start_coalescing(self, device: torch.device | None = None) -> None:
        """Do nothing: operations are issued one by one."""

    def end_coalescing(self, device: torch.device | None = None) -> Any:
        """Return a work that is done once all that was issued before is."""
        opts = dist.AllreduceOptions()
        return self._issue("torch.end_coalescing", lambda call: None, [], opts)

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait so long for the other ranks."""
        self._collectives.channel.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """End the queue after what was issued, and free the communicators. **Collective**."""
        if _open_groups.pop(self._name, None) is None:
            return
        self._queue.close()
        try:
            self._strategy.close()
        except CollectiveError as error:
            # The group is over in any case, and ranks may leave a program without destroying it.
            _logger.info("destroy_process_group of %s: %s", self._name, error)
            return
        self._collectives.channel.closed = RuntimeError(
            f"The process group {self._name!r} was destroyed. Make another one with new_group()."
        )
        # All ranks have taken part in the close above, so none sends in this group any more.
        self._free_messages()
        self._comm.Free()

    def abort(self) -> None:
        """End the group at once: what waits for other ranks raises. Local."""
        channel = self._collectives.channel
        if channel.closed is None:
            channel.leave_alone("The process group was aborted", "abort of the process group")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r} rank {self.rank()} of {self.size()}>"


class MpiProcessGroup(Group, dist.ProcessGroup):
    """A group for CPU tensors alone, which takes the place of torch's own."""

    _desc = "undefined"
    _bound: torch.device | None = None
    _store: Any = None

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

    def split_group(self, *_: Any, **__: Any) -> Any:
        """Refuse: groups are made by new_group."""
        raise NotImplementedError("The mpistrat backend has no split_group. Use dist.new_group.")


_open_groups: dict[str, Group] = {}
"""Torch's C++ code holds no reference to groups that Python has made."""


def _end_queues() -> None:
    """Have no thread inside MPI or Python when the interpreter ends."""
    for group in list(_open_groups.values()):
        group._queue.abandon(group.abort)


at(Phase.BEFORE_LAST_ROUND, _end_queues)
