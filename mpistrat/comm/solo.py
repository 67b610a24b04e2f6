"""The transport of a world of one: nothing moves, and nobody asks for the size."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from mpistrat.comm.pool import Pool
from mpistrat.comm.transport import Carrier, NodeReducer, Occupancy
from mpistrat.options import ReduceOp

__all__ = ["SoloRound", "SoloTransport"]

_MASK = 2**64 - 1


class SoloRound:
    """A round of one rank."""

    def __init__(self, num_words: int) -> None:
        self.send = self.receive = np.zeros(num_words, np.uint64)
        self.start: Callable[[], object] = bool
        self.done: Callable[[], bool] = lambda: True

    def meet(self, first: int, second: int) -> int:
        """Bring two numbers: all ranks, this one, have come and brought the same. Local."""
        self.send[:] = first, _MASK - first, second, _MASK - second
        return 2


class SoloTransport:
    """One rank without MPI."""

    rank = 0
    size = 1
    node: NodeReducer | None = None
    carrier: Carrier | None = None

    def __init__(self) -> None:
        self.pool = Pool()
        self.occupancy = Occupancy()

    def all_reduce(self, op: ReduceOp, source: np.ndarray, target: np.ndarray) -> None:
        """Copy `source` to `target`. Local."""
        if target is not source:
            np.copyto(target, source)

    def start_all_reduce(
        self, op: ReduceOp, source: np.ndarray, target: np.ndarray
    ) -> Callable[[], object]:
        """Copy `source` to `target`. Local."""
        self.all_reduce(op, source, target)
        return bool

    def drain(self) -> None:
        """Do nothing: nothing is under way. Local."""

    def reduce(self, op: ReduceOp, buffer: np.ndarray, root: int) -> None:
        """Leave `buffer` as it is. Local."""

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        """Leave `buffer` as it is. Local."""

    def broadcast_each(self, buffers: Sequence[np.ndarray], roots: Sequence[int]) -> None:
        """Leave `buffers` as they are. Local."""

    def all_gather(self, part: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        """Return a copy of `part`. Local."""
        return np.array(part)

    def gather(self, part: np.ndarray, counts: Sequence[int], root: int) -> np.ndarray | None:
        """Return a copy of `part`. Local."""
        return np.array(part)

    def all_to_all(self, buffer: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        """Return a copy of `buffer`. Local."""
        return np.array(buffer)

    def round(self, num_words: int) -> SoloRound:
        """Return a round that is done at once. Local."""
        return SoloRound(num_words)

    def abort(self, exit_code: int) -> None:
        """End this process. Local."""
        os._exit(exit_code)
