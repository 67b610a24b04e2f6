"""How far two arrays of one shape and dtype are apart, in words."""

from __future__ import annotations

import numpy as np

from mpistrat.arrays import native

__all__ = ["describe_difference", "value_bytes"]


def describe_difference(array: np.ndarray, expected: np.ndarray) -> str:
    """Return how many elements differ, the largest difference, and where it is. Local.

    Elements differ where a byte does, so that signed zeros and kinds of NaN are seen too.
    """
    differs = value_bytes(array) != value_bytes(expected)
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


def value_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes that make up each element, shape ``(array.size, num_bytes)``. Local.

    x86 keeps a long double in 10 of its 16 bytes. What the others hold is left to chance.
    """
    flat = native(array).reshape(-1)
    raw = flat.view(np.uint8).reshape(flat.size, flat.itemsize)
    if flat.dtype.char not in "gG" or np.finfo(np.longdouble).nmant != 63:
        return raw
    num_reals = 2 if flat.dtype.char == "G" else 1
    reals = raw.reshape(flat.size, num_reals, flat.itemsize // num_reals)
    return reals[:, :, :10].reshape(flat.size, num_reals * 10)


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
