"""Random arrays of any dtype, shape and layout, and what their reduction is by definition."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from mpistrat import nests

CHARS = "?bhilqBHILQefdgFDG"
DTYPES = [*map(np.dtype, CHARS), np.dtype(bfloat16)]
OPS = ["sum", "mean", "prod", "min", "max"]
NARROW = ("float16", "bfloat16")


def can_reduce(op, dtype):
    """Return whether the dtype table has `dtype` for `op`."""
    kind = np.dtype(dtype).kind
    return kind != "c" if op in ("min", "max") else kind != "b"


def swapped(array):
    dtype = array.dtype
    return array if dtype == bfloat16 else array.astype(dtype.newbyteorder())


def unaligned(array):
    memory = np.zeros(array.nbytes + 1, np.uint8)
    moved = np.ndarray(array.shape, array.dtype, memory, 1)
    moved[...] = array
    return moved


def strided(array):
    wide = np.zeros((*array.shape, 2), array.dtype)
    wide[..., 1] = array
    return wide[..., 1]


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def repeated(array):
    """Return one row again and again, in the memory of one."""
    return np.broadcast_to(array[:1], array.shape) if array.ndim else array


LAYOUTS = {
    "C": lambda array: array,
    "Fortran": np.asfortranarray,
    "reversed": lambda array: array[::-1] if array.ndim else array,
    "transposed": lambda array: np.ascontiguousarray(array.T).T if array.ndim else array,
    **{each.__name__: each for each in (strided, read_only, repeated, swapped, unaligned)},
}


@nests.leaf_type
@dataclass(frozen=True)
class Spec:
    """What an array is like, but for its numbers."""

    dtype: np.dtype
    shape: tuple[int, ...]
    layout: str

    def build(self, *seed):
        """Return an array of small whole numbers, so that every order gives the same bits."""
        random = np.random.default_rng(np.hstack(seed))
        numbers = random.integers(0, 4, self.shape)
        if self.dtype.kind == "c":
            numbers = numbers + 1j * random.integers(0, 4, self.shape)
        # For 0-d shapes the generator returns numbers.
        return LAYOUTS[self.layout](np.asarray(numbers).astype(self.dtype))


SHAPES = st.one_of(
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    # Around 8, 16 and 64 KiB, where arrays begin to be treated in other ways.
    st.sampled_from([(1023,), (1024,), (2049,), (4096,), (64, 65), (8193,), (16384,), (2, 8192)]),
    st.sampled_from([(40_000,), (300, 7, 11)]),
)


def specs(op):
    """Return the strategy of arrays that `op` can reduce."""
    dtypes = [dtype for dtype in DTYPES if can_reduce(op, dtype)]
    return st.builds(Spec, st.sampled_from(dtypes), SHAPES, st.sampled_from([*LAYOUTS]))


def expected_of(op, rows):
    """Return the reduction of `rows`, small whole numbers, by the words of the documentation."""
    dtype = rows[0].dtype.newbyteorder("=")
    wide = np.dtype(np.float32) if dtype.name in NARROW else dtype
    if op == "mean" and dtype.kind in "iu":
        wide = dtype = np.dtype(np.float64)
    stacked = np.stack([row.astype(wide) for row in rows])
    if op in ("min", "max"):
        return getattr(stacked, op)(0).astype(dtype)
    total = stacked.prod(0, dtype=wide) if op == "prod" else stacked.sum(0, dtype=wide)
    if op == "mean":
        total = divided(np.asarray(total), len(rows))
    return total.astype(dtype)


def divided(total, size):
    """Divide, complex numbers by their parts."""
    if total.dtype.kind != "c":
        return total / total.dtype.type(size)
    result = np.empty_like(total)
    result.real, result.imag = divided(total.real, size), divided(total.imag, size)
    return result


def assert_own(results, inputs):
    """Assert that `results` can be written to, and share memory with nothing."""
    for number, result in enumerate(results):
        assert result.flags.writeable
        assert result.flags.c_contiguous
        assert result.flags.aligned
        assert result.dtype.isnative
        others = [*inputs, *results[:number]]
        assert not any(np.may_share_memory(result, other) for other in others)
