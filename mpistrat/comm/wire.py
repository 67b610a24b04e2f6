"""Wire format: dtypes of messages, casts to them, ordered keys."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpistrat.arrays import Array, host_view, is_on_host
from mpistrat.options import ReduceOp
from mpistrat.sharding import cut

TEXT_KINDS = "SU"
"""Kinds of dtype whose width is the width of the longest string in an array."""

_INTEGERS = "bhilqBHILQ"
_FLOATS = "fdg"
_COMPLEX = "FDG"
_NARROW = ("float16", "bfloat16")


@functools.lru_cache
def wire_dtype(op: ReduceOp, dtype: np.dtype, asked: str | None = None) -> np.dtype:
    """Return the dtype in messages when arrays of `dtype` are reduced by `op`."""
    # `asked` is `CommunicationOptions.wire_dtype`, for floats with SUM and MEAN. 16-bit floats are
    # then sent as they are, whichever dtype is requested; otherwise they are sent as float32.
    if asked is not None and op in (ReduceOp.SUM, ReduceOp.MEAN):
        if is_narrow(dtype):
            return _native(dtype)
        if dtype.char in _FLOATS:
            return named_dtype(asked)
    if is_narrow(dtype):
        return np.dtype(np.float32)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        if dtype.char == "?":
            return np.dtype(np.uint8)
        if dtype.char in _INTEGERS + _FLOATS:
            return _native(dtype)
    else:
        if dtype.char in _INTEGERS:
            return np.dtype(np.float64) if op is ReduceOp.MEAN else _native(dtype)
        if dtype.char in _FLOATS + _COMPLEX:
            return _native(dtype)
        if dtype.char == "?":
            raise TypeError(
                f"{op.name} of bool arrays has no meaning: cast first, for example "
                "array.astype(numpy.int64). MIN (all) and MAX (any) work."
            )
    works = "integers and floats" + (
        ", bool" if op in (ReduceOp.MIN, ReduceOp.MAX) else ", complex"
    )
    raise TypeError(f"{op.name} cannot reduce arrays of dtype {dtype}; {works} can be reduced.")


@functools.lru_cache
def result_dtype(op: ReduceOp, dtype: np.dtype) -> np.dtype:
    """Return the dtype of the result: the array's, but float64 for MEAN of integers."""
    if op is ReduceOp.MEAN and dtype.char in _INTEGERS:
        return np.dtype(np.float64)
    return _native(dtype)


def identity(op: ReduceOp, wire: np.dtype, dtype: np.dtype) -> Any:
    """Return the identity of `op` for `dtype`, which is sent as `wire`."""
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return int(op is ReduceOp.PROD)
    is_min = op is ReduceOp.MIN
    if dtype.kind == "b":
        return int(is_min)
    if wire.kind in "iu":
        info = np.iinfo(wire)
        return info.max if is_min else info.min
    return np.inf if is_min else -np.inf


@functools.lru_cache
def is_narrow(dtype: np.dtype) -> bool:
    """Return whether `dtype` is a 16-bit float, which is too narrow for sums."""
    return dtype.name in _NARROW


def is_floating(dtype: np.dtype) -> bool:
    """Return whether `dtype` is one of the supported real floats."""
    return dtype.char in _FLOATS or is_narrow(dtype)


def accumulator_dtype(wire: np.dtype) -> np.dtype:
    """Return the dtype in which messages of dtype `wire` are added up."""
    return np.dtype(np.float32) if is_narrow(wire) else wire


def named_dtype(name: str) -> np.dtype:
    """Return the dtype of a name, also for ml_dtypes and structures, such as "[('a', '<i4')]"."""
    if name.startswith(("[", "{")):
        structure: np.dtype = np.dtype(ast.literal_eval(name))
        return structure
    if name == "bfloat16" or name.startswith("float8_"):
        dtype: np.dtype = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
        return dtype
    return np.dtype(name)


def _native(dtype: np.dtype) -> np.dtype:
    swapped: np.dtype = dtype.newbyteorder("=")
    return swapped


_SMALLEST_NORMAL = 2.0**-14
_SUBNORMAL_BITS = 24
"""Subnormal numbers of float16 are multiples of 2**-24."""

_CHUNK = 2**14
"""Number of elements at a time, so that temporaries stay in the cache."""


def cast(array: np.ndarray, dtype: np.dtype, copy: bool = False) -> np.ndarray:
    """Return `array` in C order, rounded to `dtype`; overflow gives inf, as in MPI."""
    if array.dtype == dtype and array.flags.c_contiguous and not copy:
        return array
    result = np.empty(array.shape, dtype)
    cast_into(result, array)
    return result


def cast_into(target: np.ndarray, array: np.ndarray) -> None:
    """Overwrite `target` with `array`, rounded to its dtype; overflow gives inf."""
    if target.dtype == array.dtype:
        target[...] = array
        return
    with np.errstate(all="ignore"):
        if _is_wide(array.dtype) and target.dtype == np.float16:
            for part, source in _chunks(target, array):
                _round(part, source)
        elif array.dtype == np.float16 and _is_wide(target.dtype):
            for part, source in _chunks(target, array):
                part[...] = _widened()[source.view(np.uint16)]
        else:
            target[...] = array


def _is_wide(dtype: np.dtype) -> bool:
    return dtype.char in "fdg"


def _chunks(target: np.ndarray, array: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield 1-d parts of both, in native byte order; writes to the first array's parts are kept."""
    with np.nditer(
        [target, array],
        ["external_loop", "buffered", "zerosize_ok"],
        [["writeonly"], ["readonly"]],
        [target.dtype, array.dtype.newbyteorder("=")],
        buffersize=_CHUNK,
    ) as parts:
        yield from parts


def _round(target: np.ndarray, array: np.ndarray) -> None:
    """Round to float16, to nearest and even, as NumPy does."""
    is_small = np.abs(array) < _SMALLEST_NORMAL
    if is_small.any():
        # Next to this number the spacing of the wide dtype is the spacing of the subnormal numbers.
        mantissa_bits = np.finfo(array.dtype).nmant
        anchor = np.copysign(array.dtype.type(2.0 ** (mantissa_bits - _SUBNORMAL_BITS)), array)
        # Adding the anchor rounds to the spacing of subnormal float16, to nearest and even, in one
        # step; subtracting it again is exact. `copysign` keeps the sign of zero.
        rounded = np.copysign((array + anchor) - anchor, array)
        array = np.where(is_small, rounded, array)
    target[...] = array


@functools.lru_cache(maxsize=1)
def _widened() -> np.ndarray:
    """Return every float16 as float32, at the position of its bits."""
    return np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)


_SIGNED = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}

_PART = 2**17
"""Number of elements at a time, for the same reason."""


def _is_reordered(op: ReduceOp, dtype: np.dtype) -> bool:
    """Return whether numbers of `dtype` are sent as integers for `op`."""
    return dtype in _SIGNED and op in (ReduceOp.MIN, ReduceOp.MAX)


def as_ordered_integers(op: ReduceOp, buffer: Array) -> Array:
    """Rewrite the floats of `buffer` in place, and return it as integers to reduce."""
    # MPI does not define MIN and MAX of NaN; the order of integers is the same everywhere. Other
    # dtypes stay unchanged, also longdouble, which has no integer of the same size.
    if not _is_reordered(op, buffer.dtype):
        return buffer
    keys = buffer.view(_SIGNED[buffer.dtype])
    for part in _parts(keys):
        is_nan = np.isnan(part.view(buffer.dtype))
        _flip_negatives(part)
        # The integer that wins under `op`: a NaN of any rank is then the result, as in NumPy.
        part[is_nan] = _beyond(op, keys.dtype)
    return keys


def as_floats(op: ReduceOp, keys: Array, dtype: np.dtype) -> Array:
    """Reverse `as_ordered_integers` in place, and return the numbers as `dtype`."""
    if keys.dtype == dtype:
        return keys
    for part in _parts(keys):
        is_nan = part == _beyond(op, keys.dtype)
        _flip_negatives(part)
        part.view(dtype)[is_nan] = np.nan
    return keys.view(dtype)


def _parts(keys: Array) -> list[Array]:
    """Return parts of `keys`; one part if it is on a device."""
    if keys.size <= _PART or not is_on_host(keys):
        return [keys]
    flat = keys.reshape(-1)
    return [flat[each] for each in cut(flat.size, _PART)]


def _flip_negatives(keys: Array) -> None:
    # If a float is negative, its bits decrease as it rises: flip all but the sign. Flipping twice
    # restores it.
    keys ^= (keys >> (8 * keys.itemsize - 1)) & np.iinfo(keys.dtype).max


def _beyond(op: ReduceOp, dtype: np.dtype) -> int:
    info = np.iinfo(dtype)
    return int(info.max if op is ReduceOp.MAX else info.min)


def with_width(array: Array, itemsize: int) -> np.ndarray:
    """Return `array` in host memory, with strings `itemsize` bytes wide per element."""
    host, kind = host_view(array), array.dtype.kind
    if kind not in TEXT_KINDS or host.itemsize == itemsize:
        return host
    return host.astype(f"{kind}{itemsize // np.dtype(f'{kind}1').itemsize}")
