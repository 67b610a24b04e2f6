"""What a restore has read, and how it finds its way into the objects, now and later."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrat.checkpoint.dependents import PlacedDependent
from mpistrat.checkpoint.json_state import join_state
from mpistrat.checkpoint.objects import Tree, walk
from mpistrat.checkpoint.shapes import check_shapes, describe
from mpistrat.errors import CheckpointError, CheckpointMismatchError
from mpistrat.tracking import Dependent, Trackable
from mpistrat.variables import Variable

__all__ = ["Restoration", "Waiting", "check_nothing_waits"]


@dataclass
class Restoration:
    """The content of one file, on every rank, until it has found its objects."""

    path: str
    """The file, for messages."""
    arrays: dict[str, np.ndarray]
    """Values by path that no object has taken yet."""
    state: dict[str, Any]
    """JSON state by path that no object has taken yet."""
    restored: set[str] = field(default_factory=set)
    """Paths of the objects that have been filled."""
    variables: dict[str, Variable] = field(default_factory=dict)
    """The variables that have been found, by path: later children may belong to them."""
    waiting: list[PlacedDependent] = field(default_factory=list)
    """Children whose variable has not been found yet."""
    is_partial: bool = False
    """Whether what no object has taken is not missed."""

    def load_state(self, tree: Tree) -> Callable[[], None]:
        """Fill the stateful objects of `tree` that the file has; return how to undo it. Local.

        Raises
        ------
        CheckpointMismatchError
            If an object refuses its state; all of them are then as they were.
        """
        undo = contextlib.ExitStack()
        for path, stateful in tree.stateful.items():
            if path not in self.state:
                continue
            try:
                before = copy.deepcopy(stateful.state_dict())
                undo.callback(stateful.load_state_dict, before)
                stateful.load_state_dict(self._state_of(path))
            except Exception as reason:
                undo.close()
                raise CheckpointMismatchError(
                    f"{path!r} does not accept its state from the checkpoint {self.path}: "
                    f"{type(reason).__name__}: {reason}. Nothing has been restored."
                ) from reason
        return undo.close

    def load_variables(self, tree: Tree) -> None:
        """Assign the variables of `tree` that the file has. Local."""
        for path, variable in tree.variables.items():
            if path in self.arrays:
                variable.load_value(self.arrays[path])

    def take(self, tree: Tree, filled: Iterable[str] = ()) -> None:
        """Forget what the objects of `tree` have got, and wait for their later children. Local.

        Parameters
        ----------
        tree : Tree
        filled : iterable of str
            Paths of the variables that have got values that were never here.
        """
        for path in tree.paths():
            self.restored.discard(path)  # an object in the place of one that had been filled
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
        """Fill the children that `trackable` gets from now on. Local."""
        trackable.on_new_child = Waiting(self, path)

    def fill_new_child(self, prefix: str, name: str, child: object, of: object) -> None:
        """Fill the `child` that the object at the path `prefix` has got. Local."""
        objects = {name: child} if of is None else {}
        dependents = [] if of is None else [(prefix, Dependent(name, child, of))]
        tree = walk(objects, prefix, dependents, self.variables)
        here = _ids(tree.variables)
        ready = [each for each in self.waiting if id(each[1].of) in here]
        if ready:
            tree = walk(objects, prefix, [*dependents, *ready], self.variables)
        check_shapes(self.path, tree, {p: (a.shape, a.dtype) for p, a in self.arrays.items()})
        self.load_state(tree)
        self.load_variables(tree)
        self.take(tree)

    def left(self) -> dict[str, str]:
        """Return what no object has taken yet, by path: shape and dtype, or "state"."""
        arrays = {path: describe(a.shape, a.dtype) for path, a in self.arrays.items()}
        return arrays | dict.fromkeys(self.state, "state")

    def arrays_below(self, path: str) -> list[str]:
        """Return the keys of the arrays that belong to the state `path`. Local."""
        below = f"{path}/"
        return [name.removeprefix(below) for name in self.arrays if name.startswith(below)]

    def _state_of(self, path: str) -> dict[str, Any]:
        arrays = {key: self.arrays[f"{path}/{key}"].copy() for key in self.arrays_below(path)}
        return join_state(copy.deepcopy(self.state[path]), arrays)


@dataclass(frozen=True)
class Waiting:
    """Fills the children that an object gets later, where it stood at the path `prefix`."""

    restoration: Restoration
    prefix: str

    def __call__(self, name: str, child: object, of: object) -> None:
        """Fill `child`. Local."""
        self.restoration.fill_new_child(self.prefix, name, child, of)

    def missing_below(self, prefix: str) -> dict[str, tuple[str, str]]:
        """Return what waits for an object that stands at `prefix` now: by path, kind and file."""
        if self.restoration.is_partial:
            return {}
        return {
            f"{prefix}/{rest}" if prefix else rest: (of, self.restoration.path)
            for path, of in self.restoration.left().items()
            if (rest := _below(path, self.prefix)) is not None
        }


def _ids(variables: dict[str, Variable]) -> set[int]:
    return {id(variable) for variable in variables.values()}


def check_nothing_waits(what: str, root: Trackable, tree: Tree) -> None:
    """Refuse to save while restored values wait for objects below `root`, whose `tree` it is."""
    waiting: dict[str, tuple[str, str]] = {}
    for prefix, trackable in {"": root, **tree.trackables}.items():  # parents come first
        hook = trackable.on_new_child
        if isinstance(hook, Waiting):
            # What it waits for itself counts, not what an object above expects for it.
            waiting = {path: each for path, each in waiting.items() if _below(path, prefix) is None}
            waiting |= hook.missing_below(prefix)
    if waiting:
        lines = [f"  {path} ({of}) from {file}" for path, (of, file) in sorted(waiting.items())]
        raise CheckpointError(
            f"{what}: restored values still wait for their objects, and would be missing in the "
            "new file:\n" + "\n".join(lines) + "\nAttach these objects first, or call "
            "expect_partial() on the status of Checkpoint.restore() where this is meant."
        )


def _below(path: str, prefix: str) -> str | None:
    """Return the rest of `path` below `prefix`, ``None`` if it lies elsewhere."""
    if not prefix:
        return path
    return path.removeprefix(f"{prefix}/") if path.startswith(f"{prefix}/") else None
