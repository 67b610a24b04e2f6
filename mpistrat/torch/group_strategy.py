"""Strategy of a process group without MPI: what datasets and checkpoints need of one."""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any, NoReturn

import torch.distributed as dist

from mpistrat.agreement.channel import Channel
from mpistrat.arrays import Device
from mpistrat.collectives.collectives import Collectives
from mpistrat.comm.device_reducers import DeviceCapabilities
from mpistrat.comm.transport import SoloTransport
from mpistrat.options import CommunicationOptions
from mpistrat.strategies.extended import StrategyExtended
from mpistrat.strategies.strategy import Strategy
from mpistrat.torch.group_transport import GroupTransport
from mpistrat.torch.launching import backend_of


class GroupExtended(StrategyExtended):
    """The collectives of a process group without MPI. Its public methods raise an error."""

    def __repr__(self) -> str:
        return f"<GroupExtended of {self._container!r}>"


class GroupStrategy(Strategy):
    """The ranks of a process group that MPI does not run, such as one of gloo or NCCL.

    It has rank and size, `barrier`, `broadcast_object` and `gather_objects`, and distributes
    datasets. Everything else, such as variables and reductions, raises `NotImplementedError`.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The group. This rank is a member.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._backend = dist.get_backend(group)
        alone = dist.get_world_size(group) == 1
        channel = Channel(SoloTransport() if alone else GroupTransport(group), None)
        capabilities = DeviceCapabilities(Device("cpu"))
        super().__init__(GroupExtended(Collectives(channel, capabilities, CommunicationOptions())))

    def __repr__(self) -> str:
        return f"<GroupStrategy rank {self.rank} of {self.size} over {self._backend}>"


_SUPPORTED = {"barrier", "broadcast_object", "experimental_distribute_dataset", "gather_objects"}


def _refuse_others(kind: type[Any]) -> None:
    """Let all inherited public methods of `kind` that are not in `_SUPPORTED` raise an error."""
    for name, found in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") and name not in _SUPPORTED:
            setattr(kind, name, _refusal(found))


def _refusal(method: Any) -> Any:
    @functools.wraps(method)
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{method.__name__} needs MPI, but {self!r} is only for datasets and checkpoints. "
            "Start the program by mpistrat run, mpiexec or srun, and call mpistrat.torch.init() "
            "in place of init_process_group."
        )

    return refuse


_refuse_others(GroupStrategy)
_refuse_others(GroupExtended)

_known: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupStrategy] = weakref.WeakKeyDictionary()
"""By group, until the program destroys it."""


def strategy_of_group(group: dist.ProcessGroup | None = None) -> Strategy:
    """Return the strategy of a process group of any backend, by default of the world. Local."""
    found: Any = dist.group.WORLD if group is None else group
    own = getattr(backend_of(found), "_strategy", None)
    if own is not None:
        strategy: Strategy = own
        return strategy
    if not isinstance(found, dist.ProcessGroup):
        raise TypeError(
            f"Expected a process group that this rank is a member of, not {found!r}. Make it with "
            "torch.distributed.new_group."
        )
    if found not in _known:
        _known[found] = GroupStrategy(found)
    return _known[found]
