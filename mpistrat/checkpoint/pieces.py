"""Arrays of the host or the device as pieces in host memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpistrat.arrays import Array, host_view
from mpistrat.comm.parts import pieces

__all__ = ["BYTES_PER_PIECE", "copy_to_host", "pieces_on_host"]

BYTES_PER_PIECE = 2**21
"""What a copy from the device costs in host memory, and about how much stays in a cache."""


def pieces_on_host(array: Array) -> Iterator[np.ndarray]:
    """Yield 1-d arrays in host memory that cover `array` in C order. Local.

    They are views where `array` lies there in C order, else copies, made one by one.
    """
    for piece in pieces(array, BYTES_PER_PIECE):
        yield host_view(piece)


def copy_to_host(target: np.ndarray, source: Array) -> None:
    """Write `source` to `target`, a host array in C order of its shape and dtype. Local."""
    for into, piece in zip(pieces(target, BYTES_PER_PIECE), pieces_on_host(source), strict=True):
        np.copyto(into, piece)
