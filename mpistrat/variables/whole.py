"""Whole values of variables in parts, which come to rank 0 in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.collectives import Collectives
from mpistrat.variables.variable import Variable

__all__ = ["BYTES_PER_PIECE", "SavedInPieces"]

BYTES_PER_PIECE = 2**22
"""Of what comes to rank 0 at once."""


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
