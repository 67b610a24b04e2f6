"""What a restore still holds for objects that are not there yet, on its way into a new file.

A program may save before it has made every object: what waits for these would else be lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrat.checkpoint.objects import Tree
from mpistrat.checkpoint.restoration import Restoration, Waiting
from mpistrat.tracking import Trackable

__all__ = ["Carried", "carried_below"]


@dataclass
class Carried:
    """Values of a file without their objects, by path."""

    variables: dict[str, tuple[np.ndarray, dict[str, Any]]] = field(default_factory=dict)
    """With synchronization, aggregation and trainability."""
    states: dict[str, tuple[dict[str, Any], list[str]]] = field(default_factory=dict)
    """With the paths of the arrays below each."""

    def _drop_below(self, prefix: str) -> None:
        for values in (self.variables, self.states):
            for path in [path for path in values if _is_below(path, prefix)]:
                del values[path]

    def _add(self, restoration: Restoration, old_prefix: str, prefix: str) -> None:
        for path, array in restoration.arrays.items():
            if _is_below(path, old_prefix):
                modes = restoration.modes.get(path, {})
                self.variables[_moved(path, old_prefix, prefix)] = array, modes
        for path, state in restoration.state.items():
            if _is_below(path, old_prefix):
                arrays = restoration.arrays_below(path)
                self.states[_moved(path, old_prefix, prefix)] = state, arrays

    def _leave_room_for(self, tree: Tree) -> None:
        """Drop what objects of `tree` have by now, in one way or another."""
        own = set(tree.paths())
        above = {each for path in own for each in _parents(path)}
        for values in (self.variables, self.states):
            for path in [*values]:
                if path in own or path in above or own.intersection(_parents(path)):
                    del values[path]


def carried_below(root: Trackable, tree: Tree) -> Carried:
    """Return what restores still hold for `root` and for the objects of its `tree`. Local.

    Nothing of a restore whose status has been told ``expect_partial()``.
    """
    carried = Carried()
    for prefix, trackable in {"": root, **tree.trackables}.items():  # parents come first
        waiting = trackable.on_new_child
        if isinstance(waiting, Waiting):
            carried._drop_below(prefix)  # its own restore was a later one
            if not waiting.restoration.is_partial:
                carried._add(waiting.restoration, waiting.prefix, prefix)
    carried._leave_room_for(tree)
    return carried


def _is_below(path: str, prefix: str) -> bool:
    return not prefix or path.startswith(f"{prefix}/")


def _moved(path: str, old_prefix: str, prefix: str) -> str:
    below = path.removeprefix(f"{old_prefix}/") if old_prefix else path
    return f"{prefix}/{below}" if prefix else below


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts))]
