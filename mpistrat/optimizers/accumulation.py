"""Gradient accumulation: many micro-batches, one reduction, one step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from mpistrat import context
from mpistrat.arrays import host_view, place
from mpistrat.collectives.collectives import Collectives
from mpistrat.context import Strategy
from mpistrat.optimizers.optimizer import Optimizer
from mpistrat.optimizers.step_gradients import (
    check_gradients,
    check_owners,
    check_scope,
    check_variables,
    known_equal,
    listed,
    owner_among,
    split_pairs,
    sum_over_replicas,
)
from mpistrat.optimizers.update import slot_dtype
from mpistrat.options import VariableAggregation, VariableSynchronization
from mpistrat.strategies import get_strategy
from mpistrat.strategies.one_replica import default_strategy
from mpistrat.system import units
from mpistrat.trackable import Trackable
from mpistrat.values import IndexedSlices
from mpistrat.variables import Variable
from mpistrat.variables.initial import InitialValue
from mpistrat.variables.slice_writes import SCATTER_ADD
from mpistrat.variables.variable import component_of


@dataclass
class _Counts:
    """Counts of added gradients: plain numbers, so that no step waits for a device."""

    # A checkpoint saves rank 0's counts. They are equal on all ranks, because `apply` needs that.

    num_gradients: list[int]
    """Number of gradients for each variable."""
    num_added: int = 0

    def take_in(self, places: Iterable[int]) -> None:
        """Count one `add`, with gradients for the variables at `places`."""
        # The loop below changes only the copy, so that an undo can restore the old list.
        self._set(list(self.num_gradients), self.num_added)
        for place_of_variable in places:
            self.num_gradients[place_of_variable] += 1
        self.num_added += 1

    def reset(self) -> None:
        """Start again from zero."""
        self._set([0] * len(self.num_gradients), 0)

    def _set(self, num_gradients: list[int], num_added: int) -> None:
        units.on_undo(partial(vars(self).update, vars(self).copy()))
        self.num_gradients, self.num_added = num_gradients, num_added

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        num_gradients = list(state["num_gradients"])
        if len(num_gradients) != len(self.num_gradients):
            raise ValueError(
                f"The state of a GradientAccumulator for {len(num_gradients)} variables does not "
                f"fit one for {len(self.num_gradients)}."
            )
        self._set(num_gradients, state["num_added"])


@dataclass
class _CountsOfRank:
    """The counts of the replicas of this rank, which are equal when a checkpoint is saved."""

    counts: list[_Counts]

    def state_dict(self) -> dict[str, Any]:
        return self.counts[0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for each in self.counts:
            each.load_state_dict(state)


def _ranks(accumulator: GradientAccumulator) -> Collectives:
    """Return the ranks of an accumulator, after checking that it may be used here."""
    check_scope(f"The {type(accumulator).__name__}", accumulator._sums[0])
    return context.collectives_of(accumulator._owner)


class GradientAccumulator(Trackable):
    """Adds up gradients of several micro-batches, and reduces the sums over replicas once.

    Each replica adds to its own sums, which are SyncOnRead SUM variables: nothing is sent
    before `apply`. The optimizer gets the *sum* over micro-batches and replicas, so divide
    each loss by the number of examples in all micro-batches of all replicas. Sums for float16 and
    bfloat16 variables are float32, and are cast when they are passed to the optimizer.

    In a checkpoint the sum for the variable ``model/kernel`` has the path
    ``accumulator/gradient_sum/model/kernel``. A job that was saved between two micro-batches
    resumes there, on any number of ranks: each gets an equal share of the sum. Copy an accumulator
    together with its variables, ``copy.deepcopy((variables, accumulator))``.

    **Collective** in a strategy, because it creates variables: every rank passes the same variables
    in the same order.

    Parameters
    ----------
    variables : iterable of Variable
        Variables of floating dtype, all from the same strategy.

    Raises
    ------
    ValueError
        If there is no variable, or one appears twice.
    TypeError
        If an element is not a variable, or a variable does not have a floating dtype.
    ContextError
        If a variable belongs to a different strategy.
    NotImplementedError
        Under `ParameterServerStrategy`.
    CollectiveMismatchError
        If the ranks disagree on the variables.

    Examples
    --------
    >>> weight, sgd = ms.Variable(np.zeros(2)), ms.optimizers.SGD(0.5)
    >>> accumulator = ms.optimizers.GradientAccumulator([weight])
    >>> for micro_batch in range(2):
    ...     accumulator.add([(np.ones(2), weight)])
    >>> [(gradient, _)] = accumulator.grads_and_vars()
    >>> gradient
    array([2., 2.])
    >>> accumulator.apply(sgd)  # which ends with accumulator.reset()
    >>> weight.numpy(), accumulator.num_added
    (array([-1., -1.]), 0)
    """

    def __init__(self, variables: Iterable[Variable]) -> None:
        super().__init__()
        given = listed(variables)
        owner = _owner_of(given)
        if context.is_remote(owner):
            raise NotImplementedError(
                f"{type(self).__name__} is for replicas, but under ParameterServerStrategy each "
                "closure has its own gradients. Add up the gradients of its batches as arrays, and "
                "pass the sums to optimizer.apply_gradients, which sends one message per server."
            )
        self._sums = _make_sums(owner, type(self).__name__, given)
        self._variables = tuple(given)
        for variable, total in zip(self._variables, self._sums, strict=True):
            self._attach_child("gradient_sum", total, of=variable)
        ids = owner.extended.local_replica_ids
        self._counts_here = [_Counts([0] * len(self._variables)) for _ in ids]
        self._attach_child("counts", _CountsOfRank(self._counts_here))

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Variables whose gradients are accumulated. Local."""
        return self._variables

    @property
    def _counts(self) -> _Counts:
        """Counts of the replica that runs."""
        owner, here = self._owner, self._counts_here
        # A rank that has taken over replicas of a lost rank: all counts were equal at that time.
        num_replicas = len(owner.extended.local_replica_ids)
        if len(here) != num_replicas:
            here[:] = [copy.deepcopy(here[0]) for _ in range(num_replicas)]
        counts: _Counts = context.replica_set_of(owner).own(here)
        return counts

    @property
    def num_added(self) -> int:
        """Number of calls of `add` on this replica since the last `apply` or `reset`. Local.

        `apply` checks that it is equal on all replicas.
        """
        return self._counts.num_added

    def add(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> None:
        """Add the gradients of one micro-batch to the sums of this replica, in place. Local.

        Every replica makes one call per micro-batch. If it has no example in a micro-batch, it
        passes zeros or ``None``.

        Parameters
        ----------
        grads_and_vars : iterable of (gradient, Variable)
            Pairs as for `Optimizer.apply_gradients`, for all or some of the variables. ``None``
            adds nothing. Rows of `IndexedSlices` are added to the rows that they name.

        Raises
        ------
        ValueError
            If there is no pair, a variable does not belong to the accumulator, or a shape does not
            match; in cross-replica context, on every rank.
        TypeError
            If a gradient's dtype does not fit.
        IndexError
            If `IndexedSlices` have an index out of range.
        ContextError
            In a context of a different strategy.
        """
        kind = f"{type(self).__name__}.add"
        self._check_adds_here(kind)
        gradients, variables = split_pairs(kind, grads_and_vars, may_repeat=True)
        places = self._places(kind, variables)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        # Checked against the sums, whose dtype is wider than that of 16-bit variables.
        sums = [self._sums[places[i]] for i in present]
        if present:
            given = [gradients[i] for i in present]
            gradients = check_gradients(kind, given, sums, summed=True)
            for gradient, total in zip(gradients, sums, strict=True):
                self._add_one(gradient, total)
        self._counts.take_in([places[i] for i in present])

    def _check_adds_here(self, kind: str) -> None:
        """Raise if the `add` does not belong to one replica. **Collective** if it raises."""
        check_scope(f"The {type(self).__name__}", self._sums[0])
        owner = self._owner
        where = context.mode_for(owner, f"The {type(self).__name__}")
        if where is context.Kind.CROSS_REPLICA and not context.is_default(owner):
            with context.collectives_of(owner).call(kind):
                raise ValueError(
                    f"{kind} takes the gradients of one replica, but this is the cross-replica "
                    "context. Call it inside strategy.run."
                )

    def _places(self, kind: str, variables: Iterable[Variable]) -> list[int]:
        places = {id(variable): i for i, variable in enumerate(self._variables)}
        unknown = [variable.name for variable in variables if id(variable) not in places]
        if unknown:
            raise ValueError(
                f"{kind}: the variables {unknown} are not among the variables of the "
                f"accumulator, {[variable.name for variable in self._variables]}. Create it with "
                "all variables that get gradients."
            )
        return [places[id(variable)] for variable in variables]

    def _add_one(self, gradient: Any, total: Variable) -> None:
        device, storage = self._owner.extended.device, component_of(total)
        if isinstance(gradient, IndexedSlices):
            # Not with CuPy's add.at, which adds in no fixed order and lacks some dtypes.
            rows = place(gradient.values, device)
            SCATTER_ADD.apply(storage, IndexedSlices(rows, host_view(gradient.indices)))
        else:
            storage += place(gradient, device)

    @context.collective(of=_ranks)
    def grads_and_vars(self) -> list[tuple[Any, Variable]]:
        """Return the sums over replicas, each with its variable.

        Use this for your own optimizers; for the optimizers of mpistrat, `apply` does everything.
        The sums are kept until `reset`. Small sums are sent in one message. **Collective**: every
        rank has called `add` equally often.

        Returns
        -------
        list of (array, Variable)
            Equal on all ranks. ``None`` takes the place of an array if no gradient was added.

        Raises
        ------
        ValueError
            If nothing has been added.
        ContextError
            In a context of a different strategy.
        CollectiveMismatchError
            If the ranks disagree on the number of calls of `add`, or on which variables got a
            gradient.
        """
        return list(self._reduced("grads_and_vars", lambda kind: None))

    def _reduced(self, method: str, check: Callable[[str], None]) -> Any:
        """Return the reduced sums for `method`, once `check` has accepted its arguments."""
        return context.replica_set_of(self._owner).each(lambda: self._reduced_here(method, check))[
            0
        ]

    def _reduced_here(self, method: str, check: Callable[[str], None]) -> list[tuple[Any, Any]]:
        kind = f"{type(self).__name__}.{method}"
        context.mode_for(self._owner, f"The {type(self).__name__}")
        with context.replicas_of(self._owner).call(kind) as call:
            check(kind)
            counts = self._counts.num_gradients
            if not any(counts):
                raise ValueError(
                    f"{kind}: no gradient has been added since the last step (num_added is "
                    f"{self.num_added}). Call add for each micro-batch first."
                )
            # A rank that has missed a micro-batch would send a sum over fewer examples, and
            # nothing else would reveal it.
            call.include(self.num_added, f"after {self.num_added} calls of add")
            pairs = zip(self._sums, counts, strict=True)
            # None and not zeros: with zeros the optimizer would still apply momentum and weight
            # decay.
            sums = [component_of(total) if count else None for total, count in pairs]
            reduced = sum_over_replicas(call, sums, self._variables)
        return list(zip(reduced, self._variables, strict=True))

    def apply(self, optimizer: Optimizer) -> None:
        """Reduce the sums over replicas, let `optimizer` take one step, and start again from zero.

        Small sums are sent in one message. A variable that got no gradient is skipped with a
        warning. If the step fails, the sums are kept. **Collective**: every rank has called `add`
        equally often.

        Parameters
        ----------
        optimizer : Optimizer
            An optimizer of the same strategy.

        Raises
        ------
        ValueError
            If nothing has been added.
        TypeError
            If `optimizer` is not an `Optimizer`.
        ContextError
            If `optimizer` belongs to a different strategy, or in a context of a different one.
        CollectiveMismatchError
            If the ranks disagree on the number of calls of `add`, or on which variables got a
            gradient.
        """
        missing = self._apply(optimizer)
        # Outside the unit, because an elastic job may repeat the unit.
        if missing:
            warnings.warn(f"No gradient for the variables {missing}: skipped.", stacklevel=2)

    @context.collective("GradientAccumulator.apply", writes=True, of=_ranks)
    def _apply(self, optimizer: Optimizer) -> list[str]:
        """Run `apply`, and return the names of the variables without a gradient."""

        def check(kind: str) -> None:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(
                    f"{kind} takes an optimizer, not {optimizer!r} of type "
                    f"{type(optimizer).__name__}. For others there is grads_and_vars()."
                )
            check_owners(kind, self._owner, [optimizer.iterations])

        pairs = self._reduced("apply", check)
        missing = [variable.name for gradient, variable in pairs if gradient is None]
        # The optimizer would warn again about the variables without a gradient.
        present = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        with known_equal():
            optimizer.apply_gradients(present, skip_gradients_aggregation=True)
        self.reset()
        return missing

    @context.collective(writes=True, of=_ranks)
    def reset(self) -> None:
        """Drop the gradients that this replica has added. Local.

        Every rank must call it; the next `apply` checks that.
        """
        context.replica_set_of(self._owner).each(self._reset_here)

    def _reset_here(self) -> None:
        for total in self._sums:
            component_of(total).fill(0)
        self._counts.reset()

    @property
    def _owner(self) -> Any:
        strategy = self._sums[0].strategy
        return default_strategy() if strategy is None else strategy

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} for {len(self._variables)} variables, "
            f"num_added={self.num_added}>"
        )


def _owner_of(variables: Any) -> Any:
    """Return the strategy in scope; outside every scope, the first one of a variable."""
    strategy = get_strategy()
    if not context.is_default(strategy) or not isinstance(variables, list):
        return strategy
    return owner_among((each for each in variables if isinstance(each, Variable)), strategy)


@context.collective("GradientAccumulator", of=context.collectives_of)
def _make_sums(owner: Strategy, kind: str, variables: Sequence[Variable]) -> list[Variable]:
    """Check `variables`, and return a sum for each. **Collective**."""
    with context.collectives_of(owner).call(kind) as call:
        check_variables(call.kind, variables)
        check_owners(call.kind, owner, variables)
        call.agree(*((each.name, str(each.dtype), each.full_shape) for each in variables))
    with context.entered(context.Frame(context.Kind.CROSS_REPLICA, owner)):
        return [_new_sum(variable) for variable in variables]


def _new_sum(variable: Variable) -> Variable:
    """Return the sum for `variable`, with the same name, because errors about gradients show it."""
    return Variable(
        InitialValue.zeros(variable.full_shape, slot_dtype(variable.dtype), 1, variable.split_axis),
        name=variable.name,
        synchronization=VariableSynchronization.ON_READ,
        aggregation=VariableAggregation.SUM,
    )
