"""Fields of HDF5 files: paths, patterns of names, attributes and sample axes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mpistrat import nests
from mpistrat.arguments import as_integer


@nests.leaf_type
@dataclass(frozen=True)
class Field:
    """What `Dataset.from_hdf5` reads as one field of each example.

    Parameters
    ----------
    path : str
        A data set, whose rows are examples; or a member of a compound one (``"events/t"``, nested
        ones too). With ``*``, which stands for any characters within one name, each match is an
        example, in natural order: ``demo_2`` before ``demo_10``.
    attribute : str, optional
        The name of an attribute of each match. Without ``*`` every example gets the same value.
    axis : int
        Which axis of the data set counts examples, for paths without ``*``.

    Raises
    ------
    TypeError, ValueError
        If `path` or `attribute` is no text or empty, or `axis` no integer, or one that has no
        meaning there.

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
        if self.axis and (self._is_pattern or self.attribute is not None):
            what = "an attribute" if self.attribute is not None else "a path with *"
            raise ValueError(
                f"Field: axis={self.axis} with {what} has no meaning: each match is one example. "
                "Leave it out."
            )

    @property
    def _is_pattern(self) -> bool:
        return "*" in self.path

    @property
    def _text(self) -> str:
        """How errors name it: as it was written."""
        return repr(self.path) if self._is_path else repr(self)

    @property
    def _is_path(self) -> bool:
        return self.attribute is None and not self.axis

    def __repr__(self) -> str:
        attribute = "" if self.attribute is None else f", attribute={self.attribute!r}"
        axis = f", axis={self.axis}" if self.axis else ""
        return f"Field({self.path!r}{attribute}{axis})"


def as_field(value: Any) -> Field:
    """Return a field as it was given, a text as the field with this path."""
    return value if isinstance(value, Field) else Field(value)


def parts_of(path: str) -> list[str]:
    """Return the names of a path, as HDF5 reads it."""
    return [part for part in path.split("/") if part not in ("", ".")]
