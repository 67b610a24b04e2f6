"""Paths of children that belong to a variable, such as the slots of an optimizer.

``optimizer/momentum/model/layers/0/kernel`` is the momentum of ``model/layers/0/kernel``: the
path says which variable it is in every program that saves the same tree. Names of variables
could not, because two variables may share one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mpistrat.tracking import Dependent

__all__ = ["PlacedDependent", "find_paths", "part_of_name"]

PlacedDependent = tuple[str, Dependent]
"""A dependent child, after the path of the object that keeps it."""


def find_paths(
    dependents: Iterable[PlacedDependent], variables: Mapping[str, Any]
) -> tuple[dict[str, PlacedDependent], dict[str, PlacedDependent]]:
    """Return `dependents` by path, and those of them whose variable is in no checkpoint. Local.

    The latter have the name of their variable in place of its path.

    Parameters
    ----------
    dependents : iterable of (str, Dependent)
    variables : dict of str to Variable
        By path. The first path of a variable counts.

    Raises
    ------
    ValueError
        If two would have the same path.
    """
    paths = {id(variable): path for path, variable in reversed(list(variables.items()))}
    found: dict[str, PlacedDependent] = {}
    outside: dict[str, PlacedDependent] = {}
    for prefix, dependent in dependents:
        of: Any = dependent.of
        below = paths.get(id(of))
        if below is None:
            below = part_of_name(of.name)
        path = "/".join(part for part in (prefix, dependent.name, below) if part)
        if path in found:
            raise ValueError(
                f"Two objects have the path {path!r} in the checkpoint, because they belong to "
                f"variables called {of.name!r} that are not in it themselves. Add these variables "
                "to the checkpoint, or give each a name of its own."
            )
        found[path] = prefix, dependent
        if id(of) not in paths:
            outside[path] = prefix, dependent
    return found, outside


def part_of_name(name: str) -> str:
    """Return the name of a variable as one part of a path: percent-encoded as in URLs. Local.

    ``dense/kernel`` is ``dense%2Fkernel``, so that variables called ``dense`` and
    ``dense/kernel`` can stand side by side in a file. `urllib.parse.unquote` brings a name back.
    """
    part = name.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    # HDF5 has no name for these two.
    return {"": "%", ".": "%2E"}.get(part, part)
