"""Sharding arithmetic: how batches are split among ranks, and arrays into pieces.

Pure functions of integers. Every rank computes the same result, so nothing here communicates.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Box(NamedTuple):
    """A part of an array: a range along each axis."""

    shape: tuple[int, ...]
    """Shape of the whole array."""
    offsets: tuple[int, ...]
    """Start of the part along each axis."""
    sizes: tuple[int, ...]


def ceil_div(dividend: int, divisor: int) -> int:
    """Return ``dividend / divisor`` rounded up."""
    return -(-dividend // divisor)


def cut(num_elements: int, length: int) -> list[slice]:
    """Divide `num_elements` into slices of `length`, the last one shorter."""
    return [
        slice(start, min(start + length, num_elements)) for start in range(0, num_elements, length)
    ]


def consecutive(lengths: Iterable[int]) -> list[slice]:
    """Return consecutive slices of these lengths."""
    return [slice(*ends) for ends in itertools.pairwise(itertools.accumulate(lengths, initial=0))]


def part_lengths(length: int, num_parts: int) -> list[int]:
    """Divide `length`: the first ``length % num_parts`` parts hold one element more."""
    quotient, remainder = divmod(length, num_parts)
    return [quotient + (part < remainder) for part in range(num_parts)]


def slice_of_rank(num_examples: int, size: int, rank: int) -> slice:
    """Return the contiguous part of a global batch that `rank` gets."""
    # Rank r gets [r c, min((r + 1) c, n)) with c = ceil(n / size). The parts are in rank order,
    # and the last ranks may get less, or nothing.
    share = ceil_div(num_examples, size)
    start = min(rank * share, num_examples)
    return slice(start, min(start + share, num_examples))


@functools.lru_cache(maxsize=64)
def replicas_of_ranks(num_replicas: int, size: int) -> Sequence[range]:
    """Return the replicas of each rank. They are contiguous, and the first may have one more."""
    slices = consecutive(part_lengths(num_replicas, size))
    return tuple(range(each.start, each.stop) for each in slices)


class Fold(Generic[T]):
    """Partial sum of `num_rows` rows, added in the tree order of `mpistrat.comm.ops.combine`.

    A node of the tree is the content of one row after a step of that function: the sum of the rows
    ``[k w, min((k + 1) w, num_rows))``, where w is a power of two. Nodes are added in the order of
    their rows, starting at any row. Complete pairs are combined at once, like the digits of a
    binary counter.
    """

    def __init__(self, num_rows: int, combine: Callable[[T, T], T]) -> None:
        self._num_rows = num_rows
        self._combine = combine
        self.nodes: list[tuple[int, int, T]] = []
        """First row, width and sum of each node that waits for its neighbour."""

    def add(self, begin: int, value: T, width: int = 1) -> None:
        """Add the node of `width` rows that starts at `begin`."""
        while True:
            # Without a row after it, a node is also the node of twice the width.
            while (
                width < self._num_rows
                and begin % (2 * width) == 0
                and begin + width >= self._num_rows
            ):
                width *= 2
            has_left = bool(self.nodes) and self.nodes[-1][:2] == (begin - width, width)
            if begin % (2 * width) == 0 or not has_left:
                break
            begin, _, left = self.nodes.pop()
            value = self._combine(left, value)
            width *= 2
        self.nodes.append((begin, width, value))
