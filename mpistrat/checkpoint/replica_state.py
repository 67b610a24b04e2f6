"""Per-replica state: generators and objects whose state differs from replica to replica."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import host_copy
from mpistrat.checkpoint.object_graph import Stateful, split_object, state_adapter
from mpistrat.checkpoint.state_json import SplitState, dump_json, join_state, load_json
from mpistrat.collectives.collectives import Collectives
from mpistrat.layout import Layout
from mpistrat.variables import MirroredVariable, SyncOnReadVariable, Variable

__all__ = ["PerReplicaState", "assign_replicas", "gather_states"]

Reshard = Callable[[list[Any], int], Sequence[Any]]


class PerReplicaState:
    """State that each replica has for itself, declared so that a checkpoint saves all of it.

    A checkpoint saves state that is equal on all ranks once, and refuses state that differs: which
    one should a job on another number of ranks get? Wrapped in this class, the state of each
    replica is saved and restored to the replica of the same number.

    Local. The object itself is used as before; only the checkpoint gets the wrapper.

    Parameters
    ----------
    obj : generator, plain Variable, or object with ``state_dict()`` and ``load_state_dict()``
        What a checkpoint takes, except nests of it.
    reshard : callable, optional
        ``reshard(states, num_replicas)`` is called on each rank when a file of another number of
        replicas is restored. `states` holds what ``obj.state_dict()`` returned on each of them
        (for a generator its ``bit_generator.state``, for a variable ``{"value": array}``). It
        returns `num_replicas` such states, the same on all ranks. Without it such a file is
        refused with a `CheckpointMismatchError`.

    Raises
    ------
    TypeError
        If `obj` has no state, or is a variable of a strategy: mirrored ones are equal, SyncOnRead
        ones are aggregated.

    Examples
    --------
    >>> generator = ms.PerReplicaState(np.random.default_rng([7, strategy.rank]))
    >>> checkpoint = ms.Checkpoint(generator=generator)
    >>> generator.load_state_dict(generator.state_dict())  # as a checkpoint does
    """

    def __init__(self, obj: object, reshard: Reshard | None = None) -> None:
        if reshard is not None and not callable(reshard):
            raise TypeError(f"reshard must be a function or None, not {reshard!r}.")
        self._target = _adapter(obj)
        self._reshard = reshard
        self._replica_id = 0
        self._num_replicas = 1

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"replicas": states}``, in which all but this replica's are ``None``. Local."""
        states: list[Any] = [None] * self._num_replicas
        states[self._replica_id] = self._target.state_dict()
        return {"replicas": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the object its replica's part of a state with those of all replicas. Local.

        Raises
        ------
        ValueError
            If it has another number of replicas and there is no `reshard` function, or if this
            function returns another number of states.
        """
        states = state.get("replicas")
        if not isinstance(states, list):
            raise ValueError("it was saved as one state for all replicas, without PerReplicaState")
        if len(states) != self._num_replicas:
            if self._reshard is None:
                raise ValueError(
                    f"it was saved by {len(states)} replicas, but there are {self._num_replicas}, "
                    "and PerReplicaState was given no reshard function"
                )
            found = len(states)
            states = list(self._reshard(states, self._num_replicas))
            if len(states) != self._num_replicas:
                raise ValueError(
                    f"reshard returned {len(states)} states of {found} for {self._num_replicas} "
                    "replicas"
                )
        self._target.load_state_dict(states[self._replica_id])

    def _assign(self, replica_id: int, num_replicas: int) -> None:
        self._replica_id, self._num_replicas = replica_id, num_replicas

    def _is_to_reshard(self, state: object) -> bool:
        """Return whether `reshard` is to convert a `state` of another number of replicas."""
        states = state.get("replicas") if isinstance(state, dict) else None
        is_other = isinstance(states, list) and len(states) != self._num_replicas
        return is_other and self._reshard is not None

    def _own_state(self, path: str) -> SplitState:
        return split_object(self._target, path)

    def __repr__(self) -> str:
        return f"PerReplicaState({self._target!r})"


def _adapter(obj: object) -> Stateful:
    if isinstance(obj, Variable):
        if isinstance(obj, MirroredVariable | SyncOnReadVariable):
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
    """Gives and takes the value of a plain variable."""

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def state_dict(self) -> dict[str, Any]:
        """Return the value."""
        return {"value": host_copy(self._variable._storage)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Assign the value."""
        self._variable._load_value(state["value"])

    def __repr__(self) -> str:
        return repr(self._variable)


def assign_replicas(stateful: Iterable[object], layout: Layout) -> None:
    """Let each `PerReplicaState` know which replica this is."""
    for each in stateful:
        if isinstance(each, PerReplicaState):
            if layout.num_replicas * layout.ranks_per_replica > layout.num_ranks:
                raise NotImplementedError(
                    "PerReplicaState with more replicas than ranks (num_replicas): an object "
                    "exists once on a rank. Use ReplicaContext.rng for random numbers, or a "
                    "SyncOnRead variable."
                )
            each._assign(layout.replica_id, layout.num_replicas)


def gather_states(
    collectives: Collectives, what: str, name: str, own_state: SplitState
) -> Callable[[], dict[str, Any]] | None:
    """Return on rank 0 what makes the state of all replicas from their parts. **Collective**."""
    rest, arrays = own_state
    heads = [[key, array.shape, array.dtype.str] for key, array in arrays.items()]
    # The ranks of one replica share its state, and the first of them sends it.
    layout = collectives.layout
    senders = layout.ranks_of_shard(0)
    sent = arrays.values() if layout.shard == 0 else ()
    own = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in sent]
    with collectives.call(what, name) as call:
        of_ranks = call.exchange([dump_json(rest), heads])
        num_bytes = [
            sum(_num_bytes(*head[1:]) for head in heads) if rank in senders else 0
            for rank, (_, heads) in enumerate(of_ranks)
        ]
        data = np.concatenate([np.empty(0, np.uint8), *own])
        gathered = collectives.channel.transport.gather(data, num_bytes, 0)
    of_replicas = [of_ranks[rank] for rank in senders]
    return None if gathered is None else functools.partial(_join_all, of_replicas, gathered)


def _join_all(of_replicas: Sequence[Any], gathered: np.ndarray) -> dict[str, Any]:
    """Return what `PerReplicaState.load_state_dict` takes."""
    states, begin = [], 0
    for text, heads_of_rank in of_replicas:
        found = {}
        for key, shape, dtype in heads_of_rank:
            end = begin + _num_bytes(shape, dtype)
            found[key] = gathered[begin:end].view(dtype).reshape(shape)
            begin = end
        states.append(join_state(load_json(text.encode()), found))
    return {"replicas": states}


def _num_bytes(shape: Sequence[int], dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
