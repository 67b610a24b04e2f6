"""Metric base class: SyncOnRead SUM variables, an update, a result and a reset."""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mpistrat import context
from mpistrat.arguments import as_array
from mpistrat.arrays import Array, host_copy, host_view, is_on_host, namespace_of
from mpistrat.options import ReduceOp, VariableAggregation, VariableSynchronization
from mpistrat.trackable import Trackable
from mpistrat.values import DistributedValues, local_component
from mpistrat.variables import Variable

__all__ = ["Given", "Metric", "as_pair", "as_values", "beside", "check_real", "weighted"]


Given: TypeAlias = npt.ArrayLike | DistributedValues[Any]


class Metric(Trackable, abc.ABC):
    """Base of metrics.

    **Collective** in a strategy's scope, because it makes variables.

    Parameters
    ----------
    name : str, optional
        By default the class name in lower case.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = type(self).__name__.lower() if name is None else name
        self._sums: dict[str, Variable] = {}

    def _make_sum(self, what: str) -> Variable:
        variable = Variable(
            np.float64(0),
            trainable=False,
            name=f"{self.name}/{what}",
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
        self._attach_child(what, variable)
        self._sums[what] = variable
        return variable

    def _add(self, *numbers: float) -> None:
        """Add one of `numbers` to each sum, in the order in which they were made."""
        frame = context.current()
        is_replica = frame is not None and frame.kind is context.Kind.REPLICA
        here = frame.strategy if frame is not None and is_replica else None
        for variable, number in zip(self._sums.values(), numbers, strict=True):
            if variable.strategy is here:
                # What assign_add comes to, many times in a step.
                total = variable._storage
                total += number
            else:
                variable.assign_add(number, read_value=False)

    @abc.abstractmethod
    def _compute(self, sums: Mapping[str, np.float64]) -> np.float64:
        """Return the result from the sums over all replicas, by the names they were made with."""

    def result(self) -> np.float64:
        """Return the value over all replicas. **Collective**: every rank makes the call.

        All sums of the metric travel in one message. Inside `Strategy.run` too the value is that
        of all replicas, not of this one.

        Returns
        -------
        numpy scalar
            The same on every rank.

        Raises
        ------
        ContextError
            In a context of another strategy than the metric's.
        EpochError
            If the ranks disagree.
        """
        sums = {what: variable.values[0] for what, variable in self._sums.items()}
        strategy = next(iter(self._sums.values())).strategy
        if strategy is not None:
            context.mode_for(strategy, f"The metric {self.name!r}")
            kind = f"{type(self).__name__}.result"
            with strategy.extended._collectives.call(kind, self.name) as call:
                reduced = call.all_reduce(ReduceOp.SUM, list(sums.values()))
            sums = dict(zip(sums, reduced, strict=True))
        return self._compute({what: np.float64(host_copy(array)) for what, array in sums.items()})

    def reset_state(self) -> None:
        """Start again from zero.

        **Collective** in cross-replica context and outside every scope; local inside
        `Strategy.run`.
        """
        for variable in self._sums.values():
            variable.assign(np.zeros(variable.shape, variable.dtype), read_value=False)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


def as_values(what: str, value: Any) -> Array:
    """Return what a metric was given, an array, tensor, sequence or number, as an array."""
    if type(value) is np.ndarray:
        return value
    value = local_component(value)
    return np.asarray(value) if isinstance(value, list | tuple) else as_array(what, value)


def weighted(values: Any, sample_weight: Any) -> tuple[float, float]:
    """Return the sum of `values` and of their weights, by default 1, both computed in float64."""
    values = as_values("values", values)
    check_real("values", values)
    if sample_weight is None:
        return float(values.sum(dtype=np.float64)), float(values.size)
    xp = namespace_of(values)
    values = values.astype(np.float64, copy=False)
    weights = as_values("sample_weight", sample_weight)
    check_real("sample_weight", weights)
    weights = weights.astype(np.float64, copy=False)
    try:
        weights = xp.broadcast_to(beside(weights, values), values.shape)
    except ValueError:
        raise ValueError(
            f"sample_weight of shape {tuple(weights.shape)} cannot be broadcast to values of "
            f"shape {tuple(values.shape)}."
        ) from None
    return float(xp.sum(values * weights)), float(xp.sum(weights))


def as_pair(kind: str, y_true: Any, y_pred: Any, remedy: str) -> tuple[Array, Array]:
    """Return `y_true` and `y_pred`, of one shape, as arrays in one place."""
    truth, guess = as_values("y_true", y_true), as_values("y_pred", y_pred)
    if type(truth) is np.ndarray is type(guess) and truth.shape == guess.shape:
        return truth, guess
    if tuple(truth.shape) != tuple(guess.shape):
        raise ValueError(
            f"{kind} compares arrays of one shape: y_true has the shape {tuple(truth.shape)}, "
            f"y_pred {tuple(guess.shape)}. {remedy}"
        )
    return truth, beside(guess, truth)


def check_real(what: str, array: Array) -> None:
    """Refuse what holds no real numbers."""
    if not _is_real(array.dtype):
        raise TypeError(f"{what} of a metric must be real numbers, not of dtype {array.dtype}.")


@functools.lru_cache
def _is_real(dtype: np.dtype) -> bool:
    return bool(np.can_cast(dtype, np.float64, "same_kind"))


def beside(array: Array, other: Array) -> Array:
    """Return `array` where `other` lies, on the host or the device."""
    return host_view(array) if is_on_host(other) else namespace_of(other).asarray(array)
