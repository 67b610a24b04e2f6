"""CentralStorageStrategy: one storage of each variable for all ranks of a node."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import context
from mpistrat.arrays import Device
from mpistrat.collectives.collectives import Collectives
from mpistrat.collectives.objects import broadcast_object
from mpistrat.mpi.world import World
from mpistrat.options import CommunicationOptions
from mpistrat.strategies.extended import StrategyExtended
from mpistrat.strategies.mpi import MPIStrategy
from mpistrat.strategies.rank_groups import RankGroups
from mpistrat.values import mirror
from mpistrat.variables import Variable
from mpistrat.variables.placement import NodeMemory, take_node_memory

if TYPE_CHECKING:
    from mpi4py import MPI

_ALIGNMENT = 64


class CentralExtended(StrategyExtended):
    """Keeps variables in memory that all ranks of the node share."""

    _placement = NodeMemory

    def __init__(self, collectives: Collectives, groups: RankGroups | None = None) -> None:
        super().__init__(collectives, groups)
        # The ranks wait for each other by agreeing on each call, so checks are always on, whatever
        # MPISTRAT_CHECKS says.
        collectives.channel.checks = True
        self._central: weakref.WeakValueDictionary[int, Variable] = weakref.WeakValueDictionary()
        """The variables whose memory `close` releases."""

    def _copied_for(self, container: Any) -> StrategyExtended:
        twin = super()._copied_for(container)
        assert isinstance(twin, CentralExtended)
        twin._central = weakref.WeakValueDictionary()
        return twin

    def _note_variable(self, variable: Variable) -> None:
        """Let `close` release the memory of `variable`."""
        if _node_memory(variable) is not None:
            self._central[id(variable)] = variable

    def _close(self) -> None:
        super()._close()
        for variable in list(self._central.values()):
            # The program may still hold its variables, but their memory must be returned to the
            # system.
            variable._storage = np.empty(0, variable.dtype)
            variable._placement.lose_copies()
        self._central.clear()

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The only device that stores variables: the host memory of the node. Local."""
        return (Device("cpu").on_task(0),)

    @context.collective("update", writes=True)
    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(var, *args, **kwargs)`` once, on rank 0, and return its result on all ranks.

        **Collective**. Rank 0 sends the result to the other ranks as pickle, and an error is raised
        on all ranks. A SyncOnRead variable is updated on each rank: see `StrategyExtended.update`.

        Returns
        -------
        nest or tuple
            As from `StrategyExtended.update`.
        """
        is_ours = isinstance(var, Variable) and var.strategy is self._container
        if not is_ours or _node_memory(var) is None:
            return super().update(var, fn, args, kwargs, group)
        what = f"update of variable {var.name!r}"
        collectives, result = self._collectives, None
        collectives.channel.ledger.updates += 1
        # Only rank 0 writes: the ranks share the memory, so an assign_add by each would count N
        # times. At the end of the block all ranks wait, so none reads before rank 0 has written.
        with collectives.all_or_none("update", var.name):
            if collectives.rank == 0:
                result = context.result_in_update_context(
                    self._container, what, fn, (var,), args, dict(kwargs or {})
                )
        var._placement.note_written()
        if collectives.size > 1:
            result = broadcast_object(collectives, "update", result, 0)
        return mirror(result) if group else (result,)

    def gradient_buffers(self, variables: Sequence[Variable]) -> list[np.ndarray]:
        """Return memory for the gradients of this replica: see `StrategyExtended`."""
        given = list(variables)
        for variable in given:
            self._check_is_ours("gradient_buffers", variable)
        missing = [
            each for each in given if _node_memory(each) is not None and not each._placement.stage
        ]
        # Equal on all ranks, because all ranks create the buffers of a variable together.
        if missing:
            self._make_stages(missing)
        rank, buffers = self._collectives.rank, []
        for variable in given:
            stage = variable._placement.stage
            if stage is not None:
                buffers.append(stage[rank].reshape(variable.shape))
            else:
                buffers.append(np.zeros(variable.shape, variable.dtype))
        return buffers

    def _make_stages(self, variables: Sequence[Variable]) -> None:
        """Create a buffer for each of `variables` on every rank. **Collective**."""
        lengths = [each._storage.nbytes for each in variables]
        # Each buffer begins at a cache line, so that no two ranks write to the same line.
        padded = [-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths]
        size, num_bytes = self._collectives.size, sum(padded)
        with self._collectives.call("gradient_buffers") as call:
            call.agree(*((each.name, str(each.dtype), each.shape) for each in variables))
            memory = take_node_memory(call, size * num_bytes, "A set of gradient buffers")
        begin = 0
        for variable, length, step in zip(variables, lengths, padded, strict=True):
            starts = [of_rank * num_bytes + begin for of_rank in range(size)]
            placement = _node_memory(variable)
            assert placement is not None
            buffers = [memory[start : start + length] for start in starts]
            placement.set_stage(buffers, variable.dtype)
            begin += step


def _node_memory(variable: Variable) -> NodeMemory | None:
    placement = variable._placement
    return placement if isinstance(placement, NodeMemory) else None


class CentralStorageStrategy(MPIStrategy):
    """Synchronous data parallelism on one node, with one storage of each variable for all ranks.

    Each rank owns a replica, as under `MPIStrategy`. Variables and the slots of optimizers are
    stored in memory that all ranks share, and each rank updates 1/N of their elements. That takes
    less memory and less time. `Variable.value` returns a view of the shared memory.

    **Collective** over `comm`. Starts MPI if the program has not.

    Parameters
    ----------
    comm, device, communication_options
        See `MPIStrategy`. With GPUs, variables are in host memory, and `value` copies them to the
        device once after each write.

    Raises
    ------
    ValueError
        On every rank, if the ranks run on several nodes. Creating a variable raises it if its
        memory cannot be allocated.
    LaunchError, TypeError
        As for `MPIStrategy`.

    Examples
    --------
    >>> central = ms.CentralStorageStrategy()
    >>> with central.scope():
    ...     weight, adam = ms.Variable(np.zeros((2, 3))), ms.optimizers.Adam(0.5)
    >>> [gradient] = central.extended.gradient_buffers([weight])
    >>> def step():
    ...     gradient[...] = 1.0
    ...     adam.apply_gradients([(gradient, weight)])
    >>> central.run(step)
    >>> weight.value().sum().round(3)
    np.float64(-3.0)
    >>> central.close()
    """

    _extended_class = CentralExtended

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        device: str = "auto",
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        super().__init__(comm, device, communication_options)

    def _check_world(self, world: World) -> None:
        if len(world.ranks_of_node) < world.size:
            raise ValueError(
                f"CentralStorageStrategy keeps variables in the memory of one node, but its "
                f"{world.size} ranks run on {len(world.hosts)}: {', '.join(world.hosts)}. Use "
                "MPIStrategy, or pass a comm of the ranks of one node, such as "
                "MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)."
            )
