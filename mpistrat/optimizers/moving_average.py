"""Exponential moving averages of variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mpistrat import context
from mpistrat.arguments import as_finite, as_integer
from mpistrat.context import Strategy
from mpistrat.optimizers.slots import Slots, zero_slot
from mpistrat.optimizers.step_gradients import check_owners, check_variables, listed, owner_among
from mpistrat.strategies import get_strategy
from mpistrat.strategies.one_replica import default_strategy
from mpistrat.trackable import Trackable
from mpistrat.variables import SyncOnReadVariable, Variable
from mpistrat.variables.variable import own_storage_of, placement_of, settle

_SLOT = "average"


class ExponentialMovingAverage(Trackable):
    """Averages of variables over the steps of training, like the class of that name in tf.train.

    `apply` sets each average to ``decay * average + (1 - decay) * variable``. Its first call sets
    the average to the variable itself. An average is a mirrored variable, equal on all ranks, and
    float32 for variables of float16 and bfloat16. In a checkpoint the average of the variable
    ``model/kernel`` has the path ``ema/average/model/kernel``.

    Parameters
    ----------
    decay : float
        Weight of the old average, in [0, 1], for example 0.999.
    num_updates : int, optional
        Number of updates of the variables so far. If given, the decay is at most ``(1 +
        num_updates) / (10 + num_updates)``, so that averages follow faster at the beginning. Set
        the attribute before each `apply`.

    Raises
    ------
    TypeError
        If `decay` is not a number or `num_updates` is not an integer.
    ValueError
        For a value out of range.

    Examples
    --------
    >>> weight = ms.Variable(np.zeros(2))
    >>> averages = ms.optimizers.ExponentialMovingAverage(0.75)
    >>> averages.apply([weight])
    >>> weight.assign(np.ones(2), read_value=False)
    >>> averages.apply([weight])
    >>> averages.average(weight).numpy()
    array([0.25, 0.25])
    """

    def __init__(self, decay: float, num_updates: int | None = None) -> None:
        super().__init__()
        self.decay = decay
        self.num_updates = num_updates
        self._slots = Slots()
        self._current_decay()

    def _current_decay(self) -> float:
        """Check the attributes, which a program may set, and return the decay for a step now."""
        decay = as_finite("ExponentialMovingAverage: decay", self.decay)
        if not 0 <= decay <= 1:
            raise ValueError(f"ExponentialMovingAverage: decay must be in [0, 1], not {decay}.")
        if self.num_updates is None:
            return decay
        number = as_integer("ExponentialMovingAverage: num_updates", self.num_updates, 0)
        return min(decay, (1 + number) / (10 + number))

    def apply(self, var_list: Iterable[Variable]) -> None:
        """Update the averages with the current values of the variables.

        Call it after each step of an optimizer, in `Strategy.run` or outside. The first call
        creates the averages. **Collective**: every rank passes the same variables in the same
        order. No values are sent.

        Parameters
        ----------
        var_list : iterable of Variable
            Mirrored or plain variables of floating dtype.

        Raises
        ------
        ValueError
            If there is no variable, one appears twice, or one is SyncOnRead, whose components
            differ between replicas.
        TypeError
            If an element is not a variable, or a variable does not have a floating dtype.
        ContextError
            If a variable belongs to a different strategy.
        NotImplementedError
            For variables of a `ParameterServerStrategy`.
        CollectiveMismatchError
            If the ranks disagree on the variables or the decay.
        """
        variables = listed(var_list)
        frame = context.current()
        strategy = default_strategy() if frame is None else frame.strategy
        if context.is_default(strategy) and isinstance(variables, list):
            given = (each for each in variables if isinstance(each, Variable))
            strategy = owner_among(given, get_strategy())
        kind = "ExponentialMovingAverage.apply"
        _refuse_remote(kind, variables)
        _apply(strategy, kind, self, variables)

    def _follow(self, variables: Sequence[Variable], decay: float) -> None:
        """Move each average towards its variable. **Collective** if an average is new."""
        for variable in variables:
            # First create all new averages: a waiting restore may raise an error for one, and then
            # no average has moved yet.
            if self._slots.find(variable, _SLOT) is None:
                self._attach_child(_SLOT, _first_average(variable), of=variable)
        for variable in variables:
            kept = self.average(variable)
            average, value = own_storage_of(kept), own_storage_of(variable)
            # Bit-identical on all ranks, because the variables are.
            average += (1 - decay) * (value.astype(average.dtype) - average)
            settle(kept)

    def average(self, variable: Variable) -> Variable:
        """Return the average of `variable`. Local.

        Parameters
        ----------
        variable : Variable
            A variable that was passed to `apply`.

        Returns
        -------
        Variable
            The average, which the next `apply` changes in place.

        Raises
        ------
        KeyError
            If it does not exist yet: the first `apply` creates averages, or a checkpoint restores
            them.
        """
        average = self._slots.find(variable, _SLOT)
        if average is None:
            raise KeyError(
                f"There is no average of the variable {variable.name!r}, at least not before the "
                "first ExponentialMovingAverage.apply with it."
            )
        return average

    def _deferred_slots(self) -> Mapping[str, Callable[[Variable], Variable]]:
        return {_SLOT: functools.partial(zero_slot, name=_SLOT)}

    def _attach_child(self, name: str, child: object, *, of: object = None) -> None:
        super()._attach_child(name, child, of=of)
        if isinstance(of, Variable) and isinstance(child, Variable):
            self._slots.add(of, name, child)

    def __repr__(self) -> str:
        return f"ExponentialMovingAverage(decay={self.decay}, num_updates={self.num_updates})"


@context.collective("ExponentialMovingAverage.apply", writes=True, of=context.collectives_of)
def _apply(
    strategy: Strategy, kind: str, averages: ExponentialMovingAverage, variables: Any
) -> None:
    """Run `ExponentialMovingAverage.apply` for the variables' strategy."""
    with context.collectives_of(strategy).call(kind) as call:
        _check_variables(kind, variables)
        check_owners(kind, strategy, variables)
        decay = averages._current_decay()
        call.agree(
            f"decay={decay}",
            *((each.name, str(each.dtype), each.full_shape) for each in variables),
        )
    # Once per rank, because its replicas share the averages. Otherwise these would decay once per
    # replica.
    context.replica_set_of(strategy).once(functools.partial(averages._follow, variables, decay))


def _first_average(variable: Variable) -> Variable:
    average = zero_slot(variable, _SLOT)
    own_storage_of(average)[...] = own_storage_of(variable)
    settle(average)
    return average


def _refuse_remote(kind: str, variables: Any) -> None:
    for variable in variables if isinstance(variables, list) else ():
        if isinstance(variable, Variable) and not placement_of(variable).is_here:
            raise NotImplementedError(
                f"{kind}: the variable {variable.name!r} is on a server, and workers change it at "
                "different times. Create a variable for its average, and in a closure call "
                "average.assign_sub((1 - decay) * (average.value() - variable.value()))."
            )


def _check_variables(kind: str, variables: Any) -> None:
    check_variables(kind, variables)
    for variable in variables:
        if isinstance(variable, SyncOnReadVariable):
            raise ValueError(
                f"{kind}: the SyncOnRead variable {variable.name!r} differs from replica to "
                "replica. Pass mirrored variables."
            )
