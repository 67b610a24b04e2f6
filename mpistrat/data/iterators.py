"""Iterators over data sets."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from mpistrat.errors import OutOfRangeError
from mpistrat.spans import span

__all__ = ["ElementIterator", "Optional"]

_NOTHING = object()


class Optional:
    """An element, or nothing."""

    def __init__(self, value: Any = _NOTHING) -> None:
        self._value = value

    def has_value(self) -> bool:
        """Return whether there is an element. Local."""
        return self._value is not _NOTHING

    def get_value(self) -> Any:
        """Return the element. Local.

        Raises
        ------
        OutOfRangeError
            If there is none.
        """
        if self._value is _NOTHING:
            raise OutOfRangeError("The pass had ended: there is no value. Ask has_value() first.")
        return self._value


class ElementIterator:
    """One pass over a data set.

    Of a distributed one, every rank must take the same number of elements. Taking one is
    **Local** where the lengths of all ranks' data are known, and **Collective** where they are
    not, as for generators given to `distribute_datasets_from_function`.
    """

    def __init__(
        self, elements: Generator[Any, None, None], on_step: Callable[[bool], None]
    ) -> None:
        self._elements = elements
        self._on_step = on_step

    def __iter__(self) -> ElementIterator:
        return self

    def __next__(self) -> Any:
        try:
            with span("data", "next batch"):
                element = next(self._elements)
        except StopIteration:
            self._on_step(False)
            raise
        self._on_step(True)
        return element

    def close(self) -> None:
        """End the pass early: close files and end threads. Local."""
        self._elements.close()

    def get_next(self) -> Any:
        """Return the next element.

        Raises
        ------
        OutOfRangeError
            If there is none.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError(
                "The iterator has no further element: the pass has ended. Make a new iterator "
                "with iter(...) for the next pass."
            ) from None

    def get_next_as_optional(self) -> Optional:
        """Return an `Optional` with the next element, without one at the end of the pass."""
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()
