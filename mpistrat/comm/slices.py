"""Slices: which rank reduces which elements of a buffer. Pure arithmetic."""

from __future__ import annotations

from mpistrat.sharding import cut, slice_of_rank

__all__ = ["plan_blocks", "slice_lengths"]

_BYTES_PER_BLOCK = 4 * 2**20
"""Bounds the memory that a reduction needs besides its buffer."""

_BYTES_PER_SLICE = 64 * 2**10
"""With many ranks blocks grow, so that no message is smaller than it needs to be."""


def plan_blocks(num_elements: int, itemsize: int, size: int) -> list[slice]:
    """Divide a buffer into the blocks that are reduced one after the other. Local.

    Parameters
    ----------
    num_elements : int
        Length of the buffer.
    itemsize : int
        Bytes per element.
    size : int
        Number of ranks.

    Returns
    -------
    list of slice
        One behind the other, none of them empty.
    """
    return cut(num_elements, max(max(_BYTES_PER_BLOCK, size * _BYTES_PER_SLICE) // itemsize, 1))


def slice_lengths(num_elements: int, size: int) -> list[int]:
    """Return how many elements of a block each rank reduces, in rank order. Local."""
    slices = (slice_of_rank(num_elements, size, rank) for rank in range(size))
    return [each.stop - each.start for each in slices]
