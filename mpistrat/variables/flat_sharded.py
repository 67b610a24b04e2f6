"""Variables whose elements are divided among the ranks, whatever their shape."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from mpistrat.arrays import Array, namespace_of
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.variables.divided import DividedElements
from mpistrat.variables.initial import InitialValue
from mpistrat.variables.routing import Partition
from mpistrat.variables.sharded import ShardedVariable
from mpistrat.variables.writes import Write


class FlatShardedVariable(DividedElements, ShardedVariable):
    """A slot of an optimizer with ``sharded_slots=True``.

    The elements of the flat value are divided, so a scalar or a long row divides too. `part` is a
    1-d array of the elements `row_range`. Everything else is of the whole.
    """

    def _begin(
        self, call: CollectiveCall, initial: InitialValue
    ) -> tuple[np.ndarray, tuple[int, ...]]:
        initial.check()
        shape = initial.shape or ()
        num_elements, size = math.prod(shape), call.channel.size
        self._partition = Partition(num_elements, max(1, min(num_elements, size)), size)
        self._agree_on_parts(call, shape, initial.dtype)
        return np.zeros(len(self._partition.ranges[call.channel.rank]), initial.dtype), shape

    @property
    def _own_elements(self) -> range:
        return self._partition.ranges[self._collectives.rank]

    def lookup(self, ids: npt.ArrayLike) -> Array:
        """Return rows by their numbers, as `ShardedVariable.lookup` does. **Collective**."""
        rows = self._checked_rows(ids)
        whole = self.value()
        found: Array = whole[namespace_of(whole).asarray(rows)]
        return found

    def _gathered(self) -> np.ndarray:
        return super()._gathered().reshape(self.shape)

    def __getitem__(self, index: Any) -> Any:
        """Return ``value()[index]``. **Collective**."""
        return self.value()[index]

    def _own(self, value: Any) -> Any:
        return self._own_elements_of(value, self._own_elements)

    def _merge(self, call: CollectiveCall, write: Write, value: Any) -> Any:
        return self._own(write.merged(call, self._target, value))
