"""Divided variables: which elements each rank has, and how the whole comes to rank 0."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpistrat.arrays import Array, namespace_of, taken
from mpistrat.collectives.collectives import Collectives
from mpistrat.values import IndexedSlices
from mpistrat.variables.routing import Partition
from mpistrat.variables.variable import Variable

BYTES_PER_PIECE = 2**22
"""Of what comes to rank 0 at once."""


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
        return IndexedSlices(taken(values, mine), indices[mine] - own.start)

    def elements_of(self, slices: IndexedSlices) -> Array:
        """Return the numbers of the elements of the flat value that checked `slices` are."""
        size = math.prod(slices.values.shape[1:])
        numbers = namespace_of(slices.indices).arange(size)
        elements: Array = (slices.indices[:, None] * size + numbers).reshape(-1)
        return elements


class SavedInPieces(Variable):
    """Base of variables of which no rank holds all."""

    @property
    def _ranks(self) -> Collectives:
        """The collectives of all ranks."""
        ranks: Collectives = self.strategy.extended._collectives
        return ranks

    @property
    def _elements_per_piece(self) -> int:
        return max(1, BYTES_PER_PIECE // self.dtype.itemsize)

    def _pieces_for_root(self) -> Iterator[np.ndarray | None]:
        """Yield the elements in their order, some at a time, on rank 0. **Collective**."""
        raise NotImplementedError

    def _save_value(self) -> Array | None:
        """Return the whole on rank 0, ``None`` elsewhere. **Collective**."""
        whole = np.empty(self.full_shape, self.dtype) if self._ranks.rank == 0 else None
        begin = 0
        for piece in self._pieces_for_root():
            if whole is not None and piece is not None:
                whole.reshape(-1)[begin : begin + piece.size] = piece
                begin += piece.size
        return whole
