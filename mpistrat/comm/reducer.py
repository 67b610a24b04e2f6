"""What a way of reducing can do. Each buffer of a call gets the one that `choose` picks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from mpistrat.options import ReduceOp

__all__ = ["Reducer"]


class Reducer(Protocol):
    """Reduces buffers over the ranks of one transport, in place.

    Every method is **Collective**, with equal arguments on all ranks but for the numbers in
    `buffer`, a NumPy array in C order and native byte order. MEAN divides by the number of
    ranks.
    """

    def all_reduce(self, op: ReduceOp, buffer: np.ndarray) -> None:
        """Replace `buffer` on every rank by its reduction."""

    def start_all_reduce(self, op: ReduceOp, buffer: np.ndarray) -> Callable[[], object]:
        """Begin `all_reduce`. The function returned ends it, is local, and is called once."""

    def reduce(self, op: ReduceOp, buffer: np.ndarray, root: int) -> None:
        """Replace `buffer` on `root` by its reduction. Elsewhere its numbers are lost."""
