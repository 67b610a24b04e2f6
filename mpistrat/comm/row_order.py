"""Row order of the compiled tree, for ranks that bring several rows; and rows of one rank alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.comm.ops import compiled_function
from mpistrat.comm.shared_memory import StepSequence
from mpistrat.options import ReduceOp
from mpistrat.sharding import Fold

_ALL_BYTES = 2**62


class RowOrder:
    """Order in which rows are combined, each a node of the tree of `num_replicas` rows."""

    def __init__(
        self, num_replicas: int, nodes_of_ranks: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        # Nodes are given by first row and width, for each rank. The compiled code wants to know,
        # for each, with how many sums before it it is combined.
        count = 0

        def combine(left: None, right: None) -> None:
            nonlocal count
            count += 1

        fold: Fold[None] = Fold(num_replicas, combine)
        combined, most_sums = [], 0
        for begin, width in [node for nodes in nodes_of_ranks for node in nodes]:
            count = 0
            fold.add(begin, None, width)
            combined.append(count)
            most_sums = max(most_sums, len(fold.nodes))
        self.num_rows = [len(nodes) for nodes in nodes_of_ranks]
        """How many rows each rank brings."""
        # As `struct order` of native/sequences.h, by address.
        self._structure = np.array([most_sums, *self.num_rows, *combined], np.int64)
        self.pointer: int = self._structure.ctypes.data
        """The address of the C structure, valid as long as this object."""


class LocalRows:
    """Combines rows of this rank alone, in one pass over memory. For one thread at a time."""

    def __init__(self, library: Any) -> None:
        self._reduce = library.reduce
        self._line = np.zeros(32, np.int64)
        # A sequence of one rank: its steps are complete as soon as it arrives, so nothing waits.
        self._sequence = StepSequence(0, 0, [self._line.ctypes.data])

    def combine(
        self,
        op: ReduceOp,
        order: RowOrder,
        rows: list[np.ndarray],
        targets: Sequence[np.ndarray],
        divisor: int = 1,
    ) -> None:
        """Combine `rows`, each of one array for each target, and divide the sums."""
        function = compiled_function(op, targets[0].dtype)
        assert function is not None
        way = self._sequence.pointer, function[0], divisor, function[1], order.pointer
        self._reduce(*way, *order.num_rows, _ALL_BYTES, 0, False, rows, targets)
