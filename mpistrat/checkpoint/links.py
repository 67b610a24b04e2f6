"""Walk the groups of a checkpoint file without following a link out of the tree."""

from __future__ import annotations

from typing import Any

from mpistrat.hdf5 import h5py

__all__ = ["check_root", "find_datasets"]


def check_root(file: Any, names: set[str]) -> None:
    """Refuse a file whose root group has other members than `names`. Local.

    Raises
    ------
    ValueError
        If it has; the message names them.
    """
    unknown = sorted(set(file) - names)
    if unknown:
        raise ValueError(f"{', '.join(unknown)} does not belong into a checkpoint")


def find_datasets(file: Any, root: str) -> dict[str, Any]:
    """Return the data sets below the group `root` by path, sorted. Local.

    Raises
    ------
    KeyError
        If there is no such group.
    ValueError
        If anything but groups and data sets, each under one name, is found there.
    """
    found = {}
    addresses: set[int] = set()
    stack = [(root, file, root)]
    while stack:
        path, parent, name = stack.pop()
        node = _follow(parent, name, path)
        address = h5py().h5o.get_info(node.id).addr
        if address in addresses:
            raise ValueError(f"{path} is a second name of something else")
        addresses.add(address)
        if isinstance(node, h5py().Group):
            stack += [(f"{path}/{child}", node, child) for child in node]
        elif isinstance(node, h5py().Dataset) and path != root:
            found[path.removeprefix(f"{root}/")] = node
        else:
            raise ValueError(f"{path} is neither a group nor a data set")
    return dict(sorted(found.items()))


def _follow(parent: Any, name: str, path: str) -> Any:
    link = parent.get(name, getlink=True)
    if link is None:
        raise KeyError(f"there is no group {path}")
    if not isinstance(link, h5py().HardLink):
        raise ValueError(f"{path} is a link to another place, which is never followed")
    return parent[name]
