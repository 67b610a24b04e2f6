"""Statistics and differences of a checkpoint's variables, and a plot of their distributions."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.checkpoint.format import BITS_OF_FLOATS
from mpistrat.checkpoint.reader import CheckpointReader
from mpistrat.comm.wire import named_dtype
from mpistrat.data.hdf5.fields import natural_key
from mpistrat.system.plots import LIGHT, add_heading, new_figure, printable, save_plot, styled


def numbers_of(reader: CheckpointReader, name: str) -> Iterator[np.ndarray]:
    """Yield the pieces of a variable, with small floats that are stored as bits as float32."""
    own = reader.variables[name].dtype_name
    dtype = named_dtype(own) if own in BITS_OF_FLOATS else None
    for piece in reader.read_pieces(name):
        yield piece if dtype is None else piece.view(dtype).astype(np.float32)


@dataclass(frozen=True)
class _Summary:
    """Statistics of the values of a variable."""

    # NaN is ignored. The values are None if there is nothing but NaN, and for complex numbers,
    # which have no order.
    min: float | int | None
    max: float | int | None
    mean: float | None
    nan_count: int


def summarize(pieces: Iterable[np.ndarray]) -> _Summary:
    """Return the statistics of one array, which is passed in flat pieces."""
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
    # Weight the means of the pieces, because the sum of all values might overflow.
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
    """Difference of two variables of the same shape and dtype."""

    largest: float | int = 0
    """Largest absolute difference; NaN if only one of two values is NaN."""
    count: int = 0
    """Number of elements that differ. NaN equals NaN."""
    num_other_bits: int = 0
    """Number of equal elements whose bits differ: signs of zeros, or kinds of NaN."""


def tell_apart(a: Iterable[np.ndarray], b: Iterable[np.ndarray]) -> _Difference:
    """Return the difference of two arrays, which are passed in flat pieces of any sizes."""
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
    # Both iterators must run to their ends, because the reader compares the digest there.
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
        # Subtraction modulo 2**64 is exact for every integer dtype, because the result fits.
        gap = np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)
        return int(gap.max()), int(np.count_nonzero(gap))
    wide = np.result_type(a.dtype, np.float64)
    differs = (a != b) & ~(np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(a[differs].astype(wide) - b[differs].astype(wide))
    return float(gap.max(initial=0.0)), int(np.count_nonzero(differs))


_NUM_BINS = 240
_MAX_RIDGES = 240
_INCHES_PER_RIDGE = 0.2
_RIDGE_HEIGHT = 1.7
"""Height of a ridge in rows. A ridge overlaps the one above it."""
_LONG = 40
"""With more ridges, the axis also has labels at the top."""
_LONGEST_NAME = 40
_MONOSPACE = {"fontfamily": "monospace", "fontsize": 7.5}
_CHARACTER_POINTS = 4.85
_MAX_TICKS = 11
_SMALLEST_LINEAR = 1e-300
_SHORTEST = 1e-6
_DECADES = 6
"""Most decades of the axis on each side of zero."""


@dataclass(frozen=True)
class SymmetricLog:
    """Scale that is linear near zero and logarithmic further out, on both sides."""

    linear: float
    """Magnitude at which it changes from linear to logarithmic."""

    def __call__(self, values: Any) -> Any:
        """Return the positions of `values` on the scale. Zero is at zero."""
        values = np.asarray(values, np.float64)
        return np.sign(values) * np.log10(1 + np.abs(values) / self.linear)

    def ticks(self, start: float, stop: float) -> dict[float, str]:
        """Return the labels of powers of ten between two positions, by position."""
        first = math.ceil(math.log10(self.linear) - 1e-9) + 1
        last = min(math.ceil(math.log10(self.linear) + max(-start, stop)), 308)
        sides = (start < 0) + (stop > 0)
        # Labels with large exponents are longer.
        num_ticks = _MAX_TICKS - 1 if max(abs(first), abs(last)) < 10 else _MAX_TICKS // 2
        stride = max(1, math.ceil(sides * (last - first + 1) / num_ticks))
        found = {0.0: "0"} if start <= 0 <= stop else {}
        for exponent in range(first, last + 1, stride):
            for value in (-(10.0**exponent), 10.0**exponent):
                if start <= (place := float(self(value))) <= stop:
                    found[place] = f"{value:g}"
        return found


@dataclass(frozen=True)
class _Ridge:
    """Distribution of one variable."""

    counts: np.ndarray
    """Number of finite values in each bin, as int64."""
    num_nan: int
    num_infinite: int


def finite_limits(pieces: Iterable[np.ndarray]) -> tuple[float, float] | None:
    """Return the smallest and the largest finite value, or magnitude of complex values."""
    found = summarize(_finite(piece) for piece in pieces)
    return None if found.min is None or found.max is None else (found.min, found.max)


def binned(pieces: Iterable[np.ndarray], scale: SymmetricLog, edges: np.ndarray) -> _Ridge:
    """Return the number of values in each bin between `edges`, which are positions on the scale."""
    counts = np.zeros(edges.size - 1, np.int64)
    num_nan = num_all = 0
    for piece in pieces:
        num_all += piece.size
        if piece.dtype.kind in "fc":
            num_nan += int(np.count_nonzero(np.isnan(piece)))
        # Rounding must not put the extreme values outside of all bins.
        places = np.clip(scale(_finite(piece)), edges[0], edges[-1])
        counts += np.histogram(places, edges)[0]
    return _Ridge(counts, num_nan, num_all - num_nan - int(counts.sum()))


def _finite(piece: np.ndarray) -> np.ndarray:
    if piece.dtype.kind in "biu":
        return piece.astype(np.uint8) if piece.dtype.kind == "b" else piece
    with np.errstate(over="ignore"):
        real = np.abs(piece) if piece.dtype.kind == "c" else piece
        values = real.astype(np.float64)
    return values[np.isfinite(values)]


def choose_scale(ranges: Sequence[tuple[float, float]]) -> tuple[SymmetricLog, float, float]:
    """Return the scale for variables with these value ranges, and the positions of its ends."""
    magnitudes = [max(abs(low), abs(high)) for low, high in ranges]
    largest = float(max(magnitudes, default=1.0)) or 1.0
    smallest = min((float(each) for each in magnitudes if each), default=1.0)
    linear = max(smallest / 10, largest / 10**_DECADES, _SMALLEST_LINEAR)
    scale = SymmetricLog(10.0 ** math.floor(math.log10(linear)))
    start = float(scale(min((low for low, _ in ranges), default=0.0)))
    stop = float(scale(max((high for _, high in ranges), default=0.0)))
    return (scale, start, stop) if stop - start > _SHORTEST else (scale, start - 1, stop + 1)


def draw(reader: CheckpointReader, path: Path) -> str:
    """Draw a ridge for each variable into a PNG, and return a note on variables left out."""
    largest = sorted(reader.variables, key=lambda name: -reader.variables[name].size_bytes)
    names = sorted(largest[:_MAX_RIDGES], key=natural_key)
    pieces = {name: functools.partial(numbers_of, reader, name) for name in names}
    ranges = [found for name in names if (found := finite_limits(pieces[name]())) is not None]
    scale, start, stop = choose_scale(ranges)
    edges = np.linspace(start, stop, _NUM_BINS + 1)
    margin = 0.02 * (stop - start)
    with styled():
        figure = new_figure(9.5, 1.6 + _INCHES_PER_RIDGE * max(len(names), 4))
        axes = figure.subplots()
        for row, name in enumerate(names):
            ridge = binned(pieces[name](), scale, edges)
            _draw_ridge(axes, row, edges, ridge, _colour(names, name))
            _write_notes(axes, row, reader.variables[name], ridge)
        _label(axes, names)
        ticks = scale.ticks(start, stop)
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.set(
            xlim=(start - margin, stop + margin), ylim=(len(names) - 0.3, -_RIDGE_HEIGHT - 0.1)
        )
        axes.tick_params(axis="x", labeltop=len(names) > _LONG)
        axes.set_xlabel("value (logarithmic on both sides of zero)")
        axes.grid(axis="x")
        step = "" if reader.header.step < 0 else f", step {reader.header.step:,}"
        num_values = sum(math.prod(reader.variables[name].shape) for name in names)
        detail = f"{len(names)} variables, {num_values:,} values; each ridge has its own height"
        add_heading(figure, f"{reader.path.name}{step}", detail)
        save_plot(figure, path)
    left = len(reader.variables) - len(names)
    if not left:
        return ""
    return f"{path} shows the {len(names)} largest variables; {left} more do not fit."


def _layer(name: str) -> str:
    return name.rpartition("/")[0]


def _groups(names: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield each layer, and the rows of its variables."""
    for layer, rows in itertools.groupby(range(len(names)), key=lambda row: _layer(names[row])):
        yield layer, list(rows)


def _colour(names: Sequence[str], name: str) -> str:
    layers = [layer for layer, _ in _groups(names)]
    return LIGHT.series[layers.index(_layer(name)) % 4]


def _draw_ridge(axes: Any, row: int, edges: np.ndarray, ridge: _Ridge, colour: str) -> None:
    axes.axhline(row, color=LIGHT.line, linewidth=0.5, zorder=row)
    if not ridge.counts.any():
        is_empty = not ridge.num_nan + ridge.num_infinite
        text, colour = ("no values", LIGHT.muted) if is_empty else ("no finite values", LIGHT.red)
        axes.text(edges.mean(), row - 0.1, text, ha="center", color=colour, fontsize=8)
        return
    width = edges[1] - edges[0]
    middles = edges[0] + width * np.arange(-1.5, edges.size + 1.5)
    # Smooth a little, because a short variable leaves most of the 240 bins empty.
    kernel = np.array([1, 4, 7, 4, 1]) / 17
    padded = np.pad(ridge.counts.astype(np.float64), 4)
    heights = np.convolve(padded, kernel, mode="valid")
    top = row - _RIDGE_HEIGHT * heights / heights.max()
    axes.fill_between(middles, row, top, color=colour, alpha=0.8, linewidth=0, zorder=row + 0.5)
    axes.plot(middles, top, color=LIGHT.ground, linewidth=0.6, zorder=row + 0.5)


def _write_notes(axes: Any, row: int, info: Any, ridge: _Ridge) -> None:
    """Write dtype, shape and the number of values that cannot be drawn at the right."""
    kind = f"|{info.dtype}|" if info.dtype.kind == "c" else str(info.dtype)
    odd = [(ridge.num_nan, "NaN"), (ridge.num_infinite, "infinite")]
    notes = ", ".join(f"{number:,} {what}" for number, what in odd if number)
    _beside(axes, row, 6, f"{kind} {info.shape}", ha="left", color=LIGHT.muted)
    if notes:
        width = len(f"{kind} {info.shape}") + 1
        _beside(axes, row, 6 + width * _CHARACTER_POINTS, notes, ha="left", color=LIGHT.red)


def _label(axes: Any, names: Sequence[str]) -> None:
    """Write the names at the left: a layer's name once, and each variable's name in its row."""
    leaves = [_shortened(name.rpartition("/")[2]) for name in names]
    width = max(map(len, leaves), default=0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    for number, (layer, rows) in enumerate(_groups(names)):
        if number % 2 == 0:
            axes.axhspan(rows[0] - 0.9, rows[-1] + 0.1, color=LIGHT.panel, zorder=-1, linewidth=0)
        left = -6 - (width + 1) * _CHARACTER_POINTS
        style = {"fontweight": "bold", "color": LIGHT.series[number % 4]}
        _beside(axes, rows[0], left, _shortened(layer), ha="right", at=0, **style)
        for row in rows:
            _beside(axes, row, -6, leaves[row], ha="right", at=0, color=LIGHT.ink)


def _beside(axes: Any, row: int, shift: float, text: str, *, at: int = 1, **style: Any) -> None:
    axes.annotate(
        printable(text),
        (at, row),
        (shift, 2),
        xycoords=axes.get_yaxis_transform(),
        textcoords="offset points",
        parse_math=False,
        **_MONOSPACE,
        **style,
    )


def _shortened(name: str) -> str:
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[:half]}…{name[-half:]}"
