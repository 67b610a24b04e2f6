"""Trackable objects, whose named children a checkpoint saves and restores, even late ones."""

from __future__ import annotations

import enum
import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mpistrat.arrays import is_array
from mpistrat.pytorch import is_tensor
from mpistrat.system import units


@dataclass(frozen=True, eq=False)
class Dependent:
    """A child that belongs to a different object, like an optimizer's momentum to a variable."""

    name: str
    """First part of the child's path. The path of `of` in the checkpoint follows."""
    child: object
    of: object


_OnNewChild = Callable[[str, object, object], None]
"""Called with the name of a new child, the child, and the object that it depends on or ``None``."""


class Trackable:
    """Base of objects whose state is the state of their children.

    A child is a variable, another trackable, or anything with ``state_dict()`` and
    ``load_state_dict()``. Its name may contain ``/``.
    """

    def __init__(self) -> None:
        self._children: dict[str, object] = {}
        self._dependents: list[Dependent] = []
        self._on_new_child: _OnNewChild | None = None
        """Called with each new child before it is added."""

    def _checkpoint_children(self) -> dict[str, object]:
        """Return the children by name, without those that depend on a different object."""
        return dict(self._children)

    def _checkpoint_dependents(self) -> list[Dependent]:
        """Return the children that depend on a different object, in the order of their addition."""
        return list(self._dependents)

    def _deferred_slots(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return functions that create the children that a variable will get once needed."""
        # By name. Each is called with the variable, and returns the child without attaching it.
        # Until the child exists, the state of this object is that of a new one.
        return {}

    def _attach_child(self, name: str, child: object, *, of: object = None) -> None:
        """Add a child or a dependent; **Collective** if a restore waits for it."""
        # The restore fills the child first. If that raises, the child is not added.
        if self._on_new_child is not None:
            self._on_new_child(name, child, of)
        if of is None:
            self._children[name] = child
        else:
            self._dependents.append(Dependent(name, child, of))
        units.on_undo(functools.partial(self._detach_last, name, of))

    def _detach_last(self, name: str, of: object) -> None:
        """Remove the child or dependent that was added last."""
        if of is None:
            self._children.pop(name, None)
        else:
            self._dependents.pop()


class Reach(enum.Enum):
    """How a traversal has reached an object."""

    GIVEN = enum.auto()
    """Only through dicts, lists and tuples."""
    CHILD = enum.auto()
    """As a child of a trackable, or inside a child that is a dict, list or tuple."""
    ATTRIBUTE = enum.auto()
    """Through an attribute of an object, which may have other attributes of any kind."""


def walk_objects(
    path: str,
    thing: object,
    is_leaf: Callable[[object], bool],
    reach: Reach = Reach.GIVEN,
    above: tuple[int, ...] = (),
) -> Iterator[tuple[str, Any, Reach]]:
    """Yield `thing` and the objects below it, parents first, unless `is_leaf` says to stop."""
    # "Below" are children of trackables, items of containers, and attributes of other objects.
    # Their names are joined to paths by `/`. The caller handles dependents.
    yield path, thing, reach
    if id(thing) in above or is_leaf(thing):  # a reference back up, as from a layer to its model
        return
    children: Iterable[tuple[Any, Any]]
    if isinstance(thing, Trackable):
        children, reach = thing._checkpoint_children().items(), Reach.CHILD
    elif isinstance(thing, dict):
        children = thing.items()
    elif isinstance(thing, list | tuple | deque):
        children = enumerate(thing)
    elif has_attributes(thing):
        children, reach = _attributes(thing).items(), Reach.ATTRIBUTE
    else:
        return
    for name, child in children:
        below = f"{path}/{name}" if path else str(name)
        yield from walk_objects(below, child, is_leaf, reach, (*above, id(thing)))


def has_attributes(thing: object) -> bool:
    """Return whether `thing` is an object of a user's class, with attributes to traverse."""
    if (
        is_array(thing)
        or is_tensor(thing)
        or isinstance(
            thing,
            type
            | types.ModuleType
            | types.FunctionType
            | types.MethodType
            | functools.partial
            | BaseException,
        )
    ):
        return False
    # Objects of mpistrat show their state; a strategy that a model keeps is not part of it.
    is_ours = type(thing).__module__.partition(".")[0] == "mpistrat"
    return not is_ours and (hasattr(thing, "__dict__") or hasattr(type(thing), "__slots__"))


def _attributes(thing: object) -> dict[str, Any]:
    """Return the attributes of `thing` itself, including those in ``__slots__``."""
    found = {
        name: getattr(thing, name)
        for kind in type(thing).__mro__
        if "__slots__" in vars(kind)
        for name, member in vars(kind).items()
        if isinstance(member, types.MemberDescriptorType) and hasattr(thing, name)
    }
    return {**found, **getattr(thing, "__dict__", {})}
