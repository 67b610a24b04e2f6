"""Reduction ops: how NumPy, compiled code and MPI compute them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from mpistrat.arrays import Array, is_on_host
from mpistrat.options import ReduceOp

_UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def combine(op: ReduceOp, pieces: np.ndarray) -> np.ndarray:
    """Return the reduction of the rows of `pieces`, element by element, in their memory."""
    # Neighbours in rank order are combined first, (0, 1), (2, 3), ..., then neighbouring pairs, and
    # so on; a row without a neighbour waits. So the bits of an element depend only on the number of
    # rows and the element's values. Overflow gives inf, without a warning, as in MPI.
    size, step = len(pieces), 1
    with np.errstate(all="ignore"):
        while step < size:
            # The first slice ends before a row without a neighbour, which waits for a later step.
            combine_pair(op, pieces[: size - step : 2 * step], pieces[step :: 2 * step])
            step *= 2
    return finish(op, pieces[0], size)


def combine_pair(op: ReduceOp, target: np.ndarray, other: np.ndarray) -> None:
    """Overwrite `target` with its combination with `other`, the rows behind it."""
    if op is ReduceOp.PROD and target.dtype.kind == "c":
        _multiply_complex(target, other)
    elif op in (ReduceOp.MIN, ReduceOp.MAX) and target.dtype.kind == "f":
        _select(op, target, other)
    else:
        _UFUNCS[op](target, other, out=target)


def combined_pair(
    op: ReduceOp, left: np.ndarray, right: np.ndarray, room: np.ndarray
) -> np.ndarray:
    """Return the combination of `left` and `right` in `room`, without changing them."""
    if op in (ReduceOp.SUM, ReduceOp.MEAN) or left.dtype.kind in "iu":
        total: np.ndarray = _UFUNCS[op](left, right, out=room)
        return total
    np.copyto(room, left)
    combine_pair(op, room, right)
    return room


def finish(op: ReduceOp, total: np.ndarray, size: int) -> np.ndarray:
    """Return the combination `total` of `size` rows, divided for MEAN, with one kind of NaN."""
    if op is ReduceOp.MEAN:
        divide(total, size)
    unify_nan(total)
    if total.dtype.char in "gG":
        _clear_padding(total)
    return total


def _select(op: ReduceOp, target: np.ndarray, other: np.ndarray) -> None:
    # NumPy does not define which of two zeros it selects. Here -0.0 is the smaller one, as in the
    # order of the integers that represent other floats in messages.
    zeros = (target == 0) & (other == 0)
    sign = -1 if op is ReduceOp.MIN else 1  # 0.0 + -0.0 is 0.0
    of_zeros = sign * (sign * target[zeros] + sign * other[zeros])
    _UFUNCS[op](target, other, out=target)
    target[zeros] = of_zeros


def _multiply_complex(target: np.ndarray, other: np.ndarray) -> None:
    # NumPy's own product rounds once or twice (FMA), depending on an element's place in memory. The
    # real part is stored last, because the imaginary part below needs the old one.
    real = target.real * other.real - target.imag * other.imag
    target.imag = target.real * other.imag + target.imag * other.real
    target.real = real


def divide(buffer: np.ndarray, size: int) -> None:
    """Divide `buffer` by the number of ranks, in place; complex numbers part by part."""
    with np.errstate(all="ignore"):
        for part in (buffer.real, buffer.imag) if buffer.dtype.kind == "c" else (buffer,):
            np.true_divide(part, size, out=part)


def unify_nan(result: np.ndarray) -> None:
    """Set every NaN of `result` to the bits of ``numpy.nan``."""
    # Which of two NaNs a sum returns may depend on an element's place in the vector registers.
    if result.dtype.kind == "c":
        unify_nan(result.real)
        unify_nan(result.imag)
    elif result.dtype.kind == "f" and result.size and np.isnan(result.min()):
        np.copyto(result, np.nan, where=np.isnan(result))


_PADDING = slice(10, None) if np.finfo(np.longdouble).nmant == 63 else slice(0)
"""The unused bytes of a long double: the last bytes of the x87 format."""


def _clear_padding(total: np.ndarray) -> None:
    """Set the padding bytes to zero, so that equal numbers have equal bytes."""
    parts = total.reshape(-1).view(np.longdouble).view(np.uint8)
    parts.reshape(-1, np.dtype(np.longdouble).itemsize)[:, _PADDING] = 0


MOVES_AS = {op: op for op in ReduceOp} | {ReduceOp.MEAN: ReduceOp.SUM}
"""The reduction between ranks; for MEAN, a division follows."""


# Numbered as in native/sequences.c.
_ARITHMETIC = ("f4", "f8", "u1", "u2", "u4", "u8")
_ORDER = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
_FUNCTIONS = {
    name: number
    for number, name in enumerate(
        [(op, each) for op in (ReduceOp.SUM, ReduceOp.PROD) for each in _ARITHMETIC]
        + [(op, each) for op in (ReduceOp.MIN, ReduceOp.MAX) for each in _ORDER]
    )
}


@functools.lru_cache
def compiled_function(op: ReduceOp, dtype: np.dtype) -> tuple[int, int] | None:
    """Return the number of a compiled function and its item size in bytes, if there is one."""
    kind, itemsize = dtype.kind, dtype.itemsize
    if op is ReduceOp.MEAN:
        op = ReduceOp.SUM
        if kind not in "fc":
            return None
    if kind == "c" and op is ReduceOp.SUM:
        kind, itemsize = "f", itemsize // 2  # the parts are added separately; MEAN divides each
    # Signed overflow is undefined in C; unsigned arithmetic wraps to the same bits.
    if kind == "i" and op in (ReduceOp.SUM, ReduceOp.PROD):
        kind = "u"
    number = _FUNCTIONS.get((op, f"{kind}{itemsize}"))
    return None if number is None else (number, itemsize)


def mpi_operator(op: ReduceOp, array: Array) -> Any:
    """Return MPI's operator for the numbers of `array`; for MEAN it is the sum."""
    # Sums of 8- and 16-bit integers on the host wrap, as in NumPy and in shared memory. MPI does
    # not define overflow, and Open MPI saturates as many of them as fill its vector registers.
    dtype = array.dtype
    if op is ReduceOp.SUM and dtype.itemsize < 4 and dtype.kind in "iu" and is_on_host(array):
        return _wrapping_sum(dtype.itemsize)
    return _mpi_operators()[op]


@functools.cache
def _mpi_operators() -> dict[ReduceOp, Any]:
    from mpi4py import MPI  # imported only when MPI is needed

    return {
        ReduceOp.SUM: MPI.SUM,
        ReduceOp.MEAN: MPI.SUM,
        ReduceOp.MIN: MPI.MIN,
        ReduceOp.MAX: MPI.MAX,
        ReduceOp.PROD: MPI.PROD,
    }


@functools.lru_cache
def _wrapping_sum(itemsize: int) -> Any:
    from mpi4py import MPI

    def add(source: Any, target: Any, datatype: MPI.Datatype) -> None:
        total = np.frombuffer(target, dtype)
        total += np.frombuffer(source, dtype)

    dtype = np.dtype(f"u{itemsize}")  # unsigned sums have the same bits as signed ones
    return MPI.Op.Create(add, commute=True)
