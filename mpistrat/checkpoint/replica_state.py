"""State that differs between replicas: how a checkpoint saves and restores it.

`PerReplicaState` marks such state of generators and objects. For SyncOnRead variables the aggregate
is enough to continue. With ``num_replicas=`` their components are saved too, because adding them up
in a different order would change bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import host_copy
from mpistrat.checkpoint.marks import dump_json, load_json
from mpistrat.checkpoint.object_graph import (
    Stateful,
    Tree,
    split_object,
    state_adapter,
    strategy_of,
)
from mpistrat.checkpoint.state_json import SplitState, join_state
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CheckpointError
from mpistrat.layout import Layout
from mpistrat.mpi.launcher import is_one_of_several
from mpistrat.mpi.world import running_world
from mpistrat.system.text import counted
from mpistrat.values import PerReplica
from mpistrat.variables import Variable

Reshard = Callable[[list[Any], int], Sequence[Any]]


class PerReplicaState:
    """Mark state that differs between replicas, so that a checkpoint saves every replica's copy.

    A checkpoint saves state that is equal on all ranks once. For state that differs it raises an
    error: which of the states should a job on a different number of ranks get? In this class, the
    state of each replica is saved, and restored to the replica of the same number.

    Local. The program uses the object itself as before; only the checkpoint gets the wrapper.

    Parameters
    ----------
    obj : generator, plain Variable, or object with ``state_dict()`` and ``load_state_dict()``
        An object that a checkpoint can save, but no nest of objects. Or a `PerReplica` of such
        objects, one per replica of this rank, which
        ``strategy.distribute_values_from_function`` returns. With more replicas than
        ranks (``num_replicas=``) it must be a `PerReplica`.
    reshard : callable, optional
        Each rank calls ``reshard(states, num_replicas)`` when a file of a different number of
        replicas is restored. `states` holds the result of ``obj.state_dict()`` on each old replica
        (for a generator its ``bit_generator.state``, for a variable ``{"value": array}``). It
        returns `num_replicas` such states, the same on all ranks. Without `reshard`, such a file
        raises a `CheckpointMismatchError`. A different number of ranks with the same number of
        replicas does not need it.

    Raises
    ------
    TypeError
        If `obj` has no state, or is a variable of a strategy: mirrored variables are equal, and
        SyncOnRead variables are aggregated.

    Examples
    --------
    >>> generator = ms.PerReplicaState(np.random.default_rng([7, strategy.rank]))
    >>> checkpoint = ms.Checkpoint(generator=generator)
    >>> generator.load_state_dict(generator.state_dict())  # as a checkpoint does

    One generator per replica, on any number of ranks:

    >>> generators = strategy.distribute_values_from_function(
    ...     lambda context: np.random.default_rng([7, context.replica_id_in_sync_group])
    ... )
    >>> checkpoint = ms.Checkpoint(generators=ms.PerReplicaState(generators))
    """

    def __init__(self, obj: object, reshard: Reshard | None = None) -> None:
        if reshard is not None and not callable(reshard):
            raise TypeError(f"reshard must be a function or None, not {reshard!r}.")
        self._is_distributed = isinstance(obj, PerReplica)
        own = obj.values if isinstance(obj, PerReplica) else (obj,)
        self._targets = [_adapter(each) for each in own]
        self._reshard = reshard
        self._replicas = range(len(own))
        self._num_replicas = len(own)

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"replicas": states}`` with ``None`` for replicas of other ranks. Local.

        Returns
        -------
        dict
            The key ``"replicas"`` has one state per replica, ``None`` for those of other ranks.
            Before a checkpoint has used this object, it has only the states of this rank.
        """
        states: list[Any] = [None] * self._num_replicas
        for replica_id, target in zip(self._replicas, self._targets, strict=True):
            states[replica_id] = target.state_dict()
        return {"replicas": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set each object to its replica's state, from a state of all replicas. Local.

        Parameters
        ----------
        state : dict
            A dict as `state_dict` returns it, but with the states of all replicas.

        Raises
        ------
        ValueError
            If it has a different number of replicas and there is no `reshard` function, or if this
            function returns a different number of states.
        """
        states = state.get("replicas")
        if not isinstance(states, list):
            raise ValueError("it was saved as one state for all replicas, without PerReplicaState")
        if len(states) != self._num_replicas:
            if self._reshard is None:
                raise ValueError(
                    f"it was saved by {len(states)} replicas, but there are {self._num_replicas}, "
                    "and PerReplicaState has no reshard function"
                )
            found = len(states)
            # On every rank with the states of all replicas: each rank then takes its own states
            # from the result.
            states = list(self._reshard(states, self._num_replicas))
            if len(states) != self._num_replicas:
                raise ValueError(
                    f"reshard returned {len(states)} states of {found} for {self._num_replicas} "
                    "replicas"
                )
        for replica_id, target in zip(self._replicas, self._targets, strict=True):
            target.load_state_dict(states[replica_id])

    def _assign(self, layout: Layout) -> None:
        """Learn which replicas are on this rank, or raise if the objects do not fit them."""
        own, of_all = layout.local_replicas, layout.num_replicas
        is_shared = of_all * layout.ranks_per_replica > layout.num_ranks
        if len(own) != len(self._targets) or (is_shared and not self._is_distributed):
            raise ValueError(
                f"{self!r} is the state of {counted(len(self._targets), 'object')}, but this rank "
                f"has {len(own)} of the {of_all} replicas. Pass the PerReplica that strategy."
                "distribute_values_from_function returns, with an object for each "
                "replica; or use ReplicaContext.rng for random numbers, or a SyncOnRead variable."
            )
        self._replicas, self._num_replicas = own, of_all

    def __repr__(self) -> str:
        return f"PerReplicaState({', '.join(map(repr, self._targets))})"


def check_owner_is_known(tree: Tree, what: str) -> None:
    """Raise in a job of several ranks if a `PerReplicaState` may belong to any strategy."""
    alone = [path for path, each in tree.stateful.items() if isinstance(each, PerReplicaState)]
    if not alone or strategy_of(tree, what) is not None:
        return
    if running_world() is not None or is_one_of_several():
        raise CheckpointError(
            f"{what}: {alone} are PerReplicaState, but it is unknown to which strategy's replicas "
            "they belong, because no scope is entered. Call it in the scope of their strategy: "
            '"with strategy.scope():".'
        )


def _adapter(obj: object) -> Stateful:
    if isinstance(obj, Variable):
        if obj.strategy is not None:
            raise TypeError(
                f"PerReplicaState is for plain variables, but {obj.name!r} belongs to a strategy: "
                "a checkpoint takes it as it is."
            )
        return _VariableState(obj)
    adapter = state_adapter(obj) or obj
    if isinstance(adapter, type | PerReplicaState) or not isinstance(adapter, Stateful):
        raise TypeError(
            "PerReplicaState needs a generator, a plain variable, or an object with state_dict() "
            f"and load_state_dict(), not {obj!r}."
        )
    return adapter


class _VariableState:
    """Returns and sets the value of a plain variable."""

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def state_dict(self) -> dict[str, Any]:
        """Return the value."""
        return {"value": host_copy(self._variable.storage)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Assign the value."""
        self._variable._load_value(state["value"])

    def __repr__(self) -> str:
        return repr(self._variable)


def is_to_reshard(stateful: object, state: object) -> bool:
    """Return whether `reshard` converts `state`, which has a different number of replicas."""
    if not isinstance(stateful, PerReplicaState):
        return False
    states = state.get("replicas") if isinstance(state, dict) else None
    is_other = isinstance(states, list) and len(states) != stateful._num_replicas
    return is_other and stateful._reshard is not None


def own_states(stateful: PerReplicaState, path: str) -> list[SplitState]:
    """Return the state of each replica of this rank, as JSON and arrays."""
    return [split_object(each, path) for each in stateful._targets]


def assign_replicas(stateful: Iterable[object], layout: Layout) -> None:
    """Tell each `PerReplicaState` which replicas are on this rank. Local: it may raise."""
    for each in stateful:
        if isinstance(each, PerReplicaState):
            each._assign(layout)


def gather_states(
    collectives: Collectives, what: str, name: str, own_states: Sequence[SplitState]
) -> Callable[[], dict[str, Any]] | None:
    """Return on rank 0 a function that joins the states of all replicas. **Collective**."""
    described = [
        [dump_json(rest), [[key, array.shape, array.dtype.str] for key, array in arrays.items()]]
        for rest, arrays in own_states
    ]
    # The ranks of one replica share its state, and the first of them sends it.
    layout = collectives.layout
    senders = layout.ranks_of_shard(0)
    own = [
        np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for _, arrays in (own_states if layout.shard == 0 else ())
        for array in arrays.values()
    ]
    with collectives.call(what, name) as call:
        # First, because the gather below needs the lengths of all ranks.
        of_ranks = call.exchange(described)
        num_bytes = [
            sum(_num_bytes(*head[1:]) for _, heads in found for head in heads)
            if rank in senders
            else 0
            for rank, found in enumerate(of_ranks)
        ]
        data = np.concatenate([np.empty(0, np.uint8), *own])
        gathered = collectives.channel.transport.gather(data, num_bytes, 0)
    of_replicas = [each for rank in senders for each in of_ranks[rank]]
    # This is only a function, because joining may fail: `SavePlan.items` calls it where the other
    # ranks get the error.
    return None if gathered is None else functools.partial(_join_all, of_replicas, gathered)


def _join_all(of_replicas: Sequence[Any], gathered: np.ndarray) -> dict[str, Any]:
    """Return the argument for `PerReplicaState.load_state_dict`."""
    states, begin = [], 0
    for text, heads in of_replicas:
        found = {}
        for key, shape, dtype in heads:
            end = begin + _num_bytes(shape, dtype)
            found[key] = gathered[begin:end].view(dtype).reshape(shape)
            begin = end
        states.append(join_state(load_json(text.encode()), found))
    return {"replicas": states}


def _num_bytes(shape: Sequence[int], dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
