"""One step of an optimizer on which the ranks have agreed, and how each takes all or a part of it.

The parts are stage 1 of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", 2020): a rank keeps the slots of its part, and gets the weights of the
others.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.arrays import (
    Array,
    address_of,
    host_view,
    is_on_host,
    namespace_of,
    native,
    place,
    span_of,
)
from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.comm.selection import choose_reducer
from mpistrat.comm.shared_reducer import SharedMemoryReducer
from mpistrat.optimizers.slots import PreparedStep
from mpistrat.optimizers.step_gradients import settled_beside
from mpistrat.optimizers.update import (
    Rule,
    Step,
    Target,
    UpdateAll,
    gradient_factor,
    update_each,
)
from mpistrat.options import ReduceOp
from mpistrat.tracing.spans import span
from mpistrat.values import IndexedSlices
from mpistrat.variables import Variable
from mpistrat.variables.placement import elements_of
from mpistrat.variables.variable import device_of, own_storage_of, placement_of, settle, storage_of

_MIN_BYTES = 2**20
"""Smaller gradients are summed together, on all ranks, as for mirrored slots."""


def can_be_summed_in_parts(call: CollectiveCall, variable: Variable) -> bool:
    """Return whether each rank can sum its part of the gradient of `variable`, equal on all."""
    return _reducer(call, variable) is not None


def _reducer(call: CollectiveCall, variable: Variable) -> SharedMemoryReducer | None:
    """Return the reducer that can sum the gradient of `variable` part by part, if there is one."""
    num_bytes, options = storage_of(variable).nbytes, call.options
    is_large = num_bytes >= _MIN_BYTES or placement_of(variable).stage is not None
    if not is_large or not is_on_host(storage_of(variable)) or options.wire_dtype is not None:
        return None
    # As for a large message: MPI is not faster on gradients that are there already.
    asked = max(num_bytes, _MIN_BYTES)
    transport = call.channel.transport
    reducer, _ = choose_reducer(transport, options, ReduceOp.SUM, variable.dtype, asked)
    return reducer if isinstance(reducer, SharedMemoryReducer) else None


@dataclass(frozen=True, eq=False)
class PartUpdate:
    """What a step has done, or is to do, with this rank's part of one variable."""

    variable: Variable
    placement: Any
    """Says which part this rank updates: that of the slots, or of the variable itself."""
    target: Target
    gradient: Any
    """In C order on its device, or coalesced slices, equal on all ranks."""
    is_late: bool
    """Whether it has not been summed yet, and the part has not been updated."""

    @property
    def is_central(self) -> bool:
        """Whether all ranks see what each has updated."""
        return placement_of(self.variable).ranges is not None

    @property
    def own(self) -> range:
        """The elements of the flat variable that this rank updates."""
        own: range = self.placement.own_elements
        return own


def share_parts(
    collectives: Collectives, kind: str, rule: Rule, step: Step, updates: Sequence[PartUpdate]
) -> None:
    """Give all ranks the weights that each rank has updated. **Collective**."""
    late = [each for each in updates if each.is_late]
    staged = [each for each in late if placement_of(each.variable).stage is not None]
    # Before the ranks agree, because that tells the others that this rank's gradients are in place.
    for each in staged:
        _fill_stage(each, collectives.rank)
    with collectives.call(f"{kind}: weights") as call:
        call.agree()
        with call.moving():
            for each in late:
                if each in staged:
                    _update_from_stage(rule, step, each)
                else:
                    _update_with_others(call, rule, step, each)
            _gather([each for each in updates if not each.is_late and not each.is_central], call)
        call.show_received([storage_of(each.variable) for each in updates])
        if any(each.is_central for each in updates):
            # No rank may read a shared weight, or fill its buffer for the next step, before all
            # have updated their parts.
            call.agree("updated")
    for each in updates:
        placement_of(each.variable).note_written()


def _fill_stage(each: PartUpdate, rank: int) -> None:
    """Bring a gradient to this rank's buffer, unless it lies there."""
    stage = placement_of(each.variable).stage
    assert stage is not None
    if address_of(stage[rank]) != address_of(each.gradient):
        np.copyto(stage[rank], each.gradient.reshape(-1))


_CHUNK = 2**15
"""Elements. The sum of a chunk stays in a core's own cache until it is used."""


def _update_from_stage(rule: Rule, step: Step, each: PartUpdate) -> None:
    """Sum this rank's part of the gradients in the buffers of all ranks, and update it."""
    stage, own = placement_of(each.variable).stage, each.own
    assert stage is not None
    sums = np.empty(min(_CHUNK, len(own)), each.variable.dtype)
    for begin in range(own.start, own.stop, _CHUNK):
        stop = min(begin + _CHUNK, own.stop)
        first, *others = (of_rank[begin:stop] for of_rank in stage)
        # A single rank adds nothing. Then the rule gets the buffer itself, which it only reads.
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
            # `reduce_parts` sends what is in `sums` now: the new weights in place of the summed
            # gradients.
            np.copyto(sums, chunk.weight)

    call.note_moved(each.gradient.nbytes, "SharedMemoryReducer")
    starts = [0, *[of_rank.stop for of_rank in each.placement.ranges]]
    target = None if each.is_central else storage_of(each.variable)
    reducer.reduce_parts(each.gradient, starts, update, target)


def _gather(updates: Sequence[PartUpdate], call: CollectiveCall) -> None:
    """Bring the weights that ranks have updated to all of them. **Collective**."""
    # One message per dtype. The sort is stable and all ranks have the updates in the same order, so
    # they cut the messages alike.
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
    """Return, for each rank, which elements of the flat variable it has updated."""
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


RATE = "with the learning rate"
"""What messages call the number that ranks compare."""


def is_divided(optimizer: Any, variables: Iterable[Variable]) -> bool:
    """Return whether the ranks divide a step on `variables`, by the slots that it has or makes."""
    names, is_sharded = optimizer._rule.kernel.slots, optimizer.sharded_slots
    return any(optimizer._slots.are_divided(each, names, is_sharded) for each in variables)


def summed_in_parts(
    call: CollectiveCall,
    optimizer: Any,
    gradients: Sequence[Any],
    variables: Sequence[Variable],
) -> list[int]:
    """Return the positions of gradients of which each rank sums its part while it updates it."""
    # All that decides is equal on all ranks, or agreed on next. To clip them takes all of them.
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


@dataclass(frozen=True)
class AgreedStep:
    """One step of an optimizer, the same on all ranks."""

    optimizer: Any
    """An `Optimizer`. Naming the class here would be an import cycle."""
    strategy: Any
    known: PreparedStep | None
    gradients: list[Any]
    """Gradients, already summed over replicas except those that are `late`."""
    variables: Sequence[Variable]
    late: Collection[int]
    """Positions of the gradients that each rank sums in parts."""
    rate: float
    number: int
    """Number of the step, from 0."""
    scale: float
    """Factor that the gradients have been multiplied by."""
    are_own: bool
    """Whether nothing else uses the memory of the summed gradients."""

    def take(self) -> None:
        """Update the variables. **Collective** if ranks update parts of them."""
        optimizer, known = self.optimizer, self.known
        rule, constants = optimizer._rule, optimizer._constants(self.rate, self.number)
        update_all = None if known is None else self._update_of_all(known, rule)
        gradients, variables, updates = self.gradients, self.variables, []
        sums = None
        if update_all is not None and known is not None:
            sums = known.sums_of_squares(gradients)
        else:
            updates = self._updates()
            gradients = [each.gradient for each in updates]
            variables = [each.variable for each in updates]
        factor: float | None = 1 / self.scale
        if optimizer.global_clipnorm is not None or optimizer.loss_scale is not None:
            factor = gradient_factor(
                gradients,
                self.scale,
                optimizer.global_clipnorm,
                must_be_finite=optimizer.loss_scale is not None,
                sum_over_shards=self._sum_over_shards(variables),
                sums=sums,
            )
        kind = type(optimizer).__name__
        # Not by extended.update, which accepts only the strategy's variables: some may be plain.
        with (
            context.entered(context.Frame(context.Kind.UPDATE, self.strategy)),
            span("optimizer", f"{kind} update"),
        ):
            if factor is not None:
                # Bit-identical on all ranks, which have compared the rate and weight_decay.
                keep = 1 - self.rate * (optimizer.weight_decay or 0)
                step = Step(constants, keep, factor)
                if update_all is not None:
                    update_all(step, gradients)
                update_each(
                    *(rule, step),
                    [
                        (each.target, each.placement.own(each.gradient))
                        for each in updates
                        if not each.is_late
                    ],
                )
                iterations = optimizer.iterations
                memory = own_storage_of(iterations) if known is None else known.iterations
                # A skipped step does not count: Adam's bias correction and schedules depend on the
                # number of actual updates.
                memory += 1
                parts = [each for each in updates if each.placement.ranges is not None]
                if parts:
                    # Called last, because it sends the weights that the lines above have updated.
                    share_parts(context.collectives_of(self.strategy), kind, rule, step, parts)
                elif known is None:
                    settle(iterations)
            if optimizer.loss_scale is not None:
                optimizer.loss_scale._adjust(is_finite=factor is not None)

    def _update_of_all(self, known: PreparedStep, rule: Rule) -> UpdateAll | None:
        """Return a function that updates all variables at once, ``None`` if there is none."""
        if rule not in known.updates:
            targets = self.optimizer._targets(known.variables)
            known.updates[rule] = rule.update_of_all(targets)
        return known.updates[rule]

    def _sum_over_shards(self, variables: Sequence[Variable]) -> Callable[[list[float]], float]:
        """Return a function that adds up numbers for `variables` over the ranks of a replica."""
        layout = context.layout_of(self.strategy)
        if layout.ranks_per_replica == 1:
            return sum

        def total(numbers: list[float]) -> float:
            # Variables that are equal on all ranks of the replica count once.
            pairs = zip(numbers, variables, strict=True)
            is_first = layout.shard == 0
            own = sum(each for each, var in pairs if is_first or var.split_axis is not None)
            with context.shards_of(self.strategy).call(
                f"{type(self.optimizer).__name__}: norm"
            ) as call:
                (reduced,) = call.all_reduce(ReduceOp.SUM, [np.float64(own)])
            return float(reduced)

        return total

    def _updates(self) -> list[PartUpdate]:
        """Return the update of each variable that has a gradient."""
        optimizer = self.optimizer
        each = enumerate(zip(self.gradients, self.variables, strict=True))
        positions = [position for position, (gradient, _) in each if gradient is not None]
        variables = [self.variables[position] for position in positions]
        # Create all slots first, because a waiting restore may raise an error for one.
        targets = optimizer._targets(variables)
        given = [(self.gradients[position], self.variables[position]) for position in positions]
        settled = settled_beside(given, self._written(targets))
        return [
            PartUpdate(
                variable,
                optimizer._slots.placement(variable, optimizer._rule.kernel.slots),
                target,
                gradient,
                is_late=position in self.late,
            )
            for position, variable, target, gradient in zip(
                positions, variables, targets, settled, strict=True
            )
        ]

    def _written(self, targets: Sequence[Target]) -> list[tuple[int, int]]:
        """Return the spans of memory that the step changes and that gradients may share."""
        if self.are_own and not self.late:
            return []
        # If a variable is updated in parts, its whole memory changes: other ranks send the rest.
        wholes = [span_of(storage_of(self.variables[position])) for position in self.late]
        return wholes + [span for target in targets for span in target.spans]


def take_known_step(optimizer: Any, known: PreparedStep, gradients: list[Any]) -> bool:
    """Take a step by the fast path of its reduction. **Collective**.

    If this is not possible, do nothing and return False; the caller must then use a normal call.
    """
    if known.fast is None or optimizer.loss_scale is not None:
        return False
    number = int(known.iterations)
    try:
        rate, parameters = optimizer._rate(number), optimizer._agreed_parameters()
    except Exception:
        return False  # a normal call raises for it
    if known.parameters != parameters:
        return False

    def take(summed: list[Any]) -> None:
        step = AgreedStep(
            *(optimizer, known.strategy, known, summed, known.variables),
            *((), rate, number, 1.0, True),
        )
        step.take()

    results = known.fast.all_reduce_for(take, gradients, rate, RATE)
    if results:  # otherwise all replicas of this rank have taken the step together
        context.replica_set_of(known.strategy).once(functools.partial(take, results))
    return results is not None
