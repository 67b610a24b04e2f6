"""Statistics, differences and histograms of arrays in checkpoints."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.checkpoint.format import BITS_OF_FLOATS
from mpistrat.checkpoint.reader import CheckpointReader
from mpistrat.comm.wire import named_dtype

__all__ = ["draw", "numbers_of", "summarize", "tell_apart"]


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


_NUM_BINS = 64
_MAX_PICTURES = 60
_NUM_COLUMNS = 3
_INCHES = (4.0, 2.6)
"""Width and height of one picture."""
_LONGEST_NAME = 44
_HIGHEST_EXPONENT = 100

Pieces = Callable[[], Iterable[np.ndarray]]
"""Returns the values of a variable in flat pieces, at each call again."""


@dataclass(frozen=True)
class _Histogram:
    """The number of values in each bin."""

    edges: np.ndarray
    """Float64, one more than the bins, growing; empty where no value is finite."""
    counts: np.ndarray
    """Int64."""
    num_nan: int
    num_infinite: int


def count(pieces: Pieces) -> _Histogram:
    """Return the histogram of the finite values, or magnitudes of complex ones."""
    limits = summarize(_finite(piece) for piece in pieces())
    edges = np.empty(0)
    if limits.min is not None and limits.max is not None:
        edges = _edges(limits.min, limits.max)
    counts = np.zeros(max(edges.size - 1, 0), np.int64)
    num_nan = num_all = 0
    for piece in pieces():
        num_all += piece.size
        if piece.dtype.kind in "fc":
            num_nan += int(np.count_nonzero(np.isnan(piece)))
        if edges.size:
            counts += np.histogram(_finite(piece), edges)[0]
    return _Histogram(edges, counts, num_nan, num_all - num_nan - int(counts.sum()))


def _finite(piece: np.ndarray) -> np.ndarray:
    if piece.dtype.kind in "biu":
        return piece.astype(np.uint8) if piece.dtype.kind == "b" else piece
    with np.errstate(over="ignore"):
        real = np.abs(piece) if piece.dtype.kind == "c" else piece
        values = real.astype(np.float64)
    return values[np.isfinite(values)]


def _edges(low: float | int, high: float | int) -> np.ndarray:
    if isinstance(low, int) and high - low < _NUM_BINS:  # a bin for each integer
        return np.arange(low, high + 2) - 0.5
    if low == high:
        margin = max(0.5, abs(low) / 1000)
        return np.array([low - margin, low + margin])
    # Halved, because the difference of two floats can overflow.
    return np.unique(np.linspace(low / 2, high / 2, _NUM_BINS + 1) * 2)


def draw(reader: CheckpointReader, path: Path) -> str:
    """Draw a histogram of each variable into a PNG; return a note on those left out."""
    from matplotlib.figure import Figure

    largest = sorted(reader.variables, key=lambda name: -reader.variables[name].size_bytes)
    chosen = set(largest[:_MAX_PICTURES])
    names = [name for name in reader.variables if name in chosen]
    num_rows = max(1, math.ceil(len(names) / _NUM_COLUMNS))
    size = (_INCHES[0] * _NUM_COLUMNS, _INCHES[1] * num_rows + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    step = "" if reader.header.step < 0 else f", step {reader.header.step}"
    figure.suptitle(_plain(f"{reader.path.name}{step}"), parse_math=False)
    grid = figure.subplots(num_rows, _NUM_COLUMNS, squeeze=False).ravel()
    for axes in grid[len(names) :]:
        axes.set_axis_off()
    for axes, name in zip(grid, names, strict=False):
        info = reader.variables[name]
        _draw_one(axes, count(functools.partial(numbers_of, reader, name)))
        kind = f"magnitudes of {info.dtype}" if info.dtype.kind == "c" else info.dtype
        title = f"{_shortened(name)}\n{kind} {info.shape}"
        axes.set_title(_plain(title), fontsize="small", parse_math=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that the font lacks
        try:
            figure.savefig(path, format="png", dpi=110)
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}.") from None
    left = len(reader.variables) - len(names)
    if not left:
        return ""
    return f"{path} shows the {len(names)} largest variables; {left} more have no room."


def _draw_one(axes: Any, histogram: _Histogram) -> None:
    if histogram.counts.size:
        exponent = _exponent(histogram.edges)
        axes.stairs(histogram.counts, histogram.edges / 10.0**exponent, fill=True)
        if exponent:
            axes.set_xlabel(f"in 1e{exponent}", fontsize="x-small")
    else:
        axes.text(0.5, 0.5, "no finite values", ha="center", transform=axes.transAxes)
    odd = [(histogram.num_nan, "NaN"), (histogram.num_infinite, "infinite")]
    notes = [f"{number} {kind}" for number, kind in odd if number]
    if notes:
        axes.text(0.98, 0.95, ", ".join(notes), ha="right", va="top", transform=axes.transAxes)
    axes.tick_params(labelsize="x-small")
    axes.locator_params(axis="x", nbins=5)


def _exponent(edges: np.ndarray) -> int:
    """Return the power of ten to divide by where matplotlib cannot draw such numbers, else 0."""
    exponent = math.floor(math.log10(float(np.abs(edges).max())))
    return exponent if abs(exponent) > _HIGHEST_EXPONENT else 0


def _shortened(name: str) -> str:
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[:half]}…{name[-half:]}"


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
