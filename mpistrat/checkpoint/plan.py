"""Plan of a save: checks its arrays and states, and decides which ranks write each."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import numpy as np

from mpistrat import context
from mpistrat.arguments import as_bool
from mpistrat.arrays import Array, host_view
from mpistrat.checkpoint.deferred import Waiting, below
from mpistrat.checkpoint.differences import (
    drifted_variables,
    refuse_differing,
    refuse_differing_state,
)
from mpistrat.checkpoint.digests import digest_of_text
from mpistrat.checkpoint.format import REPLICAS, Header, checked_path, is_storable
from mpistrat.checkpoint.marks import marked
from mpistrat.checkpoint.object_graph import (
    Tree,
    collectives_for,
    split_object,
    strategy_of,
    tree_of,
)
from mpistrat.checkpoint.raw_io import BYTES_WORTH_A_THREAD
from mpistrat.checkpoint.replica_state import (
    PerReplicaState,
    assign_replicas,
    check_owner_is_known,
    gather_states,
    own_states,
)
from mpistrat.checkpoint.state_json import SplitState, split_state
from mpistrat.checkpoint.torch_hook import TensorArray, TensorState, world_strategy
from mpistrat.checkpoint.writer import (
    BufferLifetime,
    Item,
    Parts,
    Replaces,
    Writers,
    check_may_replace,
    state_item,
    variable_item,
)
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CheckpointError, ContextError
from mpistrat.mpi.launcher import find_launcher, is_one_of_several, unconnected_task
from mpistrat.mpi.world import is_started, running_world
from mpistrat.sharding import Box
from mpistrat.system.text import keywords
from mpistrat.system.xxh3 import digest_of_values
from mpistrat.trackable import Trackable
from mpistrat.user_warnings import warn_once
from mpistrat.variables import MirroredVariable, SyncOnReadVariable, Variable
from mpistrat.variables.kinds import WrittenTogether, components_for_root
from mpistrat.variables.placement import BYTES_PER_PIECE
from mpistrat.variables.variable import placement_of, storage_of

_logger = logging.getLogger("mpistrat")

_WHEN_DRIFTED = ("warn", "raise", "ignore")
"""How a save can handle replicas that differ."""


class SavePlan:
    """Everything that a save of the objects below `root` writes.

    Creating a plan is **Collective**: all ranks check that they have the same objects, and that
    these can be saved.

    Attributes
    ----------
    collectives : Collectives
        The collectives of the ranks that save.
    path : str
        The file.
    writers : Writers or None
        The ranks that the path belongs to from now on.
    writes_here : bool
        Whether this rank takes part in the save; outside of strategies only rank 0 does.
    """

    def __init__(
        self,
        root: Trackable,
        what: str,
        path: str | os.PathLike[str],
        parallel: bool = False,
        keeps_shards: bool = False,
        drift: str = "warn",
        overwrite: bool | None = None,
    ) -> None:
        self._tree = tree = tree_of(root)
        self.collectives: Collectives = _collectives_for(tree, what)
        replaces = Replaces.OWN_NAMES
        if overwrite is not None:
            replaces = Replaces.ANYTHING if overwrite else Replaces.CHECKPOINTS
        with self.collectives.call(what) as call:
            self.path = checked_path(what, path)
            check_drift_option(drift)
            replaces_all = False if overwrite is None else as_bool("overwrite", overwrite)
            parallel = as_bool("parallel", parallel)
            given = keywords(drift=drift, parallel=parallel, overwrite=replaces_all)
            call.agree(self.path, *given)
        self._what = what
        self._keeps_shards = keeps_shards
        """Whether sharded tensors are written by the ranks that hold them, not sent to rank 0."""
        self.writers = Writers.of(self.collectives)
        self.writes_here = writes_here(tree, self.collectives)
        if not self.writes_here:
            _warn_of_root(what)
        elif self.collectives.size == 1:
            _warn_if_unconnected(what, self.path)
        self._states: dict[str, SplitState] = {}
        self._of_replicas: dict[str, list[SplitState]] = {}
        """The states of each `PerReplicaState` on this rank, by path."""
        self._mirrored: dict[str, str] = {}
        """Digests of mirrored variables and of tensors, by path."""
        self._keys: dict[str, set[str]] = {}
        """Keys of the tensors that must be equal on all ranks, by the path of their object."""
        self._drifted: set[str] = set()
        # The ranks exchange three short digests each, however large the state is. They gather
        # details only if these differ.
        of_ranks = self.collectives.on_all(
            lambda: self._check(root, replaces, drift), what, self.path
        )
        # Paths are compared first: states and values can be compared by name only if all ranks have
        # the same names.
        if any(each[0] != of_ranks[0][0] for each in of_ranks):
            refuse_differing(self.collectives, what, self.path, tree.paths())
        if any(each[1] != of_ranks[0][1] for each in of_ranks):
            refuse_differing_state(self.collectives, what, self._digests)
        if any(each[2:] != of_ranks[0][2:] for each in of_ranks):
            self._drifted = drifted_variables(
                self.collectives, what, tree.variables, self._mirrored, drift
            )
        self._is_parallel = parallel

    def _check(self, root: Trackable, replaces: Replaces, drift: str) -> tuple[str, str, str]:
        """Collect the states of objects, and return the digests of all paths, states and values."""
        _check_savable(self._tree)
        if self.writes_here and self.collectives.rank == 0:
            check_may_replace(self.path, replaces)
        if self._tree.stateful:
            assign_replicas(self._tree.stateful.values(), self.collectives.layout)
        if self.collectives.rank == 0:  # expect_partial() may have been called only there
            _check_nothing_waits(self._what, root, self._tree)
        self._digests: dict[str, str] = {}
        is_compared = self.collectives.size > 1
        for name, each in self._tree.stateful.items():
            if isinstance(each, PerReplicaState):
                self._of_replicas[name] = own_states(each, name)
                continue
            state = self._states[name] = split_object(each, name)
            self._check_shards(name, state)
            if _is_mirrored(each):
                self._keys[name] = each.mirrored_keys(state[1])
            if is_compared:
                self._digests[name] = _digest_of_state(state, with_values=not _is_mirrored(each))
        for name, variable in self._tree.variables.items():
            if is_compared and not isinstance(variable, WrittenTogether | SyncOnReadVariable):
                self._digests[name] = _digest_of_variable(variable)
        # These are kept apart from `_digests`: a difference there fails the save, while here
        # `drift` may ask only for a warning.
        if is_compared and drift != "ignore":
            self._mirrored = {
                name: _digest_of_variable(each)
                for name, each in self._tree.variables.items()
                if isinstance(each, MirroredVariable)
            }
            self._mirrored |= {
                f"{name}/{key}": _digest_of_array(np.asarray(array))
                for name, keys in self._keys.items()
                for key, array in self._states[name][1].items()
                if key in keys and (isinstance(array, np.ndarray) or not array.num_ranks)
            }
        groups = self._tree.paths(), self._digests.values(), self._mirrored.values()
        paths, states, mirrored = map(_digest_of_texts, groups)
        return paths, states, mirrored

    def _check_shards(self, name: str, state: SplitState) -> None:
        rank, size = self.collectives.rank, self.collectives.size
        for key, array in state[1].items():
            if isinstance(array, np.ndarray):
                continue
            is_kept = self._keeps_shards and array.mesh
            if rank == 0 and not array.is_here and not is_kept:
                raise ContextError(
                    f"{self._what}: {f'{name}/{key}'!r} is a DTensor of which rank 0 has no part, "
                    "so it cannot be gathered there. Save it with Checkpoint.write, or with "
                    "CheckpointManager(..., asynchronous=False)."
                )
            if (num_ranks := array.num_ranks) > size:
                raise ContextError(
                    f"{self._what}: {f'{name}/{key}'!r} is a DTensor of {num_ranks} ranks, but "
                    f"{size} take part in this save. Call mpistrat.torch.init() before the mesh is "
                    "made, or save in the scope of a strategy over the ranks of the mesh."
                )

    def header(self, step: int, created_s: float | None = None) -> Header:
        """Return the attributes of the root group."""
        created = "" if created_s is None else Header.timestamp(created_s)
        return Header(
            step=step,
            num_replicas=self.collectives.layout.num_replicas,
            mpi_library=self.collectives.channel.transport.library,
            created=created,
            arithmetic=self.collectives.arithmetic,
        )

    def items(self) -> Iterator[Item]:
        """Yield everything that is written to the file, in step on all ranks. **Collective**.

        Rank 0 gets one variable at a time, so drop each item before the next one.
        """
        # All ranks use the order that the constructor has compared, because most items are
        # collective.
        for name, variable in self._tree.variables.items():
            if placement_of(variable).is_in_parts and self._keeps_parts(variable):
                yield _item_of_parts(name, variable, self._is_parallel)
            else:
                is_equal = name not in self._drifted
                yield _item_of_variable(name, variable, self._is_parallel and is_equal)
            if self.collectives.arithmetic and isinstance(variable, SyncOnReadVariable):
                components = components_for_root(variable)
                shape = self.collectives.layout.num_replicas, *variable.shape
                yield Item(REPLICAS, name, shape, variable.dtype, {}, components)
        for name, state in self._states.items():
            yield from self._items_of_state(name, state)
        for name, own in self._of_replicas.items():
            join = gather_states(self.collectives, self._what, name, own)
            items: list[Item] = []
            # Only rank 0 has `join`, which calls code of the user. The ranks share its outcome
            # before the next collective, which the others would otherwise reach without rank 0.
            with self.collectives.common_outcome(self._what, name):
                if join is not None:
                    items += self._items_of_state(name, split_state(join(), name))
            yield from items

    def _keeps_parts(self, variable: Variable) -> bool:
        """Return whether rank 0 need not have all parts of a variable at once."""
        return self._keeps_shards and _num_bytes(variable) > BYTES_PER_PIECE

    def _items_of_state(self, name: str, state: SplitState) -> Iterator[Item]:
        rest, arrays = state
        yield state_item(name, rest, list(arrays))
        mirrored = self._keys.get(name, ())
        for key, array in arrays.items():
            path = f"{name}/{key}"
            is_large = array.size * array.dtype.itemsize >= BYTES_WORTH_A_THREAD
            is_equal = key in mirrored and path not in self._drifted
            if isinstance(array, np.ndarray):
                yield variable_item(path, array)
            elif self._keeps_shards and array.mesh:
                yield _item_of_tensor(path, array, parts=Parts(array.mesh, array.shards))
            elif array.num_ranks:
                whole = np.asarray(array)  # the whole tensor, on every rank
                own = whole if self.collectives.rank == 0 else None
                del whole
                yield _item_of_tensor(path, array, own, life=BufferLifetime.BRIEF)
                del own
            elif self._is_parallel and is_large and is_equal:
                life = BufferLifetime.EVERYWHERE
                yield _item_of_tensor(path, array, np.asarray(array), life=life)
            elif self.collectives.rank == 0:
                # A view shows memory of the tensor, which stays valid. A copy belongs to this item,
                # and is freed with it.
                life = BufferLifetime.LONG if array.is_view else BufferLifetime.BRIEF
                yield _item_of_tensor(path, array, np.asarray(array), life=life)


def check_drift_option(drift: object) -> None:
    """Raise for a value of the argument `drift` that is not in `_WHEN_DRIFTED`."""
    if drift not in _WHEN_DRIFTED:
        allowed = ", ".join(map(repr, _WHEN_DRIFTED))
        raise ValueError(f"drift must be one of {allowed}, not {drift!r}.")


@functools.cache
def _warn_of_root(what: str) -> None:
    _logger.warning(
        "%s outside of any strategy writes on rank 0 only, because all ranks would write the same "
        "file, and the other ranks do not wait for it. Call it in the scope of a strategy, where "
        "the ranks wait and mpistrat checks that they agree. To write one file per rank, use "
        "MPIStrategy(comm=MPI.COMM_SELF).",
        what,
    )


def _item_of_variable(name: str, variable: Variable, is_divided: bool) -> Item:
    """Send the values of one variable to rank 0. **Collective**.

    If `is_divided`, ranks that have the same values divide the large variables among themselves.
    """
    value = variable._save_value()
    placement = placement_of(variable)
    # The value is either the storage of the variable itself, which stays valid until the end of the
    # save, or an array that was created for this call.
    is_kept = placement.is_here and value is storage_of(variable)
    life = BufferLifetime.LONG if is_kept else BufferLifetime.BRIEF
    is_whole = isinstance(variable, MirroredVariable) and not placement.is_in_parts
    if is_divided and is_whole and _num_bytes(variable) >= BYTES_WORTH_A_THREAD:
        life = BufferLifetime.EVERYWHERE
    return _described(name, variable, array=value, life=life)


def _item_of_parts(name: str, variable: Any, is_parallel: bool) -> Item:
    """Return an item whose parts the ranks write, or whose pieces they send to rank 0."""
    placement = placement_of(variable)
    box = placement.box
    if not is_parallel or box is None or not isinstance(variable, WrittenTogether):
        return _described(name, variable, pieces=variable._pieces_for_root())

    def own() -> list[tuple[Box, np.ndarray]]:
        return [(box, host_view(variable.part))] if placement.saves_own else []

    return _described(name, variable, parts=Parts(f"{placement.num_holders} parts", own))


def _described(name: str, variable: Variable, array: Array | None = None, **values: Any) -> Item:
    return variable_item(
        name,
        array,
        shape=variable.full_shape,
        dtype=variable.dtype,
        synchronization=variable.synchronization.name,
        aggregation=variable.aggregation.name,
        trainable=variable.trainable,
        **values,
    )


def _num_bytes(variable: Variable) -> int:
    return math.prod(variable.full_shape) * variable.dtype.itemsize


def _is_mirrored(stateful: object) -> TypeGuard[TensorState]:
    return isinstance(stateful, TensorState) and stateful.is_mirrored


def _item_of_tensor(
    path: str, tensor: TensorArray, array: np.ndarray | None = None, **values: Any
) -> Item:
    return variable_item(
        path,
        array,
        shape=tensor.shape,
        dtype=tensor.dtype,
        tensor_dtype=tensor.tensor_dtype,
        **values,
    )


def _collectives_for(tree: Tree, what: str) -> Collectives:
    """Return the collectives of a save of the objects in `tree`. **Collective** in one case.

    Chosen as in `collectives_for`. But if no strategy of the program owns the tree and it has no
    variables, all ranks of the job compare it, if they are connected.
    """
    if strategy_of(tree, what) is not None:
        return collectives_for(tree, what)
    check_owner_is_known(tree, what)
    if tree.variables or running_world() is None:
        return collectives_for(tree, what)
    collectives: Collectives = context.collectives_of(context.strategy_of_world())
    return collectives


def _check_nothing_waits(what: str, root: Trackable, tree: Tree) -> None:
    """Raise if restored values still wait for objects below `root`, whose tree is `tree`."""
    waiting: dict[str, tuple[str, str]] = {}
    for prefix, trackable in {"": root, **tree.trackables}.items():  # parents first
        hook = trackable._on_new_child
        if isinstance(hook, Waiting):
            # The values that the object itself waits for count, not those that an object above
            # expects for it.
            waiting = {path: each for path, each in waiting.items() if below(path, prefix) is None}
            waiting |= hook.missing_below(prefix)
    if waiting:
        lines = [f"  {path} ({of}) from {file}" for path, (of, file) in sorted(waiting.items())]
        raise CheckpointError(
            f"{what}: restored values still wait for their objects, and would be missing in the "
            "new file:\n" + "\n".join(lines) + "\nAttach these objects first, or call "
            "expect_partial() on the status of Checkpoint.restore() where this is meant."
        )


def _check_savable(tree: Tree) -> None:
    if tree.empty:
        raise TypeError(
            f"A checkpoint found nothing to save in {', '.join(map(repr, tree.empty))}: such "
            "objects need variables among their attributes, or state_dict() and "
            "load_state_dict()."
        )
    for name, variable in tree.variables.items():
        if not is_storable(variable.dtype):
            raise TypeError(
                f"A checkpoint cannot save the variable {name!r}: HDF5 has no type for its dtype "
                f"{variable.dtype}. Keep a float32 copy in a second variable and save that one."
            )


def _digest_of_state(state: SplitState, with_values: bool) -> str:
    """Return the digest of one object's state, whatever the order of the keys in its dicts."""
    rest, arrays = state
    digests = [digest_of_text(json.dumps(marked(rest), sort_keys=True).encode())]
    for key, array in sorted(arrays.items()):
        # A sharded tensor has different elements on each rank by design, so only its key, dtype and
        # shape count.
        is_whole = isinstance(array, np.ndarray) or not array.num_ranks
        is_compared = with_values and is_whole
        digest = _digest_of_array(np.asarray(array)) if is_compared else ""
        digests.append(f"{key} {array.dtype} {array.shape} {digest or is_whole}")
    return _digest_of_texts(digests)


def _digest_of_variable(variable: Variable) -> str:
    return _digest_of_array(host_view(storage_of(variable)))


def _digest_of_array(array: np.ndarray) -> str:
    return f"{digest_of_values(array):016x}"


def _digest_of_texts(texts: Iterable[str]) -> str:
    # Joined by a separator, or "ab", "c" and "a", "bc" would have the same digest.
    return digest_of_text("\0".join(texts).encode())


def writes_here(tree: Tree, collectives: Collectives) -> bool:
    """Return whether this rank takes part: outside of any strategy only rank 0 does."""
    if collectives.size > 1:
        return True
    frame = context.current()
    found: list[Any] = [] if frame is None else [frame.strategy]
    for group in (tree.variables, tree.stateful, tree.trackables):
        found += [getattr(each, "strategy", None) for each in group.values()]
    if any(_is_own(strategy) for strategy in found) or _is_own(world_strategy()):
        return True
    if is_started():
        world = running_world()
        return world is None or bool(world.rank == 0)
    # A program of several processes that has not started MPI, such as one of torch over gloo.
    return not is_one_of_several() or find_launcher().task == 0


def _warn_if_unconnected(what: str, path: str) -> None:
    """Warn if a launcher started several processes that MPI does not connect. Local."""
    found = unconnected_task() if running_world() is None else None
    if found is None or found[2] == 0:  # task 0 may be the only one that saves
        return
    launcher, tasks, task = found
    warn_once(
        f"{what} saves the state of process {task} of {tasks} that {launcher} started, to "
        f"{path!r}. MPI does not connect them, so nothing compares their states, and each process "
        "that saves to one path replaces the file. Start the program with mpistrat run, mpiexec "
        "or srun --mpi=..., save on process 0 only, or use a different path in each process.",
        key="unconnected",
    )


def _is_own(strategy: Any) -> bool:
    extended = getattr(strategy, "extended", None)
    return extended is not None and not getattr(extended, "_is_default", False)
