"""CUDA through CuPy, which only this module imports: streams, kernels, page-locked memory, NCCL.

It also contains the code that lets CuPy accept variables as operands.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np


def cupy() -> Any:
    """Return the module `cupy`. Raises ImportError if it is not installed."""
    return importlib.import_module("cupy")


def count_gpus() -> int:
    """Return the number of GPUs that cupy sees in this process; 0 without cupy."""
    try:
        return int(cupy().cuda.runtime.getDeviceCount())
    except Exception:  # cupy has its own error types for a missing driver, library or device
        return 0


class Stream:
    """A stream of a device: a queue of work that the device does in order."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @classmethod
    def new(cls) -> Stream:
        """Return a stream of the current device that waits for no other stream."""
        return cls(cupy().cuda.Stream(non_blocking=True))

    @classmethod
    def current(cls) -> Stream:
        """Return the stream on which this thread queues work for the current device."""
        return cls(cupy().cuda.get_current_stream())

    @property
    def pointer(self) -> int:
        """The stream as a pointer for C libraries."""
        pointer: int = self._stream.ptr
        return pointer

    def record(self) -> Any:
        """Return an event that is done when all current work in this stream is done."""
        event = cupy().cuda.Event(disable_timing=True)
        event.record(self._stream)
        return event

    def wait_event(self, event: Any) -> None:
        """Let work that is queued from now on wait for `event`."""
        self._stream.wait_event(event)

    def copy(self, target: Any, source: Any) -> None:
        """Queue a copy between the host and the device."""
        # Both arrays must exist until it is done, be in C order, and have equal length and dtype.
        runtime = cupy().cuda.runtime
        is_fetch = isinstance(target, np.ndarray)
        kind = runtime.memcpyDeviceToHost if is_fetch else runtime.memcpyHostToDevice
        addresses = [
            each.__array_interface__["data"][0] if isinstance(each, np.ndarray) else each.data.ptr
            for each in (target, source)
        ]
        runtime.memcpyAsync(*addresses, source.nbytes, kind, self.pointer)


def pinned_empty(size: int, dtype: np.dtype) -> np.ndarray:
    """Return a 1-d host array in page-locked memory, which CuPy's own pool recycles."""
    num_bytes = size * dtype.itemsize
    return np.frombuffer(cupy().cuda.alloc_pinned_memory(num_bytes), np.uint8, num_bytes).view(
        dtype
    )


def profiler_marks() -> tuple[Callable[[str], object], Callable[[], object]] | tuple[None, None]:
    """Return functions that begin and end an NVTX range; ``(None, None)`` without CuPy."""
    if "cupy" not in sys.modules or not count_gpus():
        return None, None
    nvtx = cupy().cuda.nvtx
    return nvtx.RangePush, nvtx.RangePop


def nccl_library() -> Any:
    """Return CuPy's NCCL module."""
    with warnings.catch_warnings():
        # Without libnccl CuPy warns on every rank. The error below reports it to callers instead.
        warnings.simplefilter("ignore")
        library = importlib.import_module("cupy.cuda.nccl")
    if not getattr(library, "available", False):
        raise ImportError("cupy does not find NCCL (python -c 'from cupy.cuda import nccl')")
    return library


COMPILER_OPTIONS = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")


def launch_kernel(code: str, name: str, grid: int, block: int, arguments: tuple[Any, ...]) -> None:
    """Queue the kernel called `name` in `code`, CUDA C++, on the current device and stream.

    It rounds like the host: no product is fused with a sum, and subnormal numbers are kept.
    """
    device = cupy().cuda.runtime.getDevice()
    _loaded_kernel(code, name, device)((grid, 1, 1), (block, 1, 1), arguments)


@functools.lru_cache
def _loaded_kernel(code: str, name: str, device: int) -> Any:
    # A cupy.RawKernel flushes subnormal numbers to zero, because CuPy always adds that option.
    cuda = cupy().cuda
    filename = f"{name}.cu"
    compiled, _ = cuda.compiler.compile_using_nvrtc(code, COMPILER_OPTIONS, filename=filename)
    module = cuda.function.Module()
    module.load(compiled)
    return module.get_function(name)


_DEVICE_CHARS = "?bBhHiIlLqQefdFD"


def has_device_dtype(array: Any) -> bool:
    """Return whether CuPy has the dtype of `array`; not text, dates, long double or records."""
    dtype = array.dtype
    return dtype.char in _DEVICE_CHARS or dtype.name == "bfloat16"


_PROTOCOL = "__cupy_get_ndarray__"


class ForNumPy:
    """Decorator of ``__array_ufunc__`` that NumPy sees and CuPy does not.

    ``x @ w`` with a CuPy array `x` fails if the variable `w` has ``__array_ufunc__``: CuPy then
    computes the product itself, but its matrix product does not accept variables. Without the
    attribute, CuPy leaves the operator to the operand with the higher ``__array_priority__``. NumPy
    looks it up in the class, CuPy in the instance.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        if instance is not None:
            raise AttributeError("__array_ufunc__ is found in the class only")
        return self._function


class _Namespace(types.ModuleType):
    """A module whose functions are wrapped when they are first used."""

    # CuPy asks variables for their array only in element-wise functions; the others raise.

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(module.__name__, module.__doc__)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if isinstance(found, types.ModuleType):
            found = _Namespace(found)
        elif callable(found) and not isinstance(found, type):
            found = _wrapped(found)
        # `__getattr__` is called only for missing names, so the next access is direct.
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        return dir(self._module)


def array_namespace() -> Any:
    """Return CuPy's array namespace."""
    return importlib.import_module("array_api_compat.cupy")


@functools.lru_cache
def namespace_with_variables() -> Any:
    """Return CuPy's array namespace with functions that also accept variables."""
    return _Namespace(array_namespace())


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(
            *[_array_in(each) for each in args],
            **{name: _array_in(each) for name, each in kwargs.items()},
        )

    for name in ("__name__", "__qualname__", "__doc__"):
        setattr(call, name, getattr(function, name, None) or "")
    return call


def _array_in(value: Any) -> Any:
    """Return `value` with the arrays of variables, also of variables in a list or tuple."""
    kind = type(value)
    if hasattr(kind, _PROTOCOL):
        return value.__cupy_get_ndarray__()
    if kind in (list, tuple) and any(hasattr(type(each), _PROTOCOL) for each in value):
        return kind(_array_in(each) for each in value)
    return value
