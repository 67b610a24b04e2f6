"""Sharding arithmetic: how batches are split among ranks, and arrays into pieces.

Pure functions of integers. Every rank computes the same, so nothing here communicates.
"""

from __future__ import annotations

__all__ = ["ceil_div", "cut", "part_lengths", "slice_of_rank"]


def ceil_div(dividend: int, divisor: int) -> int:
    """Return ``dividend / divisor`` rounded up."""
    return -(-dividend // divisor)


def cut(num_elements: int, length: int) -> list[slice]:
    """Divide `num_elements` into slices of `length`, the last one shorter."""
    return [
        slice(start, min(start + length, num_elements)) for start in range(0, num_elements, length)
    ]


def part_lengths(length: int, num_parts: int) -> list[int]:
    """Divide `length`: the first ``length % num_parts`` parts hold one element more."""
    quotient, remainder = divmod(length, num_parts)
    return [quotient + (part < remainder) for part in range(num_parts)]


def slice_of_rank(num_examples: int, size: int, rank: int) -> slice:
    """Return the contiguous part of a global batch that `rank` gets."""
    # Rank r gets [r c, min((r + 1) c, n)) with c = ceil(n / size): the parts lie in rank order,
    # and the last ranks may get less, or nothing.
    share = ceil_div(num_examples, size)
    start = min(rank * share, num_examples)
    return slice(start, min(start + share, num_examples))
