"""Objects with named children, which a checkpoint saves and fills, also those made later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Dependent", "OnNewChild", "Trackable"]


@dataclass(frozen=True, eq=False)
class Dependent:
    """A child that belongs to another object, as an optimizer's momentum does to a variable."""

    name: str
    """First part of its path. The path of `of` in the checkpoint follows."""
    child: object
    of: object


OnNewChild = Callable[[str, object, object], None]
"""Called with the name of a new child, the child, and what it depends on or ``None``."""


class Trackable:
    """Base of objects whose state is that of their children.

    A child is a variable, another trackable, or anything with ``state_dict()`` and
    ``load_state_dict()``. Its name may contain ``/``.
    """

    def __init__(self) -> None:
        self._children: dict[str, object] = {}
        self._dependents: list[Dependent] = []
        self.on_new_child: OnNewChild | None = None
        """Called with each child made from now on, before it is added."""

    def checkpoint_children(self) -> dict[str, object]:
        """Return the children by name, without those that depend on another object. Local."""
        return dict(self._children)

    def checkpoint_dependents(self) -> list[Dependent]:
        """Return the children that depend on another object, in the order they came in. Local."""
        return list(self._dependents)

    def late_dependents(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return what makes the children that a variable will get once it needs them. Local.

        By name: each is called with the variable, and returns the child without attaching it.
        Until the child is there, the state of this object is that of a new one.
        """
        return {}

    def attach_child(self, name: str, child: object, *, of: object = None) -> None:
        """Add a child; a restore that was waiting for it fills it first.

        **Collective** where such a restore is waiting, else **Local**. If the child refuses what
        the restore has for it, that error is raised and the child is not added.

        Parameters
        ----------
        name : str
        child : object
        of : Variable, optional
            What the child belongs to: in a checkpoint its path is `name` and the path of `of`
            there, whatever the two are called.
        """
        if self.on_new_child is not None:
            self.on_new_child(name, child, of)
        if of is None:
            self._children[name] = child
        else:
            self._dependents.append(Dependent(name, child, of))
