"""Update rules on host and device, and the global norm for the clipping of gradients."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.arrays import Array, address_of, addresses_function, is_on_host, span_of
from mpistrat.comm.wire import is_narrow
from mpistrat.native import find_library
from mpistrat.optimizers.device_update import DeviceUpdate, SumsOfSquares
from mpistrat.optimizers.kernels import Kernel, digest
from mpistrat.values import IndexedSlices


@dataclass(frozen=True, eq=False)
class Rule:
    """One element-wise update of a weight and its slots by a gradient."""

    kernel: Kernel
    in_numpy: Callable[..., None]
    """Bit-identical NumPy version: ``in_numpy(weight, gradient, slots, constants, scratch)``.

    It works in place. All are 1-d arrays of one floating dtype and equal length, except the
    constants, which are 0-d. It must not change `gradient`; `scratch` may hold anything."""

    def update(self, step: Step, target: Target, gradient: Any) -> None:
        """Update `target` in place; only read `gradient`, in C order or coalesced slices."""
        if isinstance(gradient, IndexedSlices):
            self._update_rows(step, target, gradient)
        elif is_on_host(target.weight):
            update_on_host(self, step, target, gradient)
        else:
            self.update_on_device(step, [(target, gradient)])

    def update_on_device(self, step: Step, pairs: Sequence[tuple[Target, Array]]) -> None:
        """Update targets on one device in place; only read the gradients, in C order."""
        numbers = (step.keep, step.factor, *step.constants)
        targets, gradients = zip(*pairs, strict=True)
        DeviceUpdate(self.kernel, targets)(numbers, gradients)

    def _update_rows(self, step: Step, target: Target, gradient: IndexedSlices) -> None:
        # Other rows keep their weight and their slots: neither momentum decay nor weight decay
        # applies to them. This is the lazy update of TensorFlow's LazyAdam and PyTorch's
        # SparseAdam.
        indices = gradient.indices
        rows = Target(target.weight[indices], [slot[indices] for slot in target.slots])
        self.update(step, rows, gradient.values)
        target.weight[indices] = rows.weight
        for slot, updated in zip(target.slots, rows.slots, strict=True):
            slot[indices] = updated

    def update_of_all(self, targets: Sequence[Target]) -> UpdateAll | None:
        """Return a function that updates all `targets` in one call, ``None`` if there is none."""
        if not is_on_host(targets[0].weight):
            return self._update_of_all_on_device(targets)
        dtype = targets[0].compute_dtype
        compiled = _compiled_kernel(self.kernel, dtype)
        # One call needs weights of a single dtype that it also computes in. 16-bit weights are
        # widened block by block instead.
        if compiled is None or any(target.flat_weight.dtype != dtype for target in targets):
            return None
        memory = _Memory(targets)

        def update_all(step: Step, gradients: list[np.ndarray]) -> None:
            compiled(memory, gradients, (step.keep, step.factor, *step.constants))

        return update_all

    def _update_of_all_on_device(self, targets: Sequence[Target]) -> UpdateAll | None:
        device = targets[0].weight.device
        if any(is_on_host(each.weight) or each.weight.device != device for each in targets):
            return None
        update = DeviceUpdate(self.kernel, targets)
        return lambda step, gradients: update((step.keep, step.factor, *step.constants), gradients)


@dataclass(frozen=True)
class Step:
    """The numbers of one step, equal on all ranks and for all variables."""

    constants: tuple[float, ...]
    """Values for the constants of the kernel."""
    keep: float = 1.0
    """Factor for each weight before the update, for weight decay."""
    factor: float = 1.0
    """Factor for each gradient before the update: clipping and the inverse of the loss scale."""


class Target:
    """The arrays that a rule writes to: a weight and its slots, whose memory never moves."""

    def __init__(self, weight: Array, slots: Sequence[Array]) -> None:
        # All are in C order and have one shape; the slots have the dtype `slot_dtype`.
        self.weight = weight
        self.slots = slots
        self.flat_weight, *self.flat_slots = map(_flat_real, (weight, *slots))
        self.compute_dtype = _compute_dtype(self.flat_weight.dtype)
        self._chunks: dict[tuple[int, int], Target] = {}

    @functools.cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Addresses where the memory of each array begins and ends."""
        return [span_of(each) for each in (self.weight, *self.slots)]

    @functools.cached_property
    def memory(self) -> _Memory:
        """Memory of only this target, on the host."""
        return _Memory([self])

    @functools.cached_property
    def device_addresses(self) -> tuple[int, ...]:
        """Addresses where the memory of each array begins on a device."""
        return tuple(address_of(each) for each in (self.flat_weight, *self.flat_slots))

    def chunk(self, begin: int, stop: int) -> Target:
        """Return a part of a target with 1-d arrays, and cache it."""
        found = self._chunks.get((begin, stop))
        if found is None:
            slots = [slot[begin:stop] for slot in self.slots]
            found = self._chunks[begin, stop] = Target(self.weight[begin:stop], slots)
        return found


class _Memory:
    """Addresses of several targets of one compute dtype on the host, as C arrays."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.count = len(targets)
        self.sizes = np.array([target.flat_weight.size for target in targets], np.intp).tobytes()
        self.addresses = addresses_function()(
            [array for target in targets for array in (target.weight, *target.slots)]
        )


@functools.lru_cache
def _compute_dtype(dtype: np.dtype) -> np.dtype:
    """Return the real dtype for updates of `dtype`; a complex element counts as two."""
    # float32 for 16-bit types, whose squares and small steps would vanish.
    if is_narrow(dtype):
        return np.dtype(np.float32)
    real: np.dtype = np.dtype(dtype.char.lower())
    return real


def slot_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the slots of a variable of `dtype`."""
    return dtype if dtype.kind == "c" else _compute_dtype(dtype)


def _flat_real(array: Array) -> Array:
    """Return a 1-d view of `array` in C order, of pairs of real numbers if it is complex."""
    flat = array.reshape(-1)
    # Rules treat real and imaginary part as two numbers, as PyTorch's do (`view_as_real`).
    return flat.view(_compute_dtype(flat.dtype)) if flat.dtype.kind == "c" else flat


UpdateAll = Callable[[Step, list[np.ndarray]], None]
"""``update_all(step, gradients)`` calls `Rule.update` for the targets that it was created for."""


_BLOCK = 2**15
"""Number of elements. A block of each array of a rule fits into a core's own cache."""


def update_on_host(rule: Rule, step: Step, target: Target, gradient: np.ndarray) -> None:
    """Update `target` in place by `rule`; only read `gradient`, in C order."""
    weight, flat_gradient = target.flat_weight, _flat_real(gradient)
    dtype = target.compute_dtype
    compiled = _compiled_kernel(rule.kernel, dtype)
    numbers = (step.keep, step.factor, *step.constants)
    if compiled is not None and weight.dtype == dtype:
        compiled(target.memory, [flat_gradient], numbers)
        return
    # Without compiled code, or for 16-bit types, which need wider copies: block by block, so that
    # the data stay in the cache.
    length = min(_BLOCK, weight.size)
    engine: _Engine
    if compiled is None:
        engine = _numpy_engine(rule, step, length, dtype)
    else:
        engine = _compiled_engine(compiled, numbers)
    if weight.dtype != dtype:
        engine = _widening(engine, length, dtype)
    for start in range(0, weight.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        block = Target(weight[part], [slot[part] for slot in target.flat_slots])
        engine(block, flat_gradient[part])


_Engine = Callable[[Target, np.ndarray], None]
"""``engine(target, gradient)`` updates arrays of one dtype in place."""


def _compiled_engine(compiled: _HostKernel, numbers: Sequence[float]) -> _Engine:
    def engine(target: Target, gradient: np.ndarray) -> None:
        compiled(target.memory, [gradient], numbers)

    return engine


def _numpy_engine(rule: Rule, step: Step, length: int, dtype: np.dtype) -> _Engine:
    constants = [np.array(value, dtype) for value in step.constants]
    keep, factor = np.array(step.keep, dtype), np.array(step.factor, dtype)
    # Multiplying by 1 changes no bits. So it can be skipped here, although the compiled code does
    # it.
    decays, is_scaled = step.keep != 1, step.factor != 1
    scratch = np.empty(length, dtype)
    scaled = np.empty(length if is_scaled else 0, dtype)

    def engine(target: Target, gradient: np.ndarray) -> None:
        weight = target.weight
        if is_scaled:
            gradient = np.multiply(gradient, factor, out=scaled[: gradient.size])
        if decays:
            np.multiply(weight, keep, out=weight)
        rule.in_numpy(weight, gradient, target.slots, constants, scratch[: weight.size])

    return engine


def _widening(engine: _Engine, length: int, dtype: np.dtype) -> _Engine:
    """Return an engine for 16-bit types, which computes in the wider `dtype`."""
    wide_weight, wide_gradient = np.empty(length, dtype), np.empty(length, dtype)

    def widened(target: Target, gradient: np.ndarray) -> None:
        wide = Target(wide_weight[: gradient.size], target.slots)
        wide.weight[...] = target.weight
        wide_gradient[: gradient.size] = gradient
        engine(wide, wide_gradient[: gradient.size])
        target.weight[...] = wide.weight

    return widened


_NUMBERS = {"f": ctypes.c_float, "d": ctypes.c_double, "g": ctypes.c_longdouble}

_HostKernel = Callable[[_Memory, list[np.ndarray], Sequence[float]], None]
"""``kernel(memory, gradients, (keep, factor, *constants))`` on arrays of one real dtype."""


@functools.lru_cache
def _compiled_kernel(kernel: Kernel, dtype: np.dtype) -> _HostKernel | None:
    """Return the compiled function for `kernel`, ``None`` if there is none for `dtype`."""
    library = _library()
    number = _NUMBERS.get(dtype.char)
    if library is None or number is None:
        return None
    function = library[f"{kernel.name}_{dtype.char}"]
    num_numbers = 2 + len(kernel.constants)
    addresses_of = addresses_function()
    function.argtypes = [ctypes.c_ssize_t, *[ctypes.c_char_p] * 3, *[number] * num_numbers]
    function.restype = None

    def call(memory: _Memory, gradients: list[np.ndarray], numbers: Sequence[float]) -> None:
        function(memory.count, memory.sizes, addresses_of(gradients), memory.addresses, *numbers)

    return call


@functools.lru_cache
def _library() -> ctypes.CDLL | None:
    path = find_library(Path(__file__).parent, "_host_kernels", digest())
    return None if path is None else ctypes.CDLL(path)


def update_each(rule: Rule, step: Step, pairs: Sequence[tuple[Target, Any]]) -> None:
    """Call `Rule.update` for each target, with one launch for many arrays on a device."""
    on_device = []
    for target, gradient in pairs:
        if is_on_host(target.weight) or isinstance(gradient, IndexedSlices):
            rule.update(step, target, gradient)
        else:
            on_device.append((target, gradient))
    if on_device:
        rule.update_on_device(step, on_device)


def gradient_factor(
    gradients: Sequence[Any],
    scale: float,
    clipnorm: float | None,
    must_be_finite: bool,
    sum_over_shards: Callable[[list[float]], float] = sum,
    sums: Callable[[Sequence[Any]], list[float]] | None = None,
) -> float | None:
    """Return the factor for the gradients, ``None`` if they must be finite and are not."""
    # The loss has been multiplied by `scale`. Without that factor, the norm of the gradients may be
    # at most `clipnorm`. The summed gradients are equal on all replicas, so the replicas need not
    # agree on the result. The ranks of one replica have different gradients, whose sums of squares
    # `sum_over_shards` adds up. `sums` replaces `_sums_of_squares` for gradients like these.
    norm = math.sqrt(sum_over_shards((sums or _sums_of_squares)(gradients))) / scale
    if must_be_finite and not math.isfinite(norm):
        return None
    if clipnorm is None or norm <= clipnorm:
        return 1 / scale
    # Elements that are not finite become NaN, because 0 * inf and NaN * anything are NaN.
    return clipnorm / norm / scale


def sums_of_all(gradients: Sequence[Array]) -> SumsOfSquares:
    """Return a faster `_sums_of_squares` for arrays like `gradients`, dense and on one device."""
    return SumsOfSquares([_flat_real(each) for each in gradients])


def _sums_of_squares(gradients: Sequence[Any]) -> list[float]:
    """Return the sum of the squares of each gradient, not finite if an element is not."""
    # `IndexedSlices` are coalesced, so that no row counts twice.
    arrays = [
        each.values if isinstance(each, IndexedSlices) else each  # coalesced
        for each in gradients
    ]
    on_device = [i for i, array in enumerate(arrays) if not is_on_host(array)]
    flat = [_flat_real(arrays[i]) for i in on_device]
    wide = [each.astype(_compute_dtype(each.dtype), copy=False) for each in flat]
    found = dict(zip(on_device, SumsOfSquares(wide)(wide), strict=True)) if wide else {}
    return [
        found[i] if i in found else _host_sum_of_squares(array) for i, array in enumerate(arrays)
    ]


def _host_sum_of_squares(array: np.ndarray) -> float:
    """Return the sum of the squares of absolute values, not finite if an element is not."""
    # Blocks are summed pairwise, and their sums as float64, in an order that does not depend on
    # threads.
    flat = _flat_real(array)
    total = _sum_of_squares(flat, _compute_dtype(flat.dtype))
    # Squares of finite float32 numbers can overflow. The squares in float64 then decide.
    return total if np.isfinite(total) else _sum_of_squares(flat, np.dtype(np.float64))


def _sum_of_squares(flat: np.ndarray, dtype: np.dtype) -> float:
    scratch = np.empty(min(_BLOCK, flat.size), dtype)
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, flat.size, _BLOCK):
            block = flat[start : start + _BLOCK]
            squares = np.multiply(block, block, out=scratch[: block.size], dtype=dtype)
            total += float(np.add.reduce(squares))
    return total
