"""The host kernels as compiled by setup.py, where a C compiler was at hand."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mpistrat.arrays import addresses_of
from mpistrat.compiled import find_library
from mpistrat.optimizers.kernels import Kernel, digest
from mpistrat.optimizers.rule import Memory

__all__ = ["HostKernel", "compiled_kernel"]

_NUMBERS = {"f": ctypes.c_float, "d": ctypes.c_double, "g": ctypes.c_longdouble}

HostKernel = Callable[[Memory, list[np.ndarray], Sequence[float]], None]
"""``kernel(memory, gradients, (keep, factor, *constants))`` on arrays of one real dtype."""


@functools.lru_cache
def compiled_kernel(kernel: Kernel, dtype: np.dtype) -> HostKernel | None:
    """Return the function for `kernel`, ``None`` where there is none for `dtype`. Local."""
    library = _library()
    number = _NUMBERS.get(dtype.char)
    if library is None or number is None:
        return None
    function = library[f"{kernel.name}_{dtype.char}"]
    num_numbers = 2 + len(kernel.constants)
    function.argtypes = [ctypes.c_ssize_t, *[ctypes.c_char_p] * 3, *[number] * num_numbers]
    function.restype = None

    def call(memory: Memory, gradients: list[np.ndarray], numbers: Sequence[float]) -> None:
        function(memory.count, memory.sizes, addresses_of(gradients), memory.addresses, *numbers)

    return call


@functools.lru_cache
def _library() -> ctypes.CDLL | None:
    path = find_library(Path(__file__).parent, "_host_kernels", digest())
    return None if path is None else ctypes.CDLL(path)
