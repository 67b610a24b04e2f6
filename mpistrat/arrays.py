"""Arrays and devices, on the host and on GPUs.

Everything above works on `xp`, the namespace of the given array (NumPy or CuPy through
array-api-compat), and asks here where host and device differ.
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
"""A NumPy or CuPy array. The two share no base class, but the methods, so type checkers see
NumPy's. Functions that tell the two apart take `Any`."""


@dataclass(frozen=True)
class Device:
    """Where a replica computes."""

    kind: str
    """``"cpu"`` or ``"gpu"``."""
    index: int = 0
    """Number of the device among those this process sees."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"

    def on_task(self, task: int) -> str:
        """Return the full device string of this device on rank `task`."""
        return f"/job:worker/replica:0/task:{task}/device:{self.kind.upper()}:{self.index}"

    @staticmethod
    def parse(device: str) -> tuple[str, int | None]:
        """Return kind and number in the ``device=`` argument of a strategy, ``None`` for any."""
        if not isinstance(device, str):
            raise TypeError(f'device must be a string such as "auto" or "gpu:0", not {device!r}.')
        named = device.lower().replace("cuda", "gpu")  # the name that PyTorch has for it
        match = re.fullmatch(r"(auto|cpu|gpu)(?:(?<=cpu):0|(?<=gpu):(\d+))?", named)
        if match is None:
            raise ValueError(f'Unknown device {device!r}. Use "auto", "cpu", "gpu" or "gpu:K".')
        return match[1], int(match[2]) if match[2] else None

    @classmethod
    def resolve(cls, device: str, local_rank: int) -> Device:
        """Return the device that the ``device=`` argument of a strategy means on this rank."""
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
        """Return what a new thread calls to have the current device of this one."""
        # CUDA gives a thread device 0 at first, which may be the GPU of another rank.
        if "cupy" not in sys.modules or not cuda_api.count_gpus():
            return bool
        device = cuda_api.cupy().cuda.Device()
        use: Callable[[], object] = device.use if device.id else bool
        return use

    def synchronize(self) -> None:
        """Wait until it has done all that this process has queued."""
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
        """Return model and memory of a GPU, to be printed."""
        properties = cuda_api.cupy().cuda.runtime.getDeviceProperties(self.index)
        return f"{properties['name'].decode()} {properties['totalGlobalMem'] / 2**30:.0f} GiB"


@functools.lru_cache
def _numpy() -> Any:
    return importlib.import_module("array_api_compat.numpy")


def on_device(array: Any) -> Any:
    """Return `array` as CuPy's, for CuPy's functions that are given a variable."""
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
    """Return whether `value` is a NumPy or CuPy array or a NumPy scalar but a string."""
    if isinstance(value, np.generic):
        return value.dtype.kind in "biufcmMV"
    return isinstance(value, np.ndarray) or array_api_compat.is_cupy_array(value)


_ON_HOST, _ON_CUDA = (1, 3), (2, 13)
"""DLPack's numbers of devices: plain and pinned memory, and CUDA's own and managed one."""


def is_foreign(value: object) -> bool:
    """Return whether `value` is an array of a library other than NumPy, CuPy and PyTorch."""
    # Looked up in the class: an object may answer to every name.
    return hasattr(type(value), "__dlpack__") and not is_array(value) and not is_tensor(value)


def adopted(what: str, value: Any) -> Array:
    """Return an array of another library, such as JAX, as NumPy's, or as CuPy's on a device."""
    # Without a copy where DLPack has the dtype. It lacks bfloat16, which NumPy gets by __array__.
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
    """Return the array of a PyTorch tensor: CuPy's for one on a GPU, if CuPy can be used."""
    if not tensor.is_cuda or not tensor.numel() or not cuda_api.count_gpus():
        return host_array(tensor)
    plain = as_own_dtype(tensor)
    try:
        array: Array = cuda_api.cupy().from_dlpack(plain)
    except (BufferError, RuntimeError, TypeError, ValueError):  # a dtype that CuPy lacks
        return host_array(plain)
    return array


def is_number(value: object) -> bool:
    """Return whether `value` is a number; bools are."""
    return isinstance(value, numbers.Number)


def address_of(array: Any) -> int:
    """Return where the memory of `array` begins, on the host or its device."""
    if not isinstance(array, np.ndarray):
        return int(array.data.ptr)
    library = native_library()
    if library is None:
        return int(array.__array_interface__["data"][0])
    return int(library.address(array))


def span_of(array: Any) -> tuple[int, int]:
    """Return where the memory of `array`, in C order, begins and ends."""
    begin = address_of(array)
    return begin, begin + array.nbytes


def addresses_function() -> Callable[[list[np.ndarray]], bytes]:
    """Return what finds where the memory of each host array begins, as C has a list of pointers."""
    library = native_library()
    if library is None:
        return lambda arrays: np.array([address_of(each) for each in arrays], np.uintp).tobytes()
    compiled: Callable[[list[np.ndarray]], bytes] = library.addresses
    return compiled


def native(array: np.ndarray) -> np.ndarray:
    """Return `array` in C order and the machine's byte order, itself where it already is."""
    return np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")


def host_view(array: Any) -> np.ndarray:
    """Return `array` or number as a NumPy array, without a copy where it is one.

    Of a device array it is a copy in page-locked memory, to be used and dropped.
    """
    if is_on_host(array):
        return np.asarray(array)
    if not _MIN_PINNED_BYTES <= array.nbytes <= _MAX_PINNED_BYTES:
        return np.asarray(array.get())
    target = cuda_api.pinned_empty(array.size, array.dtype).reshape(array.shape)
    return np.asarray(array.get(out=target))


_MIN_PINNED_BYTES, _MAX_PINNED_BYTES = 2**14, 2**26
"""Page-locked memory takes copies ten times as fast, but is scarce and takes long to get."""


def as_index(value: Any) -> int:
    """Return an integer, or an array of one, as an ``int``; CuPy's arrays have no ``__index__``."""
    return operator.index(host_view(value) if is_array(value) else value)


def host_copy_to_send(array: Any) -> np.ndarray:
    """Return a copy in host memory, as `host_copy` does, to be sent and dropped."""
    return host_copy(array) if is_on_host(array) else host_view(array)


def host_result(array: Any) -> np.ndarray:
    """Return `array` in host memory that the program may keep, without a copy where it is there."""
    return np.asarray(array) if is_on_host(array) else np.asarray(array.get())


def host_copy(array: Any) -> np.ndarray:
    """Return a writable copy of `array` in host memory, C order and native byte order."""
    if is_on_host(array):
        source = np.asarray(array)
        return np.array(source, dtype=source.dtype.newbyteorder("="), order="C")
    return np.asarray(array.get())


def place(array: Any, device: Device) -> Array:
    """Return `array` on `device`, itself where it already is there."""
    if device.kind != "gpu":
        return host_view(array)
    if is_on_host(array) or array.device.id != device.index:
        with device.current():  # the current one of the program stays
            array = device.namespace().asarray(array)
    on_gpu: Array = array
    return on_gpu


def taken(array: Any, index: Any) -> Any:
    """Return ``array[index]``, also where one is on the host and the other on a device."""
    if isinstance(index, tuple):
        return array[tuple(_index_for(array, each) for each in index)]
    return array[_index_for(array, index)]


def _index_for(array: Any, index: Any) -> Any:
    if not isinstance(index, np.ndarray) and is_on_host(index):
        return index
    return host_view(index) if is_on_host(array) else namespace_of(array).asarray(index)


def synchronize(array: Any) -> None:
    """Wait until the device has done what this thread has queued for `array`."""
    # MPI knows no streams: it reads and writes memory at once. So device memory passes here before
    # MPI sees it, as source or as target. Work on other streams than the current one is not waited
    # for. Host arrays are always ready.
    if not is_on_host(array):
        with array.device:
            cuda_api.cupy().cuda.get_current_stream().synchronize()


def on_device_of(array: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the device where `array` lies is the current one."""
    return contextlib.nullcontext() if is_on_host(array) else array.device


def pieces(array: Array, bytes_per_piece: int) -> list[Array]:
    """Return 1-d views that cover a C-ordered `array`, each with at least one element."""
    flat = array.reshape(-1)
    if 0 < flat.nbytes <= bytes_per_piece:
        return [flat]
    return [flat[each] for each in cut(flat.size, max(1, bytes_per_piece // flat.itemsize))]


def array_at_function() -> Callable[[int, tuple[int, ...], np.dtype, object], np.ndarray]:
    """Return what makes a C-ordered array at an address, which keeps the owner of it alive."""
    library = native_library()
    function: Callable[..., np.ndarray] = _array_at if library is None else library.array_at
    return function


def _array_at(address: int, shape: tuple[int, ...], dtype: np.dtype, owner: object) -> np.ndarray:
    bytes_there = _Bytes(address, math.prod(shape) * dtype.itemsize, owner)
    return np.asarray(bytes_there).view(dtype).reshape(shape)


class _Bytes:
    """Memory as NumPy takes it, and the object that keeps it alive."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (num_bytes,),
            "data": (address, False),
        }


def is_plain(array: Any) -> bool:
    """Return whether `array` is a plain `numpy.ndarray` that is sent without a copy."""
    if type(array) is not np.ndarray:
        return False
    flags = array.flags
    return bool(flags.c_contiguous and flags.aligned and array.dtype.isnative)


def in_memory_of(array: Any, target: np.ndarray) -> Any:
    """Return the plain `target` where a plain `array` is the same memory, else `array`.

    MPI takes both as one buffer only if they are one object (MPI 4.1, section 6.1).
    """
    if array is target or type(array) is not np.ndarray or array.dtype != target.dtype:
        return array
    is_same = array.shape == target.shape and address_of(array) == address_of(target)
    return target if is_same and is_plain(array) else array


def are_apart(arrays: Sequence[Any], targets: Sequence[np.ndarray]) -> bool:
    """Return whether each of `targets` shares memory with nothing but its array, and all of it."""
    own = list(map(_span, targets))
    spans = [(*span, True) for span in own]
    for array, span_of_target in zip(arrays, own, strict=True):
        if not isinstance(array, np.ndarray):
            continue  # it is copied to the host
        span = _span(array)
        if span != span_of_target or not is_plain(array):
            spans.append((*span, False))
    return are_disjoint(spans)


def are_disjoint(spans: Iterable[tuple[int, int, bool]]) -> bool:
    """Return whether memory that is written to is apart from all other, read or written to.

    `spans` say of each memory where it begins and ends, and whether it is written to.
    """
    end_of_targets = end_of_all = 0
    # In order of the begin, so that each only has to be compared with the furthest end so far.
    for begin, end, is_target in sorted(spans):
        # Two arrays that are only read may overlap.
        if begin < (end_of_all if is_target else end_of_targets) and begin < end:
            return False
        end_of_all = max(end_of_all, end)
        if is_target:
            end_of_targets = max(end_of_targets, end)
    return True


def _span(array: np.ndarray) -> tuple[int, int]:
    """Return where the memory of `array` begins and ends, or a span around it."""
    begin: int = address_of(array)
    # Strides may be negative, and then the memory begins before the first element.
    reach = [
        stride * (n - 1) for stride, n in zip(array.strides, array.shape, strict=True) if array.size
    ]
    low, high = (sum(each for each in reach if (each < 0) is sign) for sign in (True, False))
    return begin + low, begin + high + (array.itemsize if array.size else 0)
