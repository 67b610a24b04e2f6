"""Reading ahead: which rows come next, and how many threads prepare them."""

from __future__ import annotations

from collections import deque

import numpy as np

from mpistrat.data.order import Block
from mpistrat.data.parallel_map import cores_of_rank
from mpistrat.settings import settings

__all__ = ["ExpectedRows", "is_run", "num_decoding_threads"]


class ExpectedRows:
    """Queue of the rows that were announced and not read yet."""

    def __init__(self) -> None:
        self._blocks: deque[Block] = deque()
        self._start = 0
        """So many rows of the first block were read."""

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, block: Block) -> None:
        """Append rows."""
        if len(block):
            self._blocks.append(block)

    def first(self, count: int) -> Block | None:
        """Return the next rows; ``None`` where there are not so many."""
        parts: list[Block] = []
        start = self._start
        for block in self._blocks:
            part = block[start : start + count]
            if len(part) == count and not parts:
                return part
            parts.append(part)
            count, start = count - len(part), 0
            if not count:
                return np.concatenate(parts)
        return None

    def drop(self, count: int) -> None:
        """Remove the next rows, or all where there are not so many."""
        self._start += count
        while self._blocks and self._start >= len(self._blocks[0]):
            self._start -= len(self._blocks.popleft())
        if not self._blocks:
            self._start = 0


_MAX_THREADS = 8
"""Python's own part of reading a chunk keeps more from helping."""


def num_decoding_threads() -> int:
    """Return the number of threads of a reader: by default this rank's share of the cores."""
    chosen = settings().data_threads
    if chosen is not None:
        return chosen
    return min(cores_of_rank(), _MAX_THREADS)


_MIN_RUN_ROWS = 8
"""Fewer rows in a row may still be a part of disorder: then a block is read and cached."""


def is_run(numbers: np.ndarray) -> bool:
    """Return whether rows follow one another, and are more than a few."""
    first, count = int(numbers[0]), len(numbers)
    if count < _MIN_RUN_ROWS or numbers[-1] != first + count - 1:
        return False
    return np.arange(first, first + count).tobytes() == numbers.tobytes()
