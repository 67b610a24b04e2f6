"""Sharded slots: each rank updates a part of a variable, and the others get its new elements.

This is stage 1 of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", 2020): a rank keeps the slots of its part only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.arrays import (
    Array,
    address_of,
    host_view,
    is_on_host,
    namespace_of,
    native,
    place,
)
from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.comm.selection import choose_reducer
from mpistrat.comm.shared_reducer import SharedMemoryReducer
from mpistrat.optimizers.update import (
    Rule,
    Step,
    Target,
)
from mpistrat.options import ReduceOp
from mpistrat.values import IndexedSlices
from mpistrat.variables import Variable
from mpistrat.variables.placement import elements_of
from mpistrat.variables.variable import device_of, placement_of, storage_of

_MIN_BYTES = 2**20
"""Smaller gradients are packed and summed on all ranks, as for mirrored slots."""


def can_be_summed_in_parts(call: CollectiveCall, variable: Variable) -> bool:
    """Return whether each rank can sum its part of the gradient of `variable`; equal on all."""
    return _reducer(call, variable) is not None


def _reducer(call: CollectiveCall, variable: Variable) -> SharedMemoryReducer | None:
    """Return the reducer that can sum the gradient of `variable` part by part, if there is one."""
    num_bytes, options = storage_of(variable).nbytes, call.options
    is_large = num_bytes >= _MIN_BYTES or placement_of(variable).stage is not None
    if not is_large or not is_on_host(storage_of(variable)) or options.wire_dtype is not None:
        return None
    # Asked as for a large message: MPI is not faster for gradients that are already in place.
    asked = max(num_bytes, _MIN_BYTES)
    transport = call.channel.transport
    reducer, _ = choose_reducer(transport, options, ReduceOp.SUM, variable.dtype, asked)
    return reducer if isinstance(reducer, SharedMemoryReducer) else None


@dataclass(frozen=True, eq=False)
class PartUpdate:
    """The update of this rank's part of one variable in a step, done or still to do."""

    variable: Variable
    placement: Any
    """Says which part this rank updates: the placement of the slots, or of the variable itself."""
    target: Target
    gradient: Any
    """Gradient in C order on its device, or coalesced slices, equal on all ranks."""
    is_unsummed: bool
    """Whether the gradient is not summed yet, and the part not updated."""

    @property
    def is_central(self) -> bool:
        """Whether all ranks share the memory, so that they see each other's updates."""
        return placement_of(self.variable).ranges is not None

    @property
    def own(self) -> range:
        """Elements of the flat variable that this rank updates."""
        own: range = self.placement.own_elements
        return own


def share_parts(
    collectives: Collectives, kind: str, rule: Rule, step: Step, updates: Sequence[PartUpdate]
) -> None:
    """Send the weights that each rank has updated to all ranks. **Collective**."""
    unsummed = [each for each in updates if each.is_unsummed]
    staged = [each for each in unsummed if placement_of(each.variable).stage is not None]
    # Done before the ranks agree, because the agreement tells the others that this rank's gradients
    # are in place.
    for each in staged:
        _fill_stage(each, collectives.rank)
    with collectives.call(f"{kind}: weights") as call:
        call.agree()
        with call.moving():
            for each in unsummed:
                if each in staged:
                    _update_from_stage(rule, step, each)
                else:
                    _update_with_others(call, rule, step, each)
            _gather(
                [each for each in updates if not each.is_unsummed and not each.is_central], call
            )
        call.show_received([storage_of(each.variable) for each in updates])
        if any(each.is_central for each in updates):
            # No rank may read a shared weight, or fill its buffer for the next step, before all
            # have updated their parts.
            call.agree("updated")
    for each in updates:
        placement_of(each.variable).note_written()


def _fill_stage(each: PartUpdate, rank: int) -> None:
    """Copy a gradient to this rank's buffer, unless it is already there."""
    stage = placement_of(each.variable).stage
    assert stage is not None
    if address_of(stage[rank]) != address_of(each.gradient):
        np.copyto(stage[rank], each.gradient.reshape(-1))


_CHUNK = 2**15
"""Number of elements. The sum of a chunk stays in a core's own cache until it is used."""


def _update_from_stage(rule: Rule, step: Step, each: PartUpdate) -> None:
    """Sum this rank's part of the gradients in the buffers of all ranks, and update it."""
    stage, own = placement_of(each.variable).stage, each.own
    assert stage is not None
    sums = np.empty(min(_CHUNK, len(own)), each.variable.dtype)
    for begin in range(own.start, own.stop, _CHUNK):
        stop = min(begin + _CHUNK, own.stop)
        first, *others = (of_rank[begin:stop] for of_rank in stage)
        # With a single rank there is nothing to add. Then the rule gets the buffer itself, which it
        # only reads.
        total = sums[: stop - begin] if others else first
        for number, of_rank in enumerate(others):
            np.add(total if number else first, of_rank, out=total)
        rule.update(step, each.target.chunk(begin - own.start, stop - own.start), total)


def _update_with_others(call: CollectiveCall, rule: Rule, step: Step, each: PartUpdate) -> None:
    """Sum a gradient, update the weights and share them, chunk by chunk. **Collective**."""
    reducer, own = _reducer(call, each.variable), each.own
    assert reducer is not None

    def update(begin: int, sums: np.ndarray) -> None:
        chunk = each.target.chunk(begin - own.start, begin - own.start + sums.size)
        rule.update(step, chunk, sums)
        if not each.is_central:
            # `reduce_parts` sends the contents of `sums`: now the new weights instead of the summed
            # gradients.
            np.copyto(sums, chunk.weight)

    call.note_moved(each.gradient.nbytes, "SharedMemoryReducer")
    starts = [0, *[of_rank.stop for of_rank in each.placement.ranges]]
    target = None if each.is_central else storage_of(each.variable)
    reducer.reduce_parts(each.gradient, starts, update, target)


def _gather(updates: Sequence[PartUpdate], call: CollectiveCall) -> None:
    """Gather the updated weights of all ranks on each of them. **Collective**."""
    # One message per dtype. The sort is stable and all ranks have the updates in the same order, so
    # they divide the messages in the same way.
    by_dtype = sorted(updates, key=lambda each: each.variable.dtype.char)
    for _, group in itertools.groupby(by_dtype, key=lambda each: each.variable.dtype):
        parts = [(each.variable, _places(each)) for each in group]
        own = [_part_on_host(variable, places[call.channel.rank]) for variable, places in parts]
        joined = np.concatenate(own)
        size = call.channel.size
        counts = [sum(_length(places[rank]) for _, places in parts) for rank in range(size)]
        call.note_moved(joined.nbytes, "all_gather")
        gathered = call.channel.transport.all_gather(joined, counts)
        begin = 0
        for rank in range(size):
            for variable, places in parts:
                stop = begin + _length(places[rank])
                values = place(gathered[begin:stop], device_of(variable))
                flat = storage_of(variable).reshape(-1)
                flat[_index(flat, places[rank])] = values
                begin = stop


def _places(each: PartUpdate) -> list[Any]:
    """Return, for each rank, the elements of the flat variable that it has updated."""
    ranges = each.placement.ranges
    if not isinstance(each.gradient, IndexedSlices):
        return [slice(of_rank.start, of_rank.stop) for of_rank in ranges]
    # Coalesced slices are equal on all ranks and ascending, so every rank finds the same bounds
    # without asking.
    touched = host_view(elements_of(each.gradient))
    bounds = np.searchsorted(touched, [0, *[of_rank.stop for of_rank in ranges]])
    return [touched[start:stop] for start, stop in itertools.pairwise(bounds)]


def _length(places: Any) -> int:
    return places.stop - places.start if isinstance(places, slice) else len(places)


def _part_on_host(variable: Variable, places: Any) -> np.ndarray:
    flat = storage_of(variable).reshape(-1)
    return native(host_view(flat[_index(flat, places)]))


def _index(flat: Array, places: Any) -> Any:
    return places if isinstance(places, slice) else namespace_of(flat).asarray(places)


def is_divided(optimizer: Any, variables: Iterable[Variable]) -> bool:
    """Return whether the ranks divide a step on `variables`, by its existing or new slots."""
    names, is_sharded = optimizer._rule.kernel.slots, optimizer.sharded_slots
    return any(optimizer._slots.are_divided(each, names, is_sharded) for each in variables)


def summed_in_parts(
    call: CollectiveCall,
    optimizer: Any,
    gradients: Sequence[Any],
    variables: Sequence[Variable],
) -> list[int]:
    """Return the positions of gradients whose parts the ranks sum while they update them."""
    # All conditions are equal on all ranks, or agreed on next. Clipping needs all gradients first.
    if optimizer.global_clipnorm is not None or optimizer.loss_scale is not None:
        return []
    names = optimizer._rule.kernel.slots
    return [
        position
        for position, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
        if gradient is not None
        and not isinstance(gradient, IndexedSlices)
        and optimizer._slots.placement(variable, names).ranges is not None
        and can_be_summed_in_parts(call, variable)
    ]
