"""Arrays of all ranks, concatenated along one axis. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpistrat.arrays import native

__all__ = ["check_gatherable", "joined"]


def check_gatherable(kind: str, shapes: Sequence[Sequence[int]], axis: int) -> None:
    """Refuse arrays of all ranks that cannot be concatenated along `axis`. Local.

    Parameters
    ----------
    kind : str
        The call, for messages.
    shapes : sequence of shapes
        By rank.
    axis : int
        May be negative.

    Raises
    ------
    ValueError
        If one has no axis, `axis` is out of range, or they differ along another.
    """
    size = len(shapes)
    for rank, shape in enumerate(shapes):
        if not shape:
            raise ValueError(
                f"{kind}: the value on rank {rank} of {size} is 0-d and has no axis to "
                "concatenate along. Give it one, for example with numpy.reshape(value, (1,))."
            )
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"{kind}: axis {axis} is out of range for the array of shape {tuple(shape)} on "
                f"rank {rank} of {size}. Use an axis in [{-len(shape)}, {len(shape) - 1}]."
            )
        if _trailing(shape, axis) != _trailing(shapes[0], axis):
            raise ValueError(
                f"{kind}: arrays may differ along axis {axis} only, but the shape is "
                f"{tuple(shapes[0])} on rank 0 and {tuple(shape)} on rank {rank} of {size}."
            )


def _trailing(shape: Sequence[int], axis: int) -> list[int]:
    """Return the shape that remains after the gathered axis has moved to the front."""
    axis %= len(shape)
    return [*shape[:axis], *shape[axis + 1 :]]


def joined(flat: np.ndarray, shapes: Sequence[Sequence[int]], axis: int) -> np.ndarray:
    """Return the arrays of all ranks as one. Local.

    Parameters
    ----------
    flat : array
        All numbers in rank order, of each array with `axis` moved to the front.
    shapes : sequence of shapes
        By rank.
    axis : int
    """
    length = sum(shape[axis] for shape in shapes)
    whole = flat.reshape(length, *_trailing(shapes[0], axis))
    return native(np.moveaxis(whole, 0, axis))
