"""The iterator that tf.distribute keeps for programs of its version 1."""

from __future__ import annotations

from typing import Any

from mpistrat.data.iterators import Optional
from mpistrat.errors import OutOfRangeError

__all__ = ["InputIterator"]


class InputIterator:
    """An iterator that starts again when it is initialised.

    Parameters
    ----------
    dataset : iterable
        A distributed data set, or a plain one under the default strategy.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        # Made by the first get_next, so that initialising a new iterator skips no pass.
        self._iterator: Any = None

    def initialize(self) -> None:
        """Start the next pass, or the first one. Local."""
        self._iterator = None

    def get_next(self) -> Any:
        """Return the next element.

        Raises
        ------
        OutOfRangeError
            Past the end.
        """
        element = self.get_next_as_optional()
        if not element.has_value():
            raise OutOfRangeError("The pass has ended. Call initialize() for the next.")
        return element.get_value()

    def get_next_as_optional(self) -> Optional:
        """Return an `Optional` with the next element, without one at the end of the pass."""
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        try:
            return Optional(next(self._iterator))
        except StopIteration:
            return Optional()
