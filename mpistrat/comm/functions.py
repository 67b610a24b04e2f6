"""Which compiled function combines the numbers of a dtype."""

from __future__ import annotations

import functools

import numpy as np

from mpistrat.options import ReduceOp

__all__ = ["compiled_function"]

# As native/lanes.c numbers them.
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
    """Return the number of a function of ``native/lanes.c``, ``None`` where there is none. Local.

    Also the bytes of the numbers that MEAN divides: complex ones are two.
    """
    kind, itemsize = dtype.kind, dtype.itemsize
    if op is ReduceOp.MEAN:
        op = ReduceOp.SUM
        if kind not in "fc":
            return None
    if kind == "c" and op is ReduceOp.SUM:
        kind, itemsize = "f", itemsize // 2  # the parts are added one by one
    if kind == "i" and op in (ReduceOp.SUM, ReduceOp.PROD):
        kind = "u"
    number = _FUNCTIONS.get((op, f"{kind}{itemsize}"))
    return None if number is None else (number, itemsize)
