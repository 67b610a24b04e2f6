"""What every optimizer does: reduce the gradients, then update each variable in its place."""

from __future__ import annotations

import abc
import functools
import numbers
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.arrays import Array, Device, namespace_of, place
from mpistrat.collectives import CollectiveCall
from mpistrat.optimizers.gradients import (
    agree_on_gradients,
    check_gradients,
    check_owners,
    split_pairs,
    sum_over_replicas,
    variables_in,
)
from mpistrat.optimizers.slots import Slots, zero_slot
from mpistrat.options import VariableAggregation
from mpistrat.strategies import get_strategy
from mpistrat.tracking import Trackable
from mpistrat.values import IndexedSlices
from mpistrat.variables import Variable

__all__ = ["Optimizer"]


class Optimizer(Trackable, abc.ABC):
    """Base of optimizers.

    **Collective** in a strategy's scope, because it makes the variable `iterations`.

    In a checkpoint, the slot ``momentum`` of the variable ``model/kernel`` has the path
    ``optimizer/momentum/model/kernel``, whatever the variable is called. The slots of a variable
    that is not in the checkpoint go by its name, which must then be its own. Copy an optimizer
    together with its variables, ``copy.deepcopy((variables, optimizer))``: the copy then keeps
    its slots.

    Parameters
    ----------
    learning_rate : float or callable
        A callable is given the step number and returns the rate.
    weight_decay : float, optional
        Decoupled: before each step a variable shrinks by ``learning_rate * weight_decay`` of
        itself (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019).
    **parameters
        Those of the subclass, which become attributes.

    Raises
    ------
    ValueError
        For a value out of range.
    EpochMismatchError
        If the ranks disagree on a parameter.
    """

    def __init__(
        self,
        learning_rate: float | Callable[[int], float],
        weight_decay: float | None = None,
        **parameters: Any,
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        vars(self).update(parameters)
        parameters |= {"learning_rate": learning_rate, "weight_decay": weight_decay}
        with get_strategy().extended.collectives.call(type(self).__name__) as call:
            self._check_parameters()
            call.agree(*(f"{name}={_spelled(value)}" for name, value in parameters.items()))
        self.iterations = Variable(
            np.int64(0),
            trainable=False,
            name="iterations",
            aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
        )
        self.attach_child("iterations", self.iterations)
        self._slots = Slots()

    def _check_parameters(self) -> None:
        """Refuse parameters out of range. Local."""
        if not callable(self.learning_rate) and not self.learning_rate >= 0:
            raise ValueError(f"learning_rate must be at least 0, not {self.learning_rate}.")
        if self.weight_decay is not None and not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must be at least 0, not {self.weight_decay}.")

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        skip_gradients_aggregation: bool = False,
    ) -> None:
        """Update each variable by its gradient.

        In replica context the gradients are summed over replicas first, small ones in one
        message. In cross-replica context, and outside every scope with the variables of a
        strategy, they are the mirrored gradients themselves. **Collective**: every rank gives
        the same variables in the same order.

        Parameters
        ----------
        grads_and_vars : iterable of (gradient, Variable)
            Gradients are arrays or sequences of the variable's shape, `IndexedSlices`, or
            ``None``, which skips the variable with a warning. They are cast to the variable's
            dtype, within its kind, before they are summed.
        skip_gradients_aggregation : bool
            Whether the gradients are already summed over replicas.

        Raises
        ------
        ValueError
            If the list is empty or holds no gradient, a shape does not fit, or a gradient is a
            `PerReplica` where nothing is summed.
        TypeError
            If a dtype does not fit, or a variable has no floating dtype.
        IndexError
            If `IndexedSlices` have an index out of range.
        ContextError
            If a variable, or the optimizer, belongs to another strategy.
        EpochError
            If the ranks disagree, for example about which gradient is ``None``.
        """
        strategy = get_strategy()
        if strategy.extended.is_default:
            grads_and_vars = _listed(grads_and_vars)
            strategy = self._owner(variables_in(grads_and_vars), strategy)
        frame = context.current()
        ours = frame is not None and frame.strategy is strategy
        replica = frame.replica_context if frame is not None and ours else None
        summed = replica is not None and not skip_gradients_aggregation
        with strategy.extended.collectives.call(f"{type(self).__name__}.apply_gradients") as call:
            step = self._agreed_step(call, strategy, grads_and_vars, summed)
        if replica is not None:
            replica.merge_call(step)
        else:
            step(strategy)

    def _agreed_step(
        self, call: CollectiveCall, strategy: Any, grads_and_vars: Iterable[Any], summed: bool
    ) -> Callable[[Any], None]:
        """Return what takes the step, once the ranks agree on it. **Collective**."""
        gradients, variables = split_pairs(call.kind, grads_and_vars)
        check_owners(call.kind, strategy, [*variables, self.iterations])
        gradients = check_gradients(call.kind, gradients, variables, summed)
        pairs = zip(gradients, variables, strict=True)
        missing = [variable.name for gradient, variable in pairs if gradient is None]
        if missing:
            warnings.warn(f"No gradient for the variables {missing}: skipped.", stacklevel=3)
        number = int(self.iterations.values[0])
        rate = self._rate(number)
        call.include(rate, f"with the learning rate {rate}")
        settle = sum_over_replicas if summed else agree_on_gradients
        settled = zip(settle(call, gradients, variables), variables, strict=True)
        present = [(gradient, variable) for gradient, variable in settled if gradient is not None]
        return functools.partial(self._apply, pairs=present, rate=rate, step=number)

    def _owner(self, variables: Sequence[Variable], default: Any) -> Any:
        """Return the strategy of the first variable that has one. Local."""
        owners = (variable.strategy for variable in (*variables, self.iterations))
        return next((owner for owner in owners if owner is not None), default)

    def _rate(self, step: int) -> float:
        rate = self.learning_rate
        return float(rate(step) if callable(rate) else rate)

    def _apply(
        self, strategy: Any, pairs: Sequence[tuple[Any, Variable]], rate: float, step: int
    ) -> None:
        """Take one step. In cross-replica context of `strategy`."""
        # All slots come first: a restore that waits for them may refuse one.
        for _, variable in pairs:
            self._make_slots(variable)
        # Not by extended.update, which takes the strategy's own: plain variables may be here too.
        with context.entered(context.Frame(context.Kind.UPDATE, strategy)):
            for gradient, variable in pairs:
                self._update(variable, gradient, rate, step)
            self.iterations.assign_add(1, read_value=False)

    def _update(self, variable: Variable, gradient: Any, rate: float, step: int) -> None:
        value = variable.value()
        gradient = _dense_beside(variable, gradient)
        if self.weight_decay:
            variable.assign_sub(
                value * value.dtype.type(rate * self.weight_decay), read_value=False
            )
        delta = self._delta(variable, gradient, rate, step)
        variable.assign_sub(delta, read_value=False)

    @abc.abstractmethod
    def _delta(self, variable: Variable, gradient: Array, rate: float, step: int) -> Array:
        """Return what is subtracted from `variable`, and update its slots. In update context."""

    def _slot_names(self) -> Sequence[str]:
        """Return the names of the arrays that are kept for each variable."""
        return ()

    def slot(self, variable: Variable, name: str) -> Variable:
        """Return the array `name` (such as ``"momentum"``) kept for `variable`. Local.

        Raises
        ------
        KeyError
            If there is none yet: slots are made by the first `apply_gradients`.
        """
        slot = self._slots.find(variable, name)
        if slot is None:
            raise KeyError(
                f"{type(self).__name__} keeps no slot {name!r} for the variable "
                f"{variable.name!r}, at least not before the first apply_gradients."
            )
        return slot

    def _make_slots(self, variable: Variable) -> None:
        for name in self._slot_names():
            if self._slots.find(variable, name) is None:
                slot = zero_slot(variable, name)
                self.attach_child(name, slot, of=variable)
                self._slots.add(variable, name, slot)


def _spelled(value: Any) -> str:
    """Return a parameter in the words that ranks compare: 1, 1.0 and ``np.float64(1)`` agree."""
    if isinstance(value, numbers.Real):
        return str(float(value))
    return repr(value) if value is None or isinstance(value, str) else type(value).__name__


def _dense_beside(variable: Variable, gradient: Any) -> Array:
    """Return `gradient` as a dense array on the device of `variable`. Local."""
    device = Device("cpu") if variable.strategy is None else variable.strategy.extended.device
    if not isinstance(gradient, IndexedSlices):
        return place(gradient, device)
    value = variable.value()
    xp = namespace_of(value)
    dense = xp.zeros_like(value)
    xp.add.at(dense, place(gradient.indices, device), place(gradient.values, device))
    return dense


def _listed(grads_and_vars: Any) -> Any:
    """Return a list of an iterator, and what is none as it is: the call refuses it."""
    return list(grads_and_vars) if isinstance(grads_and_vars, Iterable) else grads_and_vars
