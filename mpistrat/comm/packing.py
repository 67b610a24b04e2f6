"""Packing: arrays into messages and back, on host and device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from mpistrat.arrays import Array, Device, host_view, namespace_of, on_device_of, place
from mpistrat.comm.device_groups import Join
from mpistrat.comm.pack_plan import Pack, Plan
from mpistrat.comm.pool import Pool
from mpistrat.comm.wire import as_floats, as_ordered_integers, cast, cast_into
from mpistrat.cuda_api import Stream, cupy
from mpistrat.native import native_library


class Message:
    """Arrays to be reduced, and the arrays for the results."""

    def __init__(
        self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], pool: Pool
    ) -> None:
        # All are in C order and native byte order, of equal dtype, and of equal lengths in pairs. A
        # target may be its source; otherwise they share no memory, and the source is not written
        # to.
        self.sources = sources
        self.targets = targets
        self.dtype = sources[0].dtype
        self.num_bytes = sum([source.nbytes for source in sources])
        self._pool = pool

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.num_bytes // self.dtype.itemsize

    def whole(self) -> tuple[np.ndarray, np.ndarray, Callable[[], object]]:
        """Return one source, one target, and a function that copies the result back."""
        if len(self.sources) == 1:
            return self.sources[0], self.targets[0], _nothing
        joined, split = self.joined()
        return joined, joined, split

    def joined(self) -> tuple[np.ndarray, Callable[[], object]]:
        """Flatten into one buffer; the returned function copies the result back."""
        if len(self.sources) == 1:
            source, target = self.sources[0], self.targets[0]
            # The result overwrites the buffer, and a source must not be written to.
            if target is not source:
                np.copyto(target, source)
            return target, _nothing
        joined = self._pool.take((self.size,), self.dtype)
        np.concatenate([source.reshape(-1) for source in self.sources], out=joined)

        def split() -> None:
            start = 0
            for target in self.targets:
                target[...] = joined[start : start + target.size].reshape(target.shape)
                start += target.size

        return joined, split


def _nothing() -> None:
    pass


class Packing(Protocol):
    """Arrays in the form in which they are reduced."""

    messages: list[Message]

    def unpack(self) -> list[Array]:
        """Return the results, each on the device of its array."""


def pack(
    plan: Plan,
    arrays: Sequence[Array],
    pool: Pool,
    copy: bool = False,
    out: Sequence[np.ndarray] | None = None,
) -> Packing:
    """Return `arrays`, for which `plan` was created, in the form in which they are reduced."""
    # They are not written to, unless they are in `out`, plain arrays for the results. `copy` says
    # that the program may write to them before the end.
    if plan.is_single and not copy:
        array, wire = arrays[0], plan.packs[0].wire
        target = None if out is None else out[0]
        if plan.is_plain:
            return _Single(array, pool, target)
        if type(array) is np.ndarray and _is_plain(array, wire) and target is None:
            return _Single(array.view(wire), pool)  # C has two names for one integer type
    return _Packing(plan, arrays, pool, copy, out)


class _Single:
    """One array that is sent from its own memory."""

    def __init__(self, array: np.ndarray, pool: Pool, target: np.ndarray | None = None) -> None:
        if target is None:
            target = pool.take(array.shape, array.dtype)
        self._targets: list[Array] = [target]
        self.messages = [Message([array], self._targets, pool)]

    def unpack(self) -> list[Array]:
        """Return the result."""
        return self._targets


class ReusedPacking:
    """Memory for the results of a repeated reduction; the next call overwrites them."""

    def __init__(self, plan: Plan, pool: Pool) -> None:
        self._packs = plan.packs
        self._library = native_library()
        self.messages: list[Message] = []
        self._results: list[Any] = [None] * len(plan.results)
        for each in plan.packs:
            targets = []
            if each.small:
                targets.append(np.empty(each.small_size, each.wire))
            for position, (start, stop) in zip(each.small, each.spans, strict=True):
                part = targets[0][start:stop]
                self._results[position] = part.reshape(plan.results[position][0])
            for position in each.large:
                targets.append(np.empty(*plan.results[position]))
                self._results[position] = targets[-1]
            self.messages.append(Message(targets, targets, pool))

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        """Copy in the numbers of `arrays`, for which the plan was created."""
        for each, message in zip(self._packs, self.messages, strict=True):
            sources = [arrays[position] for position in each.large]
            if each.small:
                # Joined and reduced in the same memory: the next call overwrites it anyway.
                joined = message.targets[0]
                self._library.join([arrays[position] for position in each.small], joined)
                sources.insert(0, joined)
            message.sources = sources

    def unpack(self) -> list[Array]:
        """Return the results."""
        return self._results


class ReusedDevicePacking:
    """The same as `ReusedPacking`, in the memory of `device`."""

    def __init__(self, plan: Plan, arrays: Sequence[Array], device: Device, pool: Pool) -> None:
        # The plan `stays_on_device`. CuPy's memory belongs to the current stream.
        self._device = device
        self.messages: list[Message] = []
        self._results: list[Any] = [None] * len(plan.results)
        self._packs = []
        xp = namespace_of(arrays[0])
        with device.current():
            # Kept to notice that the program has changed its stream: see `is_of_stream`.
            self._stream = Stream.current().pointer
            for each in plan.packs:
                join = None
                if each.small:
                    target = xp.empty(each.small_size, dtype=each.wire)
                    join = Join([arrays[position].size for position in each.small], target)
                else:
                    target = xp.empty(arrays[each.large[0]].shape, dtype=each.wire)
                    self._results[each.large[0]] = target
                for position, (start, stop) in zip(each.small, each.spans, strict=True):
                    part = target[start:stop]
                    self._results[position] = part.reshape(plan.results[position][0])
                self._packs.append((each, join))
                self.messages.append(Message([target], [target], pool))

    def is_of_stream(self) -> bool:
        """Return whether the stream that orders the use of this memory is still current."""
        with self._device.current():
            return Stream.current().pointer == self._stream

    def fill(self, arrays: Sequence[Array]) -> None:
        """Copy in the numbers of `arrays`, for which the plan was created."""
        with self._device.current():
            for (each, join), message in zip(self._packs, self.messages, strict=True):
                if join is None:
                    message.sources = [arrays[each.large[0]]]
                else:
                    join([arrays[position] for position in each.small])

    def unpack(self) -> list[Array]:
        """Return the results."""
        return self._results


class _Packing:
    """Arrays in the form in which they are reduced: see `pack`."""

    def __init__(
        self,
        plan: Plan,
        arrays: Sequence[Array],
        pool: Pool,
        copy: bool = False,
        out: Sequence[np.ndarray] | None = None,
    ) -> None:
        self._plan = plan
        self._native = native_library() if plan.is_plain else None
        self._op = plan.op
        self._arrays = arrays
        self._copy = copy
        self._out = out
        self._pool = pool
        self._targets: dict[int, np.ndarray] = {}
        self._joined: list[np.ndarray] = []
        self._device_packs: list[_DevicePack] = []
        self.messages = [self._message(pack) for pack in plan.packs]

    def _message(self, pack: Pack) -> Message:
        if pack.on_device:
            part = _DevicePack(self._plan, pack, self._arrays, self._pool, self._copy)
            self._device_packs.append(part)
            return part.message
        sources, targets = [], []
        if pack.small:
            joined = self._pool.take((pack.small_size,), pack.wire)
            self._fill(joined, pack)
            if pack.is_reordered:
                joined = as_ordered_integers(self._op, joined)
            self._joined.append(joined)
            sources.append(joined)
            targets.append(joined)
        for position in pack.large:
            array = self._arrays[position]
            if self._native is None:
                array = host_view(array)
            target = self._target(position, array, pack)
            # There is nothing to convert, and the program waits until the end: the array is sent
            # from its own memory.
            if not (self._copy or pack.is_reordered) and _is_plain(array, pack.wire):
                source = array.view(pack.wire)  # C has two names for one integer type
            else:
                cast_into(target, array)
                source = target = as_ordered_integers(self._op, target)
            sources.append(source)
            targets.append(target)
            self._targets[position] = target
        return Message(sources, targets, self._pool)

    def _target(self, position: int, array: np.ndarray, pack: Pack) -> np.ndarray:
        """Return the target of a large array: `out`, if the results have the same form there."""
        if self._out is not None and pack.is_uncast and not pack.is_reordered:
            target = self._out[position]
            if _is_plain(target, pack.wire):
                return target
        return self._pool.take(array.shape, pack.wire)

    def _fill(self, joined: np.ndarray, pack: Pack) -> None:
        """Copy the small arrays of `pack` to `joined`, one behind the other."""
        arrays = self._small_arrays(pack)
        if pack.is_uncast and self._native is not None:
            self._native.join(arrays, joined)
            return
        hosts = [each if type(each) is np.ndarray else host_view(each) for each in arrays]
        if pack.is_uncast:
            np.concatenate([host.reshape(-1) for host in hosts], out=joined)
            return
        for host, (start, stop) in zip(hosts, pack.spans, strict=True):
            cast_into(joined[start:stop].reshape(host.shape), host)

    def _small_arrays(self, pack: Pack) -> list[Array]:
        if len(pack.small) == len(self._arrays):  # as is common
            return list(self._arrays)
        return [self._arrays[position] for position in pack.small]

    def _take_out(self, pack: Pack, joined: np.ndarray, results: list[Array]) -> None:
        """Copy the small results out of `joined`, so that none of them keeps the others alive."""
        if pack.is_uncast and self._native is not None:
            parts = self._native.split(joined, self._small_arrays(pack))
            if len(parts) == len(results):
                results[:] = parts
                return
            for position, part in zip(pack.small, parts, strict=True):
                results[position] = part
            return
        for position, (start, stop) in zip(pack.small, pack.spans, strict=True):
            shape, dtype = self._plan.results[position]
            flat = joined[start:stop]
            flat = flat.copy() if pack.is_uncast else cast(flat, dtype, copy=True)
            results[position] = flat if len(shape) == 1 else flat.reshape(shape)

    def unpack(self) -> list[Array]:
        """Return the results, each on the device of its array."""
        results: list[Any] = [None] * len(self._arrays)
        joined_ones = iter(self._joined)
        for part in self._device_packs:
            part.unpack(results)
        for pack in self._plan.packs:
            if pack.on_device:
                continue
            if pack.small:
                joined = next(joined_ones)
                if pack.is_reordered:
                    joined = as_floats(self._op, joined, pack.wire)
                self._take_out(pack, joined, results)
            for position in pack.large:
                reduced = as_floats(self._op, self._targets[position], pack.wire)
                shape, dtype = self._plan.results[position]
                if reduced.dtype != dtype:
                    narrow = self._pool.take(shape, dtype)
                    cast_into(narrow, reduced)
                    reduced = narrow
                results[position] = reduced
        # If the results do not have the same form as `out`, `unpack` copies them there.
        if self._out is not None:
            for result, target in zip(results, self._out, strict=True):
                if result is not target:
                    np.copyto(target, result)
            return list(self._out)
        if self._native is not None:  # then all arrays are host arrays
            return results
        return [
            result if isinstance(array, np.ndarray) else placed_like(result, array)
            for result, array in zip(results, self._arrays, strict=True)
        ]


class _DevicePack:
    """The device arrays of one pack, for any array namespace; CuPy's own pool recycles memory."""

    def __init__(
        self, plan: Plan, pack: Pack, arrays: Sequence[Array], pool: Pool, copy: bool
    ) -> None:
        self._plan = plan
        self._pack = pack
        first = arrays[pack.large[0] if pack.large else pack.small[0]]
        self._device = on_device_of(first)
        with self._device:
            source, self._target = self._ends([arrays[i] for i in pack.small] or [first], copy)
        self.message = Message([source], [self._target], pool)

    def _ends(self, arrays: Sequence[Array], copy: bool) -> tuple[Array, Array]:
        """Return the array to reduce, and the array for the result."""
        pack, first = self._pack, arrays[0]
        xp = namespace_of(first)
        is_plain = first.dtype == pack.wire and first.flags.c_contiguous
        if not pack.small and is_plain and not (copy or pack.is_reordered):
            source = first.view(pack.wire)  # C has two names for one integer type
            return source, xp.empty(first.shape, dtype=pack.wire)
        if pack.small and all(
            each.dtype == pack.wire and each.flags.c_contiguous for each in arrays
        ):
            target = xp.empty(pack.small_size, dtype=pack.wire)
            Join([each.size for each in arrays], target)(arrays)
        elif pack.small:
            flat = [array.reshape(-1) for array in arrays]
            target = xp.concatenate(flat, dtype=pack.wire, casting="unsafe")
        else:
            target = xp.array(first, dtype=pack.wire, order="C", copy=True)
        target = as_ordered_integers(self._plan.op, target)
        return target, target

    def unpack(self, results: list[Array]) -> None:
        """Write the result of each array of the pack to its position in `results`."""
        # They are parts of one allocation, if their dtype is the dtype of the message.
        pack, op = self._pack, self._plan.op
        with self._device, np.errstate(all="ignore"):
            reduced = as_floats(op, self._target, pack.wire)
            for position in pack.large:
                results[position] = reduced.astype(self._plan.results[position][1], copy=False)
            for position, (start, stop) in zip(pack.small, pack.spans, strict=True):
                shape, dtype = self._plan.results[position]
                part = reduced[start:stop]
                part = part if pack.is_uncast else part.astype(dtype, copy=False)
                results[position] = part if len(shape) == 1 else part.reshape(shape)


def _is_plain(array: np.ndarray, dtype: np.dtype) -> bool:
    """Return whether `array` can be sent from its own memory."""
    flags = array.flags
    return array.dtype == dtype and flags.c_contiguous and flags.aligned


def describe_function() -> Callable[[Sequence[Array]], bytes | None]:
    """Return ``describe(arrays)``: bytes, equal for plain arrays of equal dtypes and shapes."""
    # It returns ``None`` unless all of `arrays` can be sent from their own host memory. Without
    # compiled code it may also return ``None`` for such arrays.
    library = native_library()
    if library is None:
        return lambda arrays: None
    compiled: Callable[[Sequence[Array]], bytes | None] = library.describe
    return compiled


def describe_on_device(arrays: Sequence[Any], device: Device) -> list[object] | None:
    """Return a list that is equal for CuPy arrays of equal dtypes and shapes, in C order.

    ``None`` unless all `arrays` are such arrays, in the memory of `device`.
    """
    kind, index = cupy().ndarray, device.index
    found: list[object] = []
    for array in arrays:
        if type(array) is not kind or not array.flags.c_contiguous or array.data.device_id != index:
            return None
        found += [array.dtype, array.shape]
    return found


def placed_like(result: np.ndarray, array: Array) -> Array:
    """Return `result` on the device of `array`."""
    device = getattr(array, "device", None)
    index = getattr(device, "id", None)  # a cupy.cuda.Device; NumPy says "cpu"
    return result if index is None else place(result, Device("gpu", index))
