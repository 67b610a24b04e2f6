"""Deferred restoration: values of a file wait until the program creates their objects.

States are loaded into objects all or none: a failure restores the old ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrat.checkpoint.object_graph import PlacedSlot, Tree, slot_paths, split_object, walk
from mpistrat.checkpoint.read import Kept, Shape
from mpistrat.checkpoint.replica_state import assign_replicas, is_to_reshard
from mpistrat.checkpoint.state_json import join_state
from mpistrat.checkpoint.torch_hook import LoadedShard, TensorState
from mpistrat.errors import CheckpointMismatchError
from mpistrat.layout import Layout
from mpistrat.sharding import Box
from mpistrat.system import units
from mpistrat.trackable import Dependent, Trackable
from mpistrat.variables import Variable
from mpistrat.variables.kinds import load_components, saves_components


class StateLoading:
    """States of the file `path` that are being loaded into `objects`.

    `load` loads objects that may refuse their state, and keeps copies of their old states until all
    ranks have reached this point. The other objects need no copy; `load_rest` loads them.
    """

    def __init__(
        self,
        path: str,
        objects: Mapping[str, Any],
        state_of: Callable[[str, Any], dict[Any, Any]],
    ) -> None:
        self._path = path
        self._state_of = state_of
        self._loaded: dict[str, tuple[Any, Any]] = {}
        """The objects that have been changed, and their old states."""
        # Objects that may refuse are loaded first, while all that has changed can still be
        # reversed.
        self._rest = {name: each for name, each in objects.items() if not _may_refuse(each)}
        self._objects = {name: each for name, each in objects.items() if name not in self._rest}

    def load(self) -> None:
        """Load the objects that may refuse; if one does, nothing has changed."""
        for name, each in self._objects.items():
            try:
                self._loaded[name] = each, _state_before(each)
                each.load_state_dict(self._state_of(name, each))
            except Exception as reason:
                self.undo(name, reason)
                raise CheckpointMismatchError(
                    f"{self._refusal(name, reason)} Nothing has been restored."
                ) from reason

    def undo(self, refused: str = "", reason: Exception | None = None) -> None:
        """Restore the old states of the objects, because one, `refused`, has raised `reason`."""
        lines = []
        first: Exception | None = None
        while self._loaded:
            name, (each, before) = self._loaded.popitem()
            try:
                each.load_state_dict(before)
            except Exception as error:
                first = first or error
                lines.append(f"  {name!r}: {type(error).__name__}: {error}")
        if lines:
            begin = f"{self._refusal(refused, reason)} " if reason is not None else ""
            raise CheckpointMismatchError(
                f"{begin}Its restore cannot be reversed, because objects do not take back the "
                "state that they had:\n"
                + "\n".join(lines)
                + "\nThese may hold a part of the old state "
                "and a part of the new one: create them again. All others are unchanged."
            ) from (reason or first)

    def _refusal(self, name: str, reason: Exception) -> str:
        return (
            f"{name!r} does not accept its state from the checkpoint {self._path}: "
            f"{type(reason).__name__}: {reason}."
        )

    def load_rest(self) -> None:
        """Load the objects that cannot refuse, and forget all old states."""
        self._loaded.clear()
        for name, each in self._rest.items():
            try:
                each.load_state_dict(self._state_of(name, each))
            except Exception as reason:
                raise CheckpointMismatchError(
                    f"{self._refusal(name, reason)} It may hold a part of its old state and a "
                    "part of the new one: create it again. Objects with state_dict() have been "
                    "restored, variables have not."
                ) from reason


def _may_refuse(stateful: Any) -> bool:
    return not isinstance(stateful, TensorState) or stateful.may_refuse


def _state_before(stateful: Any) -> Any:
    # Such an object gets new tensors, so its old ones do not change. Other objects may write into
    # the arrays that state_dict() has returned, so the old state must be a copy.
    if isinstance(stateful, TensorState) and stateful.replaces_tensors:
        return stateful.state_dict()
    return copy.deepcopy(stateful.state_dict())


def check_shapes(path: str, tree: Tree, stored: dict[str, Shape], state: Mapping[str, Any]) -> None:
    """Compare the arrays of `tree` with the arrays in the file `path`. Local.

    Variables must have the shape and dtype of the file. An array of a ``state_dict()`` must have
    the dtype and the number of dimensions of the file, and the same lengths except the first: a
    history may have grown. An array that the object does not have yet, or that is empty there, may
    become any array. The state of a `PerReplicaState` that `reshard` converts is not compared.
    """
    lines = [*_of_variables(tree, stored), *_of_states(tree, stored, state)]
    if lines:
        raise CheckpointMismatchError(
            f"The checkpoint {path} does not fit the arrays of this program:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nNothing has been restored, and nothing is cast. Use the checkpoint of a program "
            "with these arrays."
        )


def _of_variables(tree: Tree, stored: dict[str, Shape]) -> Iterator[str]:
    for name, variable in tree.variables.items():
        own = variable.full_shape, variable.dtype
        if name in stored and stored[name] != own:
            yield _difference(name, stored[name], own)


def _of_states(tree: Tree, stored: dict[str, Shape], state: Mapping[str, Any]) -> Iterator[str]:
    for path, stateful in tree.stateful.items():
        if isinstance(stateful, TensorState):
            yield from _of_tensors(path, stateful, stored, state)
            continue
        if not any(name.startswith(f"{path}/") for name in stored):
            continue
        if is_to_reshard(stateful, state.get(path)):
            continue
        for key, array in split_object(stateful, path)[1].items():
            name, own = f"{path}/{key}", (array.shape, array.dtype)
            if name in stored and array.size and not _may_become(own, stored[name]):
                yield _difference(name, stored[name], own)


def _of_tensors(
    path: str, stateful: TensorState, stored: dict[str, Shape], state: Mapping[str, Any]
) -> Iterator[str]:
    if path in state:
        yield from stateful.differences(path, _blank_state(path, stored, state)[0])


def _blank_state(
    path: str, stored: Mapping[str, Shape], state: Mapping[str, Any]
) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Return a state whose tensors have no values, and these tensors by path."""
    below = f"{path}/"
    blank = {
        name.removeprefix(below): np.broadcast_to(np.zeros((), dtype), shape)
        for name, (shape, dtype) in stored.items()
        if name.startswith(below)
    }
    tensors: dict[str, Any] = {}
    return join_state(state[path], blank, tensors), tensors


def find_shards(
    tree: Tree, stored: Mapping[str, Shape], state: Mapping[str, Any]
) -> dict[str, Box]:
    """Return by path the part of each stored array that this rank needs, if not the whole. Local.

    `check_shapes` has found before that the states fit their objects.
    """
    found: dict[str, Box] = {}
    for path, stateful in tree.stateful.items():
        if not isinstance(stateful, TensorState) or path not in state:
            continue
        blank, tensors = _blank_state(path, stored, state)
        names = {id(tensor): f"{path}/{key}" for key, tensor in tensors.items()}
        whole = set()
        for tensor, box in stateful.shards(blank):
            name = names.get(id(tensor), "")
            if box is None or found.setdefault(name, box) != box:  # tied tensors may differ
                whole.add(name)
        # Tensors that no path names are under "".
        for name in whole | {""}:
            found.pop(name, None)
    return found


def _may_become(own: Shape, stored: Shape) -> bool:
    (own_shape, own_dtype), (shape, dtype) = own, stored
    return own_dtype == dtype and len(own_shape) == len(shape) and own_shape[1:] == shape[1:]


def _difference(name: str, stored: Shape, own: Shape) -> str:
    return f"{name}: {describe(*stored)} in the file, {describe(*own)} in the program"


def describe(shape: tuple[int, ...], dtype: np.dtype | str) -> str:
    """Return shape and dtype as messages show them."""
    return f"{dtype} of shape {shape}"


@dataclass(frozen=True)
class DeferredSlot:
    """A slot that `owner` has, or will have, for the variable `of`: a momentum, a moment."""

    owner: Trackable
    owner_path: str
    name: str
    of: Variable
    of_path: str | None
    """``None`` if `of` is in no checkpoint."""
    make: Callable[[Any], Any]
    """Creates the slot; called with `of`."""

    @property
    def key(self) -> tuple[int, str, int]:
        """Key that is equal for all paths of the same child."""
        return id(self.owner), self.name, id(self.of)


def deferred_slots(tree: Tree) -> dict[str, DeferredSlot]:
    """Return by path the slots that variables of `tree` have or will have, created or not."""
    # The first path of a variable counts. A later entry of a dict replaces an earlier one, so the
    # paths are taken in reverse order.
    own = {id(variable): path for path, variable in reversed(list(tree.variables.items()))}
    found = {}
    for owner_path, owner in tree.trackables.items():
        for name, make in owner._deferred_slots().items():
            dependents = [
                (owner_path, Dependent(name, None, tree.variables[path])) for path in own.values()
            ]
            places = {**tree.outside, **slot_paths(dependents, tree.variables)[0]}
            for path, place in places.items():
                of: Any = place[1].of
                if place[0] == owner_path and place[1].name == name:
                    found[path] = DeferredSlot(owner, owner_path, name, of, own.get(id(of)), make)
    return found


def make_slots(
    slots: Mapping[str, DeferredSlot], tree: Tree, stored: Collection[str]
) -> dict[str, Variable]:
    """Return, by path, new children for slots that only the file has. **Collective**."""
    made: dict[tuple[int, str, int], Variable] = {}
    by_path = {}
    for path, each in slots.items():
        if path in stored and path not in tree.variables:
            if each.key not in made:
                made[each.key] = each.make(each.of)
            by_path[path] = made[each.key]
    return by_path


def attach_slots(slots: Mapping[str, DeferredSlot], made: Mapping[str, Variable]) -> None:
    """Attach the slots in `made` to their owners, without filling them."""
    for path, child in {id(child): (path, child) for path, child in made.items()}.values():
        # Removed, because the slot gets its values from this file: the hook of an earlier restore
        # would fill it again when it is attached.
        slots[path].owner._on_new_child = None
        slots[path].owner._attach_child(slots[path].name, child, of=slots[path].of)


def fresh_slots(
    slots: Mapping[str, DeferredSlot], tree: Tree, stored: Collection[str]
) -> dict[str, Variable]:
    """Return the slots that did not exist yet when the file was written."""
    owners = {each.owner_path for each in slots.values()}
    owners = {owner for owner in owners if any(each.startswith(f"{owner}/") for each in stored)}
    return {
        path: tree.variables[path]
        for path, each in slots.items()
        if path in tree.variables
        and path not in stored
        and (each.of_path is None or each.of_path in stored)
        and each.owner_path in owners
    }


def no_shards(path: str) -> dict[str, LoadedShard]:
    """Return no shards: the file is closed."""
    return {}


@dataclass
class Restoration:
    """The content of one file, on every rank, until it has found its objects."""

    path: str
    """The file, for messages."""
    layout: Layout
    """Which of how many replicas this rank has."""
    arrays: dict[str, np.ndarray]
    """Values by path that no object has taken yet."""
    state: dict[str, Any]
    """JSON state by path that no object has taken yet."""
    components: dict[str, Kept] = field(default_factory=dict)
    """Components of replicas by path that no variable has taken yet."""
    restored: set[str] = field(default_factory=set)
    """Paths of the objects that have been filled."""
    variables: dict[str, Variable] = field(default_factory=dict)
    """The variables that have been found, by path: later children may belong to them."""
    waiting: list[PlacedSlot] = field(default_factory=list)
    """Children whose variable has not been found yet."""
    read_shards: Callable[[str], dict[str, LoadedShard]] = no_shards
    """Reads the sharded arrays below a path; returns none once the file is closed."""
    is_partial: bool = False
    """Whether values that no object has taken are expected to be left."""

    def loading(self, tree: Tree) -> StateLoading:
        """Return the loading of the states that the file has for objects of `tree`."""
        objects = {path: each for path, each in tree.stateful.items() if path in self.state}
        return StateLoading(self.path, objects, self._state_of)

    def load_variables(self, tree: Tree) -> None:
        """Assign the variables of `tree` that the file has."""
        for path, variable in tree.variables.items():
            if path in self.arrays:
                variable._load_value(self.arrays[path])
                _load_kept(variable, self.components.pop(path, None))

    def take(self, tree: Tree, filled: Iterable[str] = ()) -> None:
        """Forget the values that the objects of `tree` have received, and wait for later children.

        `filled` are the paths of variables whose values never were in `arrays`.
        """
        for path in tree.paths():
            self.restored.discard(path)  # a new object in place of one that had been filled
        self.restored.update(filled)
        for path in tree.variables:
            if self.arrays.pop(path, None) is not None:
                self.restored.add(path)
        for path in tree.stateful:
            if path in self.state:
                for key in self.arrays_below(path):
                    del self.arrays[f"{path}/{key}"]
                del self.state[path]
                self.restored.add(path)
        for path, trackable in tree.trackables.items():
            self.wait_for_children(path, trackable)
        self.variables |= tree.variables
        here = _ids(self.variables)
        self.waiting = [each for each in self.waiting if id(each[1].of) not in here]
        self.waiting += [each for path, each in tree.outside.items() if path not in self.restored]

    def wait_for_children(self, path: str, trackable: Trackable) -> None:
        """Fill each child as soon as `trackable` gets it."""
        trackable._on_new_child = Waiting(self, path)

    def fill_new_child(self, prefix: str, name: str, child: object, of: object) -> None:
        """Fill the `child` that has been attached to the object at the path `prefix`."""
        # `load_variables` and `take` remove entries from these dicts. A unit that is repeated after
        # a loss needs all entries.
        kept = {what: copy.copy(each) for what, each in vars(self).items()}
        units.on_undo(lambda: vars(self).update(kept))
        objects = {name: child} if of is None else {}
        dependents = [] if of is None else [(prefix, Dependent(name, child, of))]
        tree = walk(objects, prefix, dependents, self.variables)
        here = _ids(tree.variables)
        ready = [each for each in self.waiting if id(each[1].of) in here]
        # The new variables may be those that slots have waited for; these slots are filled with
        # them.
        if ready:
            tree = walk(objects, prefix, [*dependents, *ready], self.variables)
        assign_replicas(tree.stateful.values(), self.layout)
        check_shapes(
            self.path, tree, {p: (a.shape, a.dtype) for p, a in self.arrays.items()}, self.state
        )
        loading = self.loading(tree)
        loading.load()
        loading.load_rest()
        self.load_variables(tree)
        self.take(tree)

    def left(self) -> dict[str, str]:
        """Return by path the values that no object has taken yet: shape and dtype, or "state"."""
        arrays = {path: describe(a.shape, a.dtype) for path, a in self.arrays.items()}
        return arrays | dict.fromkeys(self.state, "state")

    def arrays_below(self, path: str) -> list[str]:
        """Return the keys of the arrays that belong to the state `path`."""
        below = f"{path}/"
        return [name.removeprefix(below) for name in self.arrays if name.startswith(below)]

    def _state_of(self, path: str, stateful: object) -> dict[Any, Any]:
        arrays: dict[str, Any] = {
            key: self.arrays[f"{path}/{key}"] for key in self.arrays_below(path)
        }
        if not isinstance(stateful, TensorState):  # a TensorState may keep them, and be rolled back
            arrays = {key: array.copy() for key, array in arrays.items()}
        return join_state(self.state[path], arrays | self.read_shards(path))


@dataclass(frozen=True)
class Waiting:
    """Hook that fills the children that an object gets later; the object was at `prefix`."""

    restoration: Restoration
    prefix: str

    def __call__(self, name: str, child: object, of: object) -> None:
        """Fill `child`."""
        self.restoration.fill_new_child(self.prefix, name, child, of)

    def missing_below(self, prefix: str) -> dict[str, tuple[str, str]]:
        """Return what still waits for an object that is at `prefix` now: by path, kind and file."""
        if self.restoration.is_partial:
            return {}
        return {
            f"{prefix}/{rest}" if prefix else rest: (of, self.restoration.path)
            for path, of in self.restoration.left().items()
            if (rest := below(path, self.prefix)) is not None
        }


def _load_kept(variable: Variable, kept: Kept | None) -> None:
    """Set the components of a variable that was created after the restore. Local."""
    if kept is None or not saves_components(variable):
        return
    num_replicas, rows = kept
    extended = variable.strategy.extended
    has_all = rows.keys() >= set(extended.local_replica_ids)
    if extended._layout.num_replicas == num_replicas and has_all:
        load_components(variable, rows)


def _ids(variables: dict[str, Variable]) -> set[int]:
    return {id(variable) for variable in variables.values()}


def below(path: str, prefix: str) -> str | None:
    """Return the rest of `path` below `prefix`, ``None`` if it is not below."""
    if not prefix:
        return path
    return path.removeprefix(f"{prefix}/") if path.startswith(f"{prefix}/") else None
