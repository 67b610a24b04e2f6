"""Statistics and differences of arrays in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.checkpoint.format import BITS_OF_FLOATS
from mpistrat.checkpoint.reader import CheckpointReader
from mpistrat.comm.wire import named_dtype


def numbers_of(reader: CheckpointReader, name: str) -> Iterator[np.ndarray]:
    """Yield what `CheckpointReader.read_pieces` does; small floats stored as bits as float32."""
    own = reader.variables[name].dtype_name
    dtype = named_dtype(own) if own in BITS_OF_FLOATS else None
    for piece in reader.read_pieces(name):
        yield piece if dtype is None else piece.view(dtype).astype(np.float32)


@dataclass(frozen=True)
class _Summary:
    """Statistics of the values of a variable."""

    # NaN aside; None where there are no other values, and for complex numbers, which have no order.
    min: float | int | None
    max: float | int | None
    mean: float | None
    nan_count: int


def summarize(pieces: Iterable[np.ndarray]) -> _Summary:
    """Return the statistics of one array, given in flat pieces."""
    lowest: Any = None
    highest: Any = None
    means: list[tuple[float, int]] = []
    nan_count = 0
    for piece in pieces:
        is_nan = np.isnan(piece) if piece.dtype.kind in "fc" else np.zeros(piece.shape, bool)
        nan_count += int(np.count_nonzero(is_nan))
        values = piece[~is_nan] if is_nan.any() else piece
        if values.size == 0 or values.dtype.kind == "c":
            continue
        number = float if values.dtype.kind == "f" else int
        low, high = number(values.min()), number(values.max())
        lowest = low if lowest is None else min(lowest, low)
        highest = high if highest is None else max(highest, high)
        means.append((_mean(values), values.size))
    count = sum(size for _, size in means)
    # Each mean is weighted first: the sum of all values might overflow.
    mean = sum(each * (size / count) for each, size in means) if means else None
    return _Summary(lowest, highest, mean, nan_count)


def _mean(values: np.ndarray) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        mean = float(values.mean(dtype=np.float64))
        if math.isinf(mean) and np.isfinite(values).all():  # only the sum overflows
            mean = float((values.astype(np.float64) / values.size).sum())
            mean = min(max(mean, float(values.min())), float(values.max()))
    return mean


@dataclass
class _Difference:
    """How much two variables of the same shape and dtype differ."""

    largest: float | int = 0
    """The largest absolute difference; NaN where only one of two values is NaN."""
    count: int = 0
    """The number of elements that differ. NaN equals NaN."""
    num_other_bits: int = 0
    """The number of equal elements whose bits differ: signs of zeros, or kinds of NaN."""


def tell_apart(a: Iterable[np.ndarray], b: Iterable[np.ndarray]) -> _Difference:
    """Return the difference of two arrays, given in flat pieces of any sizes."""
    found = _Difference()
    for piece_a, piece_b in _aligned(iter(a), iter(b)):
        bytes_a, bytes_b = (x.view(np.uint8).reshape(x.size, -1) for x in (piece_a, piece_b))
        other = (bytes_a != bytes_b).any(axis=1)
        if not other.any():
            continue
        largest, count = _largest_difference(piece_a[other], piece_b[other])
        found.count += count
        found.num_other_bits += int(np.count_nonzero(other)) - count
        if not math.isnan(found.largest):
            found.largest = largest if math.isnan(largest) else max(found.largest, largest)
    return found


def _aligned(
    a: Iterator[np.ndarray], b: Iterator[np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pieces of equal sizes from both arrays."""
    # Both iterators run to their ends, because there the reader compares the digest.
    left_a = left_b = np.empty(0)
    while True:
        if left_a.size == 0:
            left_a = next(a, left_a)
        if left_b.size == 0:
            left_b = next(b, left_b)
        size = min(left_a.size, left_b.size)
        if size == 0:
            return
        yield left_a[:size], left_b[:size]
        left_a, left_b = left_a[size:], left_b[size:]


def _largest_difference(a: np.ndarray, b: np.ndarray) -> tuple[float | int, int]:
    if a.dtype.kind in "biu":
        # Subtraction modulo 2**64 is exact for every integer dtype, since the result fits.
        gap = np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)
        return int(gap.max()), int(np.count_nonzero(gap))
    wide = np.result_type(a.dtype, np.float64)
    differs = (a != b) & ~(np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(a[differs].astype(wide) - b[differs].astype(wide))
    return float(gap.max(initial=0.0)), int(np.count_nonzero(differs))
