"""Slots that an optimizer makes at its next step, as a restore finds or makes them.

What a restore leaves behind depends on the file alone: slots that the file has are made at once,
and those that it lacks start again from zero, as they would in a new program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mpistrat.checkpoint.dependents import find_paths
from mpistrat.checkpoint.objects import Tree
from mpistrat.tracking import Dependent, Trackable
from mpistrat.variables import Variable

__all__ = ["LateChild", "attach_children", "fresh_children", "late_children", "make_children"]


@dataclass(frozen=True)
class LateChild:
    """A child that `owner` has for the variable `of`, or will have."""

    owner: Trackable
    owner_path: str
    name: str
    of: Variable
    of_path: str | None
    """``None`` where `of` is in no checkpoint."""
    make: Callable[[Any], Any]
    """Called with `of`."""

    @property
    def key(self) -> tuple[int, str, int]:
        """Equal where one child has several paths."""
        return id(self.owner), self.name, id(self.of)


def late_children(tree: Tree) -> dict[str, LateChild]:
    """Return what each variable of `tree` has or will have, by path. Local."""
    own = {id(variable): path for path, variable in reversed(list(tree.variables.items()))}
    found = {}
    for owner_path, owner in tree.trackables.items():
        for name, make in owner.late_dependents().items():
            dependents = [
                (owner_path, Dependent(name, None, tree.variables[path])) for path in own.values()
            ]
            places = {**tree.outside, **find_paths(dependents, tree.variables)[0]}
            for path, place in places.items():
                of: Any = place[1].of
                if place[0] == owner_path and place[1].name == name:
                    found[path] = LateChild(owner, owner_path, name, of, own.get(id(of)), make)
    return found


def make_children(
    late: Mapping[str, LateChild], tree: Tree, stored: Collection[str]
) -> dict[str, Variable]:
    """Return, by path, new children for what only the file has. **Collective**."""
    made: dict[tuple[int, str, int], Variable] = {}
    by_path = {}
    for path, each in late.items():
        if path in stored and path not in tree.variables:
            if each.key not in made:
                made[each.key] = each.make(each.of)
            by_path[path] = made[each.key]
    return by_path


def attach_children(late: Mapping[str, LateChild], made: Mapping[str, Variable]) -> None:
    """Give the owners the children that have been `made`, as they are. Local."""
    for path, child in {id(child): (path, child) for path, child in made.items()}.values():
        late[path].owner.on_new_child = None
        late[path].owner.attach_child(late[path].name, child, of=late[path].of)


def fresh_children(
    late: Mapping[str, LateChild], tree: Tree, stored: Collection[str]
) -> dict[str, Variable]:
    """Return the children that the program which wrote the file did not have yet. Local."""
    owners = {each.owner_path for each in late.values()}
    owners = {owner for owner in owners if any(each.startswith(f"{owner}/") for each in stored)}
    return {
        path: tree.variables[path]
        for path, each in late.items()
        if path in tree.variables
        and path not in stored
        and (each.of_path is None or each.of_path in stored)
        and each.owner_path in owners
    }
