"""How far two arrays of one shape and dtype are apart, in words."""

from __future__ import annotations

import numpy as np

__all__ = ["describe_difference"]


def describe_difference(array: np.ndarray, expected: np.ndarray) -> str:
    """Return how many elements differ, the largest difference, and where it is. Local.

    Elements differ where a byte does, so that signed zeros and kinds of NaN are seen too.
    """
    differs = _bytes_of(array) != _bytes_of(expected)
    positions = np.flatnonzero(differs.any(axis=1))
    if positions.size == 0:
        return "no element differs"
    ours, theirs = array.reshape(-1)[positions], expected.reshape(-1)[positions]
    sizes = _distances(ours, theirs)
    is_nan = np.isnan(sizes) if sizes.dtype.kind == "f" else np.zeros(sizes.shape, bool)
    text = f"differs in {positions.size} of {array.size} elements"
    if not is_nan.all():
        at = int(np.argmax(np.where(is_nan, 0, sizes)))
        index = tuple(map(int, np.unravel_index(positions[at], array.shape)))
        text += f", by up to {sizes[at]} (at index {index}: {ours[at]} against {theirs[at]})"
        if sizes[at] == 0:
            text += ", in their bits alone"
    if is_nan.any():
        text += f", {int(is_nan.sum())} of them because one is NaN"
    return text


def _bytes_of(array: np.ndarray) -> np.ndarray:
    contiguous = np.array(array, order="C").reshape(-1)
    return contiguous.view(np.uint8).reshape(contiguous.size, contiguous.itemsize)


def _distances(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the absolute differences, exact for integers. Two NaNs are 0 apart."""
    if ours.dtype.kind in "biu":
        wide = "i8" if ours.dtype.kind == "i" else "u8"
        larger: np.ndarray = np.maximum(ours, theirs).astype(wide).view(np.uint64)
        # Modulo 2**64, where the difference of two 64-bit integers always fits.
        larger -= np.minimum(ours, theirs).astype(wide).view(np.uint64)
        return larger
    if ours.dtype.itemsize < 8:  # float16, bfloat16, float32
        ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(all="ignore"):
        distances: np.ndarray = np.abs(ours - theirs)
    same = (ours == theirs) | ((ours != ours) & (theirs != theirs))
    distances[same] = 0
    return distances
