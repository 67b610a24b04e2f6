"""Walk a tree of objects and give each piece of state its path.

Attribute names and dict keys are joined by ``/``, list items count by number:
``model/layers/0/kernel``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from mpistrat.arrays import is_array
from mpistrat.checkpoint.dependents import PlacedDependent, find_paths
from mpistrat.checkpoint.format import check_path
from mpistrat.checkpoint.generators import generator_state
from mpistrat.tracking import Trackable
from mpistrat.values import DistributedValues
from mpistrat.variables import Variable

__all__ = ["Stateful", "Tree", "check_can_hold_state", "walk"]


@runtime_checkable
class Stateful(Protocol):
    """An object that gives and takes its own state, of arrays and JSON values."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Take over a state that `state_dict` returned."""


@dataclass
class Tree:
    """What a walk has found, by path."""

    variables: dict[str, Variable] = field(default_factory=dict)
    stateful: dict[str, Stateful] = field(default_factory=dict)
    trackables: dict[str, Trackable] = field(default_factory=dict)
    """Objects that may get children later."""
    empty: list[str] = field(default_factory=list)
    """Plain objects without any state below them."""
    outside: dict[str, PlacedDependent] = field(default_factory=dict)
    """Children of variables that are not in the tree. Their paths have the variables' names."""

    def paths(self) -> list[str]:
        """Return the paths of all variables and stateful objects. Local."""
        return [*self.variables, *self.stateful]


def walk(
    objects: Mapping[str, object],
    prefix: str = "",
    dependents: Sequence[PlacedDependent] = (),
    known: Mapping[str, Variable] | None = None,
) -> Tree:
    """Return the state below `objects`, whose names follow `prefix`. Local.

    Variables, trackables, generators and objects with ``state_dict()`` are found in dicts,
    lists, tuples, and in the attributes of other objects, whose other attributes are left out.

    Parameters
    ----------
    objects : dict of str to object
    prefix : str
    dependents : sequence of (str, Dependent)
        To be taken in too.
    known : dict of str to Variable
        Variables elsewhere in the checkpoint, by path, that dependents may belong to.

    Raises
    ------
    TypeError
        If a dict, list or tuple holds something that is no state.
    ValueError
        If two objects would have the same path, or one of them a path below another's.
    """
    walker = _Walker()
    for name, child in objects.items():
        walker.visit(_join(prefix, name), child, strict=True)
    walker.take_in([*dependents, *walker.dependents], known or {})
    _check_disjoint(walker.tree.paths())
    return walker.tree


def check_can_hold_state(path: str, child: object) -> None:
    """Refuse an object that a checkpoint can never save or fill.

    Raises
    ------
    TypeError
        For numbers, arrays, strings, functions and the like.
    """
    if _has_own_state(child) or isinstance(child, dict | list | tuple) or _is_plain(child):
        return
    raise TypeError(
        f"A checkpoint cannot save {path!r}, a {type(child).__name__}: it takes variables, "
        "optimizers, metrics, datasets, random generators, and dicts and lists of them. Wrap a "
        "number or an array as ms.Variable(...), or give an object with state_dict() and "
        "load_state_dict()."
    )


def _has_own_state(child: object) -> bool:
    if isinstance(child, type):
        return False
    if isinstance(child, Variable | Trackable | Stateful):
        return True
    return generator_state(child) is not None


def _is_plain(child: object) -> bool:
    """Return whether `child` is an object of the user's own, with attributes to walk."""
    if is_array(child) or isinstance(
        child,
        type
        | types.ModuleType
        | types.FunctionType
        | types.MethodType
        | functools.partial
        | BaseException
        | DistributedValues,
    ):
        return False
    # Our own objects show their state; a strategy that a model keeps is no part of it.
    if type(child).__module__.partition(".")[0] == "mpistrat":
        return False
    return hasattr(child, "__dict__")


class _Walker:
    def __init__(self) -> None:
        self.tree = Tree()
        self.ancestors: set[int] = set()
        self.dependents: list[PlacedDependent] = []

    def take_in(self, dependents: Sequence[PlacedDependent], known: Mapping[str, Variable]) -> None:
        """Visit children that belong to variables, once the paths of these are known."""
        found, self.tree.outside = find_paths(dependents, {**known, **self.tree.variables})
        for path, (_, dependent) in found.items():
            self.visit(path, dependent.child, strict=True)

    def visit(self, path: str, child: object, strict: bool) -> None:
        """Take in `child`; where `strict`, it must be able to hold state."""
        if isinstance(child, Variable):
            self.add(self.tree.variables, path, child)
        elif isinstance(child, Trackable):
            self.tree.trackables[path] = child
            self.dependents += [(path, each) for each in child.checkpoint_dependents()]
            self.descend(path, child, child.checkpoint_children().items(), strict=True)
        elif (generator := generator_state(child)) is not None:
            self.add(self.tree.stateful, path, generator)
        elif _has_own_state(child):
            self.add(self.tree.stateful, path, child)
        elif isinstance(child, dict):
            self.descend(path, child, child.items(), strict)
        elif isinstance(child, list | tuple):
            self.descend(path, child, enumerate(child), strict)
        elif _is_plain(child):
            before = len(self.tree.paths())
            self.descend(path, child, vars(child).items(), strict=False)
            if strict and len(self.tree.paths()) == before:
                self.tree.empty.append(path)
        elif strict:
            check_can_hold_state(path, child)

    def descend(
        self, path: str, parent: object, children: Iterable[tuple[Any, Any]], strict: bool
    ) -> None:
        if id(parent) in self.ancestors:  # a reference back up, as from a layer to its model
            return
        self.ancestors.add(id(parent))
        for name, child in children:
            self.visit(_join(path, str(name)), child, strict)
        self.ancestors.discard(id(parent))

    def add(self, found: dict[str, Any], path: str, child: object) -> None:
        check_path(path)
        if path in self.tree.variables or path in self.tree.stateful:
            raise ValueError(
                f"Two objects have the path {path!r} in the checkpoint. Rename one of them."
            )
        found[path] = child


def _check_disjoint(paths: list[str]) -> None:
    known = set(paths)
    for path in paths:
        parts = path.split("/")
        for length in range(1, len(parts)):
            above = "/".join(parts[:length])
            if above in known:
                raise ValueError(
                    f"{above!r} and {path!r} cannot both be saved: the first would be a file "
                    "entry and a folder at once. Rename one of them."
                )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name
