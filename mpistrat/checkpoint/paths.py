"""Check the paths that a user gives, on all ranks."""

from __future__ import annotations

import os

from mpistrat.arguments import as_bool
from mpistrat.collectives import Collectives

__all__ = ["agree_on_path", "checked_path"]


def agree_on_path(
    ranks: Collectives, what: str, path: str | os.PathLike[str], **switches: bool
) -> str:
    """Return `path` as a string, once all ranks have given the same. **Collective**.

    Parameters
    ----------
    ranks : Collectives
    what : str
        The public function, for messages.
    path : path
    **switches : bool
        What else must be equal, by the name of the argument.

    Raises
    ------
    TypeError, ValueError
        As `checked_path` and `as_bool`, where it is bad on this rank.
    EpochMismatchError
        If it is bad on another rank, or differs there.
    """
    with ranks.call(what) as call:
        checked = checked_path(what, path)
        for name, value in switches.items():
            switches[name] = as_bool(name, value)
        call.agree(checked, switches)
    return checked


def checked_path(what: str, path: str | os.PathLike[str]) -> str:
    """Return `path` as a string, exactly as it is. Local.

    Raises
    ------
    TypeError
        If it is neither a string nor a path.
    ValueError
        If it is empty, or contains a zero byte.
    """
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(name, str):
        raise TypeError(f"{what} needs a path as a string or pathlib.Path, not {path!r}.")
    if not name or "\0" in name:
        raise ValueError(f"{what} needs a path, but {name!r} is none.")
    return name
