"""Optimizer steps on remote variables: one message per holder, which updates its parts in place."""

from __future__ import annotations

import functools
import math
import struct
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.arrays import host_view
from mpistrat.optimizers.optimizer import Optimizer
from mpistrat.optimizers.step_gradients import (
    check_gradients,
    check_owners,
    coalesced,
    split_pairs,
)
from mpistrat.optimizers.update import Step, Target, gradient_factor, slot_dtype
from mpistrat.parameter_server.remote_variable import RemoteVariable, parts_of
from mpistrat.parameter_server.server_job import ServerJob, job_of
from mpistrat.parameter_server.store import (
    Operation,
    ParameterStore,
    Request,
    dtype_of_name,
    slot_key,
)
from mpistrat.values import IndexedSlices

_HEAD = struct.Struct("<dddii")
"""Learning rate, weight decay, gradient factor, number of parameters, number of entries."""
_ENTRY = struct.Struct("<qi4x24s")
"""Key of a part, whether its gradient has only some rows, dtype."""
_NUMBER = struct.Struct("<d")

_NO_NUMBERS = frozenset({"weight_decay", "global_clipnorm", "loss_scale", "sharded_slots"})


def apply_remotely(optimizer: Optimizer, strategy: context.Strategy, pairs: Any) -> None:
    """Make the holders of variables take one step: see `Optimizer.apply_gradients`."""
    kind = f"{type(optimizer).__name__}.apply_gradients"
    job = job_of(strategy)
    given, variables = split_pairs(kind, pairs)
    check_owners(kind, strategy, [*variables, optimizer.iterations])
    plain = [each.name for each in variables if not isinstance(each, RemoteVariable)]
    if plain:
        raise ValueError(
            f"{kind}: the variables {plain} belong to this rank only. Create them in the scope of "
            f"{strategy!r}, or use a separate optimizer for them."
        )
    checked = check_gradients(kind, given, variables, True)
    missing = [v.name for g, v in zip(checked, variables, strict=True) if g is None]
    if missing:
        warnings.warn(f"No gradient for the variables {missing}: skipped.", stacklevel=3)
    optimizer._check_parameters()
    gradients = [
        (_settled(gradient), variable)
        for gradient, variable in zip(checked, variables, strict=True)
        if gradient is not None
    ]
    factor = gradient_factor([each for each, _ in gradients], 1.0, optimizer.global_clipnorm, False)
    number = _number_of(optimizer, job)
    # Include holders that get no gradient, because each holder counts the steps.
    entries: dict[int, list[tuple[bytes, list[np.ndarray]]]] = {
        holder: [] for holder in job.holders
    }
    for gradient, variable in gradients:
        assert isinstance(variable, RemoteVariable)
        for holder, entry in _entries(gradient, variable):
            entries[holder].append(entry)
    head = _parameters(optimizer, factor)
    job.client.ask_each(
        kind,
        [(holder, _request(number, head, of_holder)) for holder, of_holder in entries.items()],
    )


def _number_of(optimizer: Optimizer, job: ServerJob) -> int:
    """Return the number of an optimizer in messages, which is its place in creation order."""
    return next(i for i, each in enumerate(job.optimizers) if each is optimizer)


def _settled(gradient: Any) -> Any:
    """Return a gradient in host memory, with each row at most once."""
    if not isinstance(gradient, IndexedSlices):
        return np.ascontiguousarray(host_view(gradient))
    values, indices = host_view(gradient.values), host_view(gradient.indices)
    return coalesced(IndexedSlices(values, indices, gradient.dense_shape))


def _entries(
    gradient: Any, variable: RemoteVariable
) -> Sequence[tuple[int, tuple[bytes, list[np.ndarray]]]]:
    """Return holder, header and buffers for each part that a gradient changes."""
    found = []
    name = variable.dtype.name.encode()
    for part in parts_of(variable):
        start, stop = part.rows.start, part.rows.stop
        if isinstance(gradient, IndexedSlices):
            mine = (gradient.indices >= start) & (gradient.indices < stop)
            if not mine.any():
                continue
            buffers = [gradient.indices[mine] - start, gradient.values[mine]]
        else:
            buffers = [gradient[start:stop] if variable.shape else gradient]
        head = _ENTRY.pack(part.key, isinstance(gradient, IndexedSlices), name)
        found.append((part.holders[0], (head, buffers)))
    return found


def _parameters(optimizer: Optimizer, factor: float | None) -> list[bytes]:
    """Return the numbers of a step, packed.

    If the learning rate depends on the step, it is NaN, and the holder computes the rate.
    """
    rate = math.nan if callable(optimizer.learning_rate) else float(optimizer.learning_rate)
    numbers = [float(getattr(optimizer, name)) for name in _names(optimizer)]
    head = (rate, float(optimizer.weight_decay or 0), 1.0 if factor is None else factor)
    return [*map(_NUMBER.pack, (*head, *numbers))]


def _names(optimizer: Optimizer) -> list[str]:
    return [name for name in optimizer._constant_parameters if name not in _NO_NUMBERS]


def _request(
    number: int, parameters: list[bytes], entries: list[tuple[bytes, list[np.ndarray]]]
) -> Request:
    head = b"".join(parameters[:3]) + struct.pack("<ii", len(parameters) - 3, len(entries))
    extra = b"".join([head, *parameters[3:], *(entry for entry, _ in entries)])
    buffers = [buffer for _, of_entry in entries for buffer in of_entry]
    return Request(Operation.STEP, number, np.dtype(np.float64), buffers, extra=extra)


def take_step(optimizer: Optimizer, number: int, store: ParameterStore, request: Request) -> None:
    """Update the parts that this rank holds by one step of optimizer `number`."""
    rate, decay, factor, num_parameters, num_entries = _HEAD.unpack_from(request.extra)
    at = _HEAD.size
    for name in _names(optimizer)[:num_parameters]:
        (value,) = _NUMBER.unpack_from(request.extra, at)
        # The rank that takes the step may have set a different value.
        setattr(optimizer, name, type(getattr(optimizer, name))(value))
        at += _NUMBER.size
    iterations = store.array(parts_of(optimizer.iterations)[0].key, np.dtype(np.int64))
    done = int(iterations)
    if math.isnan(rate):
        rate = optimizer._rate(done)
    rule = optimizer._rule
    step = Step(optimizer._constants(rate, done), 1 - rate * decay, factor)
    buffers = iter(request.buffers)
    for _ in range(num_entries):
        key, has_rows, name = _ENTRY.unpack_from(request.extra, at)
        at += _ENTRY.size
        dtype = dtype_of_name(name)
        target = _target(optimizer, number, store, key, dtype)
        gradient: Any
        if has_rows:
            indices = next(buffers).view(np.int64)
            values = next(buffers).view(dtype)
            row = target.weight.shape[1:]
            gradient = IndexedSlices(values.reshape(indices.size, *row), indices)
        else:
            gradient = next(buffers).view(dtype).reshape(target.weight.shape)
        rule.update(step, target, gradient)
    iterations += 1


def _target(
    optimizer: Optimizer, number: int, store: ParameterStore, key: int, dtype: np.dtype
) -> Target:
    """Return the current memory of a part and its slots."""
    names = optimizer._rule.kernel.slots
    weight = store.array(key, dtype)
    of_slots = slot_dtype(dtype)
    slots = [store.array(slot_key(key, number, i), of_slots) for i, _ in enumerate(names)]
    known = optimizer._remote_targets.get(key)
    memory = [weight, *slots]
    # Compare by identity: the store replaces the memory if a message still reads the old one.
    if known is None or any(a is not b for a, b in zip(memory, known[1], strict=True)):
        known = optimizer._remote_targets[key] = Target(weight, slots), memory
    target: Target = known[0]
    return target


def find_slots(
    optimizer: Optimizer, job: ServerJob
) -> list[tuple[str, RemoteVariable, RemoteVariable]]:
    """Return name, slot and variable of each slot that exists on the holders."""
    number = _number_of(optimizer, job)
    request = Request(Operation.SLOTS, number, np.dtype(np.int64))
    answers = job.client.ask_each(
        f"slots of {type(optimizer).__name__}",
        [(holder, request) for holder in job.holders],
    )
    keys = {int(key) for (buffer,) in answers for key in buffer.view(np.int64)}
    return [
        (name, _make_slot(optimizer, number, variable, i), variable)
        for variable in job.variables
        for i, name in enumerate(optimizer._rule.kernel.slots)
        if any(slot_key(part.key, number, i) in keys for part in parts_of(variable))
    ]


def slot_makers(optimizer: Optimizer, job: ServerJob) -> dict[str, Callable[[Any], RemoteVariable]]:
    """Return a function per slot name that creates this rank's view of a variable's slot."""
    number = _number_of(optimizer, job)
    return {
        name: functools.partial(_make_slot, optimizer, number, place=i)
        for i, name in enumerate(optimizer._rule.kernel.slots)
    }


def _make_slot(
    optimizer: Optimizer, number: int, variable: RemoteVariable, place: int
) -> RemoteVariable:
    """Return this rank's view of a slot. The holder creates its memory, as zeros, on first use."""
    name = optimizer._rule.kernel.slots[place]
    dtype = slot_dtype(variable.dtype)
    return variable._slot(f"{variable.name}/{name}", dtype, number, place)
