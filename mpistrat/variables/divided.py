"""Division of the elements of a flat value among the ranks."""

from __future__ import annotations

import math
from typing import Any

from mpistrat.arrays import Array, namespace_of
from mpistrat.values import IndexedSlices
from mpistrat.variables.routing import Partition

__all__ = ["DividedElements"]


class DividedElements:
    """Mixin of variables each rank of which updates some elements, whatever the shape."""

    _partition: Partition

    @property
    def elements_of_ranks(self) -> tuple[range, ...]:
        """Which elements of the flat value each rank updates."""
        return self._partition.ranges

    def _own_elements_of(self, value: Any, own: range) -> Any:
        """Return those of a `value` of the whole, or of checked slices."""
        if not isinstance(value, IndexedSlices):
            return value.reshape(-1)[own.start : own.stop]
        indices, values = self.elements_of(value), value.values.reshape(-1)
        mine = (indices >= own.start) & (indices < own.stop)
        return IndexedSlices(values[mine], indices[mine] - own.start)

    def elements_of(self, slices: IndexedSlices) -> Array:
        """Return the numbers of the elements of the flat value that checked `slices` are."""
        size = math.prod(slices.values.shape[1:])
        numbers = namespace_of(slices.indices).arange(size)
        elements: Array = (slices.indices[:, None] * size + numbers).reshape(-1)
        return elements
