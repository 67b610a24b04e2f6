"""Steps of an optimizer on which the ranks have agreed: how each rank takes one, and repeats it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.agreement.channel import Channel
from mpistrat.arrays import span_of
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.fast_reduction import FastReduction
from mpistrat.collectives.reduction import Reduction
from mpistrat.optimizers.device_update import SumsOfSquares
from mpistrat.optimizers.sharded_slots import PartUpdate, share_parts
from mpistrat.optimizers.step_gradients import prepare_sum, settled_beside
from mpistrat.optimizers.update import (
    Rule,
    Step,
    Target,
    UpdateAll,
    gradient_factor,
    sums_of_all,
    update_each,
)
from mpistrat.options import ReduceOp
from mpistrat.tracing.spans import span
from mpistrat.variables import (
    Variable,
)
from mpistrat.variables.variable import own_storage_of, settle, storage_of

RATE = "with the learning rate"
"""Name, in messages, of the number that the ranks compare."""


@dataclass
class PreparedStep:
    """A repeated step on the host or one device, for gradients that need no conversion."""

    channel: Channel
    """Channel of the step, kept alive so that its id is not reused."""
    strategy: Any
    """Strategy of the step. All checks of `variables` in it have passed."""
    variables: Sequence[Variable]
    """Variables of the step, kept alive so that their ids are not reused."""
    counter: Variable
    """The `iterations` of the optimizer."""
    iterations: np.ndarray
    """The memory of `counter`."""
    reduction: Reduction
    """Reduction of the gradients."""
    fast: FastReduction | None
    """Compiled repetition of the reduction, if there is compiled code."""
    parameters: str
    """Parameters of the optimizer, which `reduction` compares."""
    updates: dict[Rule, UpdateAll | None] = field(default_factory=dict)
    """Functions that update all variables at once; ``None`` if there is none for a rule."""
    _sums: SumsOfSquares | None = None

    def sums_of_squares(self, summed: list[Any]) -> SumsOfSquares | None:
        """Return a function that sums the squares of device gradients; ``None`` on the host."""
        if self._sums is None and type(summed[0]) is not np.ndarray:
            self._sums = sums_of_all(summed)
        return self._sums

    def prepare(self, call: CollectiveCall, gradients: list[Any], parameters: str) -> None:
        """Let the ranks compare the new `parameters` from now on."""
        self.reduction = prepare_sum(call, gradients, self.variables, parameters)
        self.fast, self.parameters = call.fast(self.reduction, lends=True), parameters


_MAX_STEPS = 64


class PreparedSteps(dict[tuple[int, ...], PreparedStep]):
    """The prepared steps of one optimizer, by the ids of channel and variables."""

    # A copy of the optimizer prepares its own steps.

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedSteps:
        # The keys contain the ids of the original variables.
        return PreparedSteps()

    def find(
        self, channel: Channel, strategy: Any, counter: Variable, pairs: Any
    ) -> tuple[PreparedStep | None, list[Any]]:
        """Return the step prepared for the (gradient, Variable) `pairs`, and the gradients."""
        # ``(None, [])`` if no step fits, also if the elements are not pairs.
        try:
            gradients, variables = zip(*pairs, strict=True)
        except (TypeError, ValueError):
            return None, []
        prepared = self.get((id(channel), *map(id, variables)))
        given = list(gradients)
        # A program may have replaced the optimizer's counter.
        if prepared is None or prepared.strategy is not strategy or prepared.counter is not counter:
            return None, []
        return (prepared, given) if prepared.reduction.fits(given) else (None, [])

    def keep(
        self,
        call: CollectiveCall,
        strategy: Any,
        gradients: list[Any],
        variables: Sequence[Variable],
        counter: Variable,
        parameters: str,
    ) -> None:
        """Prepare later steps like this one, if they need no check of the gradients."""
        # Compiled code updates all variables at once, and only whole ones, on the host or on a
        # device. So the caller leaves out steps that the ranks divide.
        if not call.channel.transport.has_fast_paths:
            return
        storages = [storage_of(variable) for variable in variables]
        if len({type(each) for each in (*gradients, *storages)}) > 1:
            return
        reduction = prepare_sum(call, gradients, variables, parameters)
        if not reduction.fits(gradients):
            return
        # Steps keep their variables alive. Without a limit, a program that builds model after model
        # would run out of memory.
        if len(self) >= _MAX_STEPS:
            self.clear()
        key = (id(call.channel), *map(id, variables))
        memory, fast = storage_of(counter), call.fast(reduction, lends=True)
        what = variables, counter, memory, reduction, fast, parameters
        self[key] = PreparedStep(call.channel, strategy, *what)


@dataclass(frozen=True)
class AgreedStep:
    """One step of an optimizer, the same on all ranks."""

    optimizer: Any
    """An `Optimizer`. Naming the class here would be an import cycle."""
    strategy: Any
    prepared: PreparedStep | None
    gradients: list[Any]
    """Gradients, already summed over replicas except those that are `unsummed`."""
    variables: Sequence[Variable]
    unsummed: Collection[int]
    """Positions of the gradients that each rank sums in parts."""
    rate: float
    number: int
    """Number of the step, from 0."""
    scale: float
    """Factor that the gradients have been multiplied by."""
    owns_gradients: bool
    """Whether nothing else uses the memory of the summed gradients."""

    def take(self) -> None:
        """Update the variables. **Collective** if ranks update parts of them."""
        optimizer, prepared = self.optimizer, self.prepared
        rule, constants = optimizer._rule, optimizer._constants(self.rate, self.number)
        update_all = None if prepared is None else self._update_of_all(prepared, rule)
        gradients, variables, updates = self.gradients, self.variables, []
        sums = None
        if update_all is not None and prepared is not None:
            sums = prepared.sums_of_squares(gradients)
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
                        if not each.is_unsummed
                    ],
                )
                iterations = optimizer.iterations
                memory = own_storage_of(iterations) if prepared is None else prepared.iterations
                # A skipped step does not count: Adam's bias correction and schedules depend on the
                # number of actual updates.
                memory += 1
                parts = [each for each in updates if each.placement.ranges is not None]
                if parts:
                    # Called last, because it sends the weights that the lines above have updated.
                    share_parts(context.collectives_of(self.strategy), kind, rule, step, parts)
                elif prepared is None:
                    settle(iterations)
            if optimizer.loss_scale is not None:
                optimizer.loss_scale._adjust(is_finite=factor is not None)

    def _update_of_all(self, prepared: PreparedStep, rule: Rule) -> UpdateAll | None:
        """Return a function that updates all variables at once, ``None`` if there is none."""
        if rule not in prepared.updates:
            targets = self.optimizer._targets(prepared.variables)
            prepared.updates[rule] = rule.update_of_all(targets)
        return prepared.updates[rule]

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
                is_unsummed=position in self.unsummed,
            )
            for position, variable, target, gradient in zip(
                positions, variables, targets, settled, strict=True
            )
        ]

    def _written(self, targets: Sequence[Target]) -> list[tuple[int, int]]:
        """Return the spans of memory that the step changes and that gradients may share."""
        if self.owns_gradients and not self.unsummed:
            return []
        # If a variable is updated in parts, its whole memory changes: other ranks send the rest.
        wholes = [span_of(storage_of(self.variables[position])) for position in self.unsummed]
        return wholes + [span for target in targets for span in target.spans]


def take_prepared_step(optimizer: Any, prepared: PreparedStep, gradients: list[Any]) -> bool:
    """Take a step by the fast path of its reduction. **Collective**.

    If this is not possible, do nothing and return False; the caller must then use a normal call.
    """
    if prepared.fast is None or optimizer.loss_scale is not None:
        return False
    number = int(prepared.iterations)
    try:
        rate, parameters = optimizer._rate(number), optimizer._agreed_parameters()
    except Exception:
        return False  # a normal call raises for it
    if prepared.parameters != parameters:
        return False

    def take(summed: list[Any]) -> None:
        step = AgreedStep(
            *(optimizer, prepared.strategy, prepared, summed, prepared.variables),
            *((), rate, number, 1.0, True),
        )
        step.take()

    results = prepared.fast.all_reduce_for(take, gradients, rate, RATE)
    if results:  # otherwise all replicas of this rank have taken the step together
        context.replica_set_of(prepared.strategy).once(functools.partial(take, results))
    return results is not None
