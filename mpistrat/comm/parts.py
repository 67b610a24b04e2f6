"""Long messages in parts.

MPI before version 4 counts in C's int, which ends at 2**31 - 1 (MPI 3.1, section 2.6.2); and MPI
libraries take memory of the length of a message besides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpistrat.arrays import Array
from mpistrat.sharding import cut

__all__ = ["in_parts", "pieces", "plan_windows"]

_PART_BYTES = 2**28


def in_parts(buffer: np.ndarray) -> list[np.ndarray]:
    """Return views of `buffer`, in C order, one behind the other. Local.

    Arrays of equal dtype and size have equal parts.
    """
    if buffer.nbytes <= _PART_BYTES:
        return [buffer]
    return pieces(buffer, _PART_BYTES)


def pieces(array: Array, bytes_per_piece: int) -> list[Array]:
    """Return 1-d views that cover a C-ordered `array`, each with at least one element. Local."""
    flat = array.reshape(-1)
    return [flat[each] for each in cut(flat.size, max(1, bytes_per_piece // flat.itemsize))]


def plan_windows(counts: Sequence[int], itemsize: int) -> list[tuple[int, list[int]]]:
    """Return what each rank brings to the messages of a gather. Local, the same on every rank.

    Parameters
    ----------
    counts : sequence of int
        Elements on each rank.
    itemsize : int
        Bytes per element.

    Returns
    -------
    list of (int, list of int)
        For each message, where each rank's part of it begins among what it has, and how many
        elements it is.
    """
    if sum(counts) * itemsize <= _PART_BYTES:
        return [(0, list(counts))]
    length = max(_PART_BYTES // itemsize // len(counts), 1)
    return [
        (start, [min(max(count - start, 0), length) for count in counts])
        for start in range(0, max(counts), length)
    ]
