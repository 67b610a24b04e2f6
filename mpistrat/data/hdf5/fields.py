"""Fields of HDF5 files: paths, patterns of names, attributes and sample axes."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mpistrat import hdf5, nests
from mpistrat.arguments import as_integer

_DIGITS = re.compile(r"[0-9]+")
_MAX_SHOWN = 8
_LAST = 0x10FFFF


def natural_key(name: str) -> str:
    """Return a sort key: digits compare as numbers, equal numbers and all else by code point."""
    return _DIGITS.sub(_number_key, name)


def _number_key(match: re.Match[str]) -> str:
    # The key begins with "0", so that it compares with other characters as digits do. Then follow
    # the length of the number, the number itself and, to order equal ones, its leading zeros.
    digits = match[0]
    number = digits.lstrip("0")
    zeros = len(digits) - len(number)
    return f"0{chr(len(number))}{number}{chr(_LAST - zeros if number else zeros)}"


def _regex(part: str) -> re.Pattern[str]:
    pieces = map(re.escape, re.split(r"\*+", part))
    return re.compile(".*".join(pieces), re.DOTALL)


def names_in(group: Any) -> list[str]:
    """Return the names of the links of a low-level group."""
    names: list[bytes] = []
    group.links.iterate(names.append)  # append returns None, so HDF5 continues
    return [name.decode("utf-8", "surrogateescape") for name in names]


class _PatternGroup:
    """A group that is searched for the last pattern of a path, and the names that match there."""

    def __init__(self, group: Any, before: tuple[str, ...], names: list[str]) -> None:
        self.group = group
        self.before = before
        """The names that match the earlier patterns of the path."""
        self.names = names


def groups_of_pattern(root: Any, parts: Sequence[str]) -> Iterator[_PatternGroup]:
    """Yield the groups below `root`, with the matches of the last pattern among `parts`."""
    places = [number for number, part in enumerate(parts) if "*" in part]
    yield from _search(root, parts[: places[-1] + 1], ())


def _search(group: Any, parts: Sequence[str], before: tuple[str, ...]) -> Iterator[_PatternGroup]:
    literal = list(itertools.takewhile(lambda part: "*" not in part, parts))
    if literal:
        group = _group_at(group, "/".join(literal))
        if group is None:
            return
    pattern, *rest = parts[len(literal) :]
    regex = _regex(pattern)
    names = sorted(filter(regex.fullmatch, names_in(group)), key=natural_key)
    if not rest:
        yield _PatternGroup(group, before, names)
        return
    for name in names:
        inner = object_at(group, name)
        if inner is None:
            raise DanglingLink(name)
        if isinstance(inner, hdf5.h5py().h5g.GroupID):
            yield from _search(inner, rest, (*before, name))


class DanglingLink(Exception):
    """Raised if a name matches a pattern, but is a link to a missing object."""


def object_at(group: Any, path: str) -> Any:
    """Return the low-level object at `path`, ``None`` if there is none."""
    try:
        return hdf5.h5py().h5o.open(group, encoded(path))
    except (KeyError, OSError, RuntimeError, ValueError):
        return None


def link_leads_nowhere(group: Any, path: str) -> bool:
    """Return whether a path reaches a link without an object, rather than a missing name."""
    for name in path.split("/"):
        is_group = isinstance(group, hdf5.h5py().h5g.GroupID)
        if not is_group or not group.links.exists(encoded(name)):
            return False
        group = object_at(group, name)
        if group is None:
            return True
    return False


def encoded(path: str) -> bytes:
    """Return a path in the encoding of HDF5."""
    return path.encode("utf-8", "surrogateescape")


def _group_at(group: Any, path: str) -> Any:
    found = object_at(group, path)
    return found if isinstance(found, hdf5.h5py().h5g.GroupID) else None


def matches_path(parts: Sequence[str], names: Sequence[str]) -> str:
    """Return the path with `names` in place of the parts that have a pattern."""
    following = iter(names)
    return "/".join(next(following) if "*" in part else part for part in parts)


def what_is_there(root: Any, parts: Sequence[str]) -> str:
    """Return some names that exist in the group in which a pattern finds nothing."""
    group, path = root, ""
    for part in parts:
        names = names_in(group)
        matching = sorted(filter(_regex(part).fullmatch, names), key=natural_key)
        inner = next(((n, g) for n in matching if (g := _group_at(group, n)) is not None), None)
        if inner is None:
            break
        path, group = f"{path}/{inner[0]}", inner[1]
    names = sorted(names_in(group), key=natural_key)
    shown = ", ".join(map(repr, names[:_MAX_SHOWN])) or "nothing"
    shown += f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return f"{path or '/'} has {shown}"


@nests.leaf_type
@dataclass(frozen=True)
class Field:
    """One field of the examples that `Dataset.from_hdf5` reads.

    Parameters
    ----------
    path : str
        Path of a dataset whose rows are the examples, or of a member of a compound dataset
        (``"events/t"``, also nested). ``*`` stands for any characters within one name. With it,
        each match is one example, in natural order: ``demo_2`` before ``demo_10``.
    attribute : str, optional
        Name of an attribute to read from each match. Without ``*`` every example gets the same
        value. Default: read the data, not an attribute.
    axis : int
        The axis of the dataset that counts examples, for paths without ``*``. Negative numbers
        count from the last axis.

    Raises
    ------
    TypeError, ValueError
        If `path` or `attribute` is not a string or is empty, or if `axis` is not an integer or
        has no meaning for this path.

    Examples
    --------
    >>> ms.data.Field("data/demo_*", attribute="label")
    Field('data/demo_*', attribute='label')
    >>> ms.data.Field("trials", axis=-1)
    Field('trials', axis=-1)
    """

    path: str
    attribute: str | None = dataclasses.field(default=None, kw_only=True)
    axis: int = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        for name, text in (("path", self.path), ("attribute", self.attribute)):
            if name == "attribute" and text is None:
                continue
            if not isinstance(text, str):
                raise TypeError(f"Field: {name} must be a str, not {text!r}.")
            if not text or "\0" in text:
                raise ValueError(f"Field: {name} must be a name, not {text!r}.")
        object.__setattr__(self, "axis", as_integer("axis", self.axis, -(2**31)))
        if self.axis and (has_pattern(self) or self.attribute is not None):
            what = "an attribute" if self.attribute is not None else "a path with *"
            raise ValueError(
                f"Field: axis={self.axis} with {what} has no meaning: each match is one example. "
                "Leave it out."
            )

    def __repr__(self) -> str:
        attribute = "" if self.attribute is None else f", attribute={self.attribute!r}"
        axis = f", axis={self.axis}" if self.axis else ""
        return f"Field({self.path!r}{attribute}{axis})"


def has_pattern(field: Field) -> bool:
    """Return whether the path has a ``*``, so that each match is an example."""
    return "*" in field.path


def shown(field: Field) -> str:
    """Return the name of a field for error messages: only its path if it has nothing else."""
    is_path = field.attribute is None and not field.axis
    return repr(field.path) if is_path else repr(field)


def as_field(value: Any) -> Field:
    """Return `value` if it is a `Field`, else the field with this path."""
    return value if isinstance(value, Field) else Field(value)


def parts_of(path: str) -> list[str]:
    """Return the names of a path, without the empty ones and ``.``, which HDF5 ignores."""
    return [part for part in path.split("/") if part not in ("", ".")]
