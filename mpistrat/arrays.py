"""Arrays and devices, on the host and on GPUs.

Higher layers use `xp`, the namespace of the given array (NumPy or CuPy through array-api-compat).
They call this module if host and device need different code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import numbers
import operator
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import array_api_compat
import numpy as np
import numpy.typing as npt

from mpistrat import cuda_api
from mpistrat.errors import LaunchError
from mpistrat.native import native_library
from mpistrat.pytorch import as_own_dtype, host_array, is_tensor
from mpistrat.sharding import cut

Array: TypeAlias = npt.NDArray[Any]
"""A NumPy or CuPy array. The two have the same methods but no common base class, so type checkers
see NumPy's. Functions that distinguish the two take `Any`."""


@dataclass(frozen=True)
class Device:
    """The device on which a replica computes."""

    kind: str
    """``"cpu"`` or ``"gpu"``."""
    index: int = 0
    """Number of the device among the devices that this process sees."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"

    def on_task(self, task: int) -> str:
        """Return the full device string of this device on rank `task`."""
        return f"/job:worker/replica:0/task:{task}/device:{self.kind.upper()}:{self.index}"

    @staticmethod
    def parse(device: str) -> tuple[str, int | None]:
        """Return kind and number in a ``device=`` argument; the number is ``None`` if not given."""
        if not isinstance(device, str):
            raise TypeError(f'device must be a string such as "auto" or "gpu:0", not {device!r}.')
        named = device.lower().replace("cuda", "gpu")  # PyTorch's name for it
        match = re.fullmatch(r"(auto|cpu|gpu)(?:(?<=cpu):0|(?<=gpu):(\d+))?", named)
        if match is None:
            raise ValueError(f'Unknown device {device!r}. Use "auto", "cpu", "gpu" or "gpu:K".')
        return match[1], int(match[2]) if match[2] else None

    @classmethod
    def resolve(cls, device: str, local_rank: int) -> Device:
        """Return the device for the ``device=`` argument of a strategy on this rank."""
        kind, index = cls.parse(device)
        if kind == "cpu":
            return cls("cpu")
        num_gpus = cuda_api.count_gpus()
        if kind == "auto":
            return cls("gpu", local_rank % num_gpus) if num_gpus else cls("cpu")
        index = local_rank % max(num_gpus, 1) if index is None else index
        if index >= num_gpus:
            raise LaunchError(
                f"device={device!r} asks for GPU {index}, but cupy sees {num_gpus} GPUs in this "
                'process. Install cupy and check CUDA_VISIBLE_DEVICES, or use device="cpu".'
            )
        return cls("gpu", index)

    def namespace(self) -> Any:
        """Return the array namespace `xp` of this device, and make the device current."""
        if self.kind == "gpu":
            cuda_api.cupy().cuda.Device(self.index).use()
            return cuda_api.namespace_with_variables()
        return _numpy()

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this device is the current one."""
        if self.kind != "gpu":
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = cuda_api.cupy().cuda.Device(self.index)
        return context

    @staticmethod
    def for_threads() -> Callable[[], object]:
        """Return a function that makes this thread's current device current in a new thread."""
        # CUDA selects device 0 in new threads, which may be the GPU of a different rank.
        if "cupy" not in sys.modules or not cuda_api.count_gpus():
            return bool
        device = cuda_api.cupy().cuda.Device()
        use: Callable[[], object] = device.use if device.id else bool
        return use

    def synchronize(self) -> None:
        """Wait until the device has completed all work that this process has queued."""
        if self.kind == "gpu":
            with self.current():
                cuda_api.cupy().cuda.runtime.deviceSynchronize()

    def gpu_identity(self) -> str:
        """Return a text that identifies a GPU within the job."""
        uuid = bytes(cuda_api.cupy().cuda.runtime.getDeviceProperties(self.index)["uuid"]).hex()
        return f"{self.pci_address()} {uuid}"

    def pci_address(self) -> str:
        """Return the address of a GPU on its bus, such as ``"0000:3B:00.0"``."""
        return str(cuda_api.cupy().cuda.Device(self.index).pci_bus_id)

    def describe_gpu(self) -> str:
        """Return model and memory of a GPU as text for messages."""
        properties = cuda_api.cupy().cuda.runtime.getDeviceProperties(self.index)
        return f"{properties['name'].decode()} {properties['totalGlobalMem'] / 2**30:.0f} GiB"


@functools.lru_cache
def _numpy() -> Any:
    return importlib.import_module("array_api_compat.numpy")


def on_device(array: Any) -> Any:
    """Return `array` as a CuPy array, for CuPy functions that are called with a variable."""
    return cuda_api.cupy().asarray(array)


def namespace_of(array: Any) -> Any:
    """Return the array namespace `xp` that `array`, list or number belongs to."""
    if type(array) is np.ndarray or not array_api_compat.is_cupy_array(array):
        return _numpy()
    return cuda_api.array_namespace()


def is_on_host(array: Any) -> bool:
    """Return whether NumPy can use the memory of `array`."""
    return isinstance(array, np.ndarray) or not array_api_compat.is_cupy_array(array)


def is_array(value: object) -> bool:
    """Return whether `value` is a NumPy or CuPy array or a NumPy scalar other than a string."""
    if isinstance(value, np.generic):
        return value.dtype.kind in "biufcmMV"
    return isinstance(value, np.ndarray) or array_api_compat.is_cupy_array(value)


_ON_HOST, _ON_CUDA = (1, 3), (2, 13)
"""DLPack's device types: plain and pinned host memory; CUDA device and managed memory."""


def is_foreign(value: object) -> bool:
    """Return whether `value` is an array of a library other than NumPy, CuPy and PyTorch."""
    # Looked up in the class, because an object's ``__getattr__`` may accept every name.
    return hasattr(type(value), "__dlpack__") and not is_array(value) and not is_tensor(value)


def adopted(what: str, value: Any) -> Array:
    """Return an array of a foreign library, such as JAX, as a NumPy array, or CuPy on a device."""
    # Without a copy if DLPack has the dtype. It lacks bfloat16, which NumPy gets by __array__.
    try:
        # Asked first, because `from_dlpack` of the wrong library fails.
        device_type, _ = value.__dlpack_device__()
        if device_type in _ON_HOST:
            host: Array = np.from_dlpack(value)
            return host
        if device_type in _ON_CUDA:
            on_gpu: Array = cuda_api.cupy().from_dlpack(value)
            return on_gpu
        reason = f"it is on DLPack's device {int(device_type)}"
    except (BufferError, ImportError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
    if hasattr(type(value), "__array__"):
        return np.asarray(value)
    raise TypeError(
        f"{what} cannot take an array of type {type(value).__name__} through DLPack: {reason}. "
        "Copy it to the host, as a NumPy array."
    )


def array_of_tensor(tensor: Any) -> Array:
    """Return a PyTorch tensor as an array: a CuPy array on a GPU, if CuPy can be used."""
    if not tensor.is_cuda or not tensor.numel() or not cuda_api.count_gpus():
        return host_array(tensor)
    plain = as_own_dtype(tensor)
    try:
        array: Array = cuda_api.cupy().from_dlpack(plain)
    except (BufferError, RuntimeError, TypeError, ValueError):  # a dtype that CuPy lacks
        return host_array(plain)
    return array


def is_number(value: object) -> bool:
    """Return whether `value` is a number. Bools count as numbers."""
    return isinstance(value, numbers.Number)


def address_of(array: Any) -> int:
    """Return the address where the memory of `array` begins, on the host or its device."""
    if not isinstance(array, np.ndarray):
        return int(array.data.ptr)
    library = native_library()
    if library is None:
        return int(array.__array_interface__["data"][0])
    return int(library.address(array))


def span_of(array: Any) -> tuple[int, int]:
    """Return the addresses where the memory of the C-ordered `array` begins and ends."""
    begin = address_of(array)
    return begin, begin + array.nbytes


def addresses_function() -> Callable[[list[np.ndarray]], bytes]:
    """Return a function that returns the addresses of host arrays as a C array of pointers."""
    library = native_library()
    if library is None:
        return lambda arrays: np.array([address_of(each) for each in arrays], np.uintp).tobytes()
    compiled: Callable[[list[np.ndarray]], bytes] = library.addresses
    return compiled


def native(array: np.ndarray) -> np.ndarray:
    """Return `array` in C order and the machine's byte order; `array` itself if it already is."""
    return np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")


def host_view(array: Any) -> np.ndarray:
    """Return an array or number as a NumPy array, without a copy if it is one.

    A device array is copied to page-locked memory. The caller should use the copy and drop it soon.
    """
    if is_on_host(array):
        return np.asarray(array)
    if not _MIN_PINNED_BYTES <= array.nbytes <= _MAX_PINNED_BYTES:
        return np.asarray(array.get())
    target = cuda_api.pinned_empty(array.size, array.dtype).reshape(array.shape)
    return np.asarray(array.get(out=target))


_MIN_PINNED_BYTES, _MAX_PINNED_BYTES = 2**14, 2**26
"""Copies to page-locked memory are ten times as fast, but it is scarce and slow to allocate."""


def as_index(value: Any) -> int:
    """Return an integer or an array with one as an ``int``. CuPy arrays lack ``__index__``."""
    return operator.index(host_view(value) if is_array(value) else value)


def host_copy_to_send(array: Any) -> np.ndarray:
    """Return a copy in host memory, like `host_copy`, which the caller sends and then drops."""
    return host_copy(array) if is_on_host(array) else host_view(array)


def host_result(array: Any) -> np.ndarray:
    """Return `array` in host memory that the program may keep; no copy if it is there already."""
    return np.asarray(array) if is_on_host(array) else np.asarray(array.get())


def host_copy(array: Any) -> np.ndarray:
    """Return a writable copy of `array` in host memory, C order and native byte order."""
    if is_on_host(array):
        source = np.asarray(array)
        return np.array(source, dtype=source.dtype.newbyteorder("="), order="C")
    return np.asarray(array.get())


def place(array: Any, device: Device) -> Array:
    """Return `array` on `device`; `array` itself if it is already there."""
    if device.kind != "gpu":
        return host_view(array)
    if is_on_host(array) or array.device.id != device.index:
        with device.current():  # the current device of the program is restored afterwards
            array = device.namespace().asarray(array)
    on_gpu: Array = array
    return on_gpu


def taken(array: Any, index: Any) -> Any:
    """Return ``array[index]``, also if one is on the host and the other on a device."""
    if isinstance(index, tuple):
        return array[tuple(_index_for(array, each) for each in index)]
    return array[_index_for(array, index)]


def _index_for(array: Any, index: Any) -> Any:
    if not isinstance(index, np.ndarray) and is_on_host(index):
        return index
    return host_view(index) if is_on_host(array) else namespace_of(array).asarray(index)


def synchronize(array: Any) -> None:
    """Wait until the device has completed the work that this thread has queued for `array`."""
    # MPI does not know streams: it reads and writes memory at once. So this must be called before
    # device memory is passed to MPI, as source or target. It waits only for the current stream.
    # Host arrays are always ready.
    if not is_on_host(array):
        with array.device:
            cuda_api.cupy().cuda.get_current_stream().synchronize()


def on_device_of(array: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the device of `array` is the current one."""
    return contextlib.nullcontext() if is_on_host(array) else array.device


def pieces(array: Array, bytes_per_piece: int) -> list[Array]:
    """Return 1-d views that cover a C-ordered `array`, each with at least one element."""
    flat = array.reshape(-1)
    if 0 < flat.nbytes <= bytes_per_piece:
        return [flat]
    return [flat[each] for each in cut(flat.size, max(1, bytes_per_piece // flat.itemsize))]


def array_at_function() -> Callable[[int, tuple[int, ...], np.dtype, object], np.ndarray]:
    """Return a function that creates a C-ordered array at an address and keeps its owner alive."""
    library = native_library()
    function: Callable[..., np.ndarray] = _array_at if library is None else library.array_at
    return function


def _array_at(address: int, shape: tuple[int, ...], dtype: np.dtype, owner: object) -> np.ndarray:
    bytes_there = _Bytes(address, math.prod(shape) * dtype.itemsize, owner)
    return np.asarray(bytes_there).view(dtype).reshape(shape)


class _Bytes:
    """Memory with NumPy's array interface, and the object that keeps it alive."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (num_bytes,),
            "data": (address, False),
        }


def is_plain(array: Any) -> bool:
    """Return whether `array` is a plain `numpy.ndarray` that can be sent without a copy."""
    if type(array) is not np.ndarray:
        return False
    flags = array.flags
    return bool(flags.c_contiguous and flags.aligned and array.dtype.isnative)


def in_memory_of(array: Any, target: np.ndarray) -> Any:
    """Return the plain `target` if a plain `array` is the same memory, else `array`.

    MPI works in place only if both are the same object (MPI 4.1, section 6.1).
    """
    if array is target or type(array) is not np.ndarray or array.dtype != target.dtype:
        return array
    is_same = array.shape == target.shape and address_of(array) == address_of(target)
    return target if is_same and is_plain(array) else array


def are_apart(arrays: Sequence[Any], targets: Sequence[np.ndarray]) -> bool:
    """Return whether each of `targets` overlaps at most with its own array, and then entirely."""
    own = list(map(_span, targets))
    spans = [(*span, True) for span in own]
    for array, span_of_target in zip(arrays, own, strict=True):
        if not isinstance(array, np.ndarray):
            continue  # it will be copied to the host
        span = _span(array)
        if span != span_of_target or not is_plain(array):
            spans.append((*span, False))
    return are_disjoint(spans)


def are_disjoint(spans: Iterable[tuple[int, int, bool]]) -> bool:
    """Return whether no memory that is written to overlaps with other memory.

    `spans` contains begin and end of each memory, and whether it is written to.
    """
    end_of_targets = end_of_all = 0
    # Sorted by begin, so that each only has to be compared with the furthest end so far.
    for begin, end, is_target in sorted(spans):
        # Two arrays that are only read may overlap.
        if begin < (end_of_all if is_target else end_of_targets) and begin < end:
            return False
        end_of_all = max(end_of_all, end)
        if is_target:
            end_of_targets = max(end_of_targets, end)
    return True


def _span(array: np.ndarray) -> tuple[int, int]:
    """Return addresses between which the memory of `array` is, as narrow as possible."""
    begin: int = address_of(array)
    # Strides may be negative. Then the memory begins before the first element.
    reach = [
        stride * (n - 1) for stride, n in zip(array.strides, array.shape, strict=True) if array.size
    ]
    low, high = (sum(each for each in reach if (each < 0) is sign) for sign in (True, False))
    return begin + low, begin + high + (array.itemsize if array.size else 0)
