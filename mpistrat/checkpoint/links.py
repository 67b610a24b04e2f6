"""Walk the groups of a file without following a link out of the tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mpistrat.checkpoint.format import is_path_part
from mpistrat.hdf5 import h5py

__all__ = ["Contents", "survey"]

_DEEPEST = 100
"""Levels of groups. HDF5 itself uses the stack for each, and can be made to overflow it."""


@dataclass
class Contents:
    """What the groups of a file hold."""

    datasets: dict[str, Any] = field(default_factory=dict)
    """The data sets by their full path."""
    groups: set[str] = field(default_factory=set)
    """The full paths of the groups, without the root group."""
    problems: list[str] = field(default_factory=list)
    """What no checkpoint has: links, second names, other kinds of objects."""

    def check(self, roots: set[str]) -> None:
        """Refuse what is no tree of data sets below the groups `roots`. Local.

        Raises
        ------
        KeyError
            If one of these groups is missing.
        ValueError
            If something else is there; the message names it.
        """
        if self.problems:
            raise ValueError("; ".join(self.problems))
        tops = {path.partition("/")[0] for path in (*self.groups, *self.datasets)}
        if tops - roots:
            raise ValueError(f"{', '.join(sorted(tops - roots))} does not belong into a checkpoint")
        for root in sorted(roots):
            if root not in self.groups:
                raise KeyError(f"there is no group {root}")

    def below(self, root: str) -> dict[str, Any]:
        """Return the data sets below the group `root` by their path there, sorted. Local."""
        inside = f"{root}/"
        found = {p: each for p, each in self.datasets.items() if p.startswith(inside)}
        return {path.removeprefix(inside): found[path] for path in sorted(found)}


def survey(file: Any) -> Contents:
    """Return what the groups of the open `file` hold, and follow no link. Local.

    Nothing is read but the groups themselves.
    """
    contents = Contents()
    h5 = h5py()
    addresses = {h5.h5o.get_info(file.id).addr}
    stack = [("", file.id, 1)]
    while stack:
        above, group, depth = stack.pop()
        for link in list(group):
            name = link.decode(errors="surrogateescape")
            path = above + name
            found = group.links.get_info(link)
            problem = _problem_of_link(found, name, depth)
            if problem:
                contents.problems.append(f"{path} {problem}")
                continue
            if found.u in addresses:
                contents.problems.append(f"{path} is a second name of something else")
                continue
            addresses.add(found.u)
            node = h5.h5o.open(group, link)
            if isinstance(node, h5.h5g.GroupID):
                contents.groups.add(path)
                stack.append((f"{path}/", node, depth + 1))
            elif isinstance(node, h5.h5d.DatasetID):
                contents.datasets[path] = h5.Dataset(node)
            else:
                contents.problems.append(f"{path} is neither a group nor a data set")
    return contents


def _problem_of_link(found: Any, name: str, depth: int) -> str:
    if not is_path_part(name):
        return "has a name that no object can have"
    if found.type != h5py().h5l.TYPE_HARD:
        return "is a link to another place, which is never followed"
    return f"lies below {_DEEPEST} groups" if depth > _DEEPEST else ""
