"""Coverage of an array by boxes that were written. Pure arithmetic, the same on all ranks."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """Some rows of an array, whole or a part of each."""

    start: int
    stop: int
    starts: tuple[int, ...]
    """Where it begins along all axes except the first."""
    lengths: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements."""
        return self.stop <= self.start or 0 in self.lengths


class Coverage:
    """The elements that were written so far, each once."""

    def __init__(self) -> None:
        # Most programs write whole rows, one batch after the other. Then this is one interval.
        self._rows: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = {}
        """For each part of a row: disjoint intervals of rows that have it, in order."""

    def copy(self) -> Coverage:
        """Return a copy, to which boxes can be added."""
        twin = Coverage()
        twin._rows = {part: list(intervals) for part, intervals in self._rows.items()}
        return twin

    def add(self, box: Box) -> int | None:
        """Add a box, unless some of its elements are there; then return the first such row."""
        if box.is_empty:
            return None
        found = [
            row
            for (starts, lengths), intervals in self._rows.items()
            if _overlap(starts, lengths, box)
            for row in _first_common(intervals, box.start, box.stop)
        ]
        if found:
            return min(found)
        intervals = self._rows.setdefault((box.starts, box.lengths), [])
        place = bisect_left(intervals, (box.start, box.stop))
        start, stop, after = box.start, box.stop, place
        if place and intervals[place - 1][1] == start:
            place -= 1
            start = intervals[place][0]
        if after < len(intervals) and intervals[after][0] == stop:
            stop = intervals[after][1]
            after += 1
        intervals[place:after] = [(start, stop)]
        return None

    def first_missing(self, num_rows: int, row_shape: Sequence[int]) -> int | None:
        """Return the first row that is not complete, ``None`` if all are."""
        # The boxes are disjoint, so counting elements is enough.
        changes: dict[int, int] = {0: 0, num_rows: 0}
        for (_, lengths), intervals in self._rows.items():
            for start, stop in intervals:
                changes[start] = changes.get(start, 0) + math.prod(lengths)
                changes[stop] = changes.get(stop, 0) - math.prod(lengths)
        present = 0
        for row in sorted(changes):
            present += changes[row]
            if row < num_rows and present < math.prod(row_shape):
                return row
        return None


def _overlap(starts: Sequence[int], lengths: Sequence[int], box: Box) -> bool:
    axes = zip(starts, lengths, box.starts, box.lengths, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in axes)


def _first_common(intervals: Sequence[tuple[int, int]], start: int, stop: int) -> list[int]:
    """Return the first row of ``start:stop`` that is in an interval, in a list if there is one."""
    place = bisect_left(intervals, (start, start))
    if place and intervals[place - 1][1] > start:
        return [start]
    if place < len(intervals) and intervals[place][0] < stop:
        return [intervals[place][0]]
    return []
