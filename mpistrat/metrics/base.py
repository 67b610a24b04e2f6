"""What every metric has: SyncOnRead SUM variables, an update, a result and a reset."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from mpistrat.arguments import as_array
from mpistrat.arrays import Array, host_view, is_on_host, namespace_of
from mpistrat.options import VariableAggregation, VariableSynchronization
from mpistrat.strategies import get_replica_context
from mpistrat.tracking import Trackable
from mpistrat.values import local_component
from mpistrat.variables import Variable

__all__ = ["Metric", "as_values", "beside", "weighted"]


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

    def _make_sum(self, what: str) -> Variable:
        variable = Variable(
            np.float64(0),
            trainable=False,
            name=f"{self.name}/{what}",
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
        self.attach_child(what, variable)
        return variable

    @abc.abstractmethod
    def _compute(self) -> Any:
        """Return the result from the variables, in cross-replica context."""

    def result(self) -> Any:
        """Return the value over all replicas. **Collective**: every rank makes the call.

        Returns
        -------
        numpy scalar
        """
        replica = get_replica_context()
        if replica is None or replica.strategy.extended.is_default:
            return self._compute()
        return replica.merge_call(lambda strategy: self._compute())

    def reset_state(self) -> None:
        """Start again from zero.

        **Collective** in cross-replica context and outside every scope; local inside
        `Strategy.run`.
        """
        for child in self.checkpoint_children().values():
            if isinstance(child, Variable):
                child.assign(np.zeros(child.shape, child.dtype), read_value=False)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


def as_values(what: str, value: Any) -> Array:
    """Return what a metric was given, an array, tensor, sequence or number, as an array. Local."""
    value = local_component(value)
    return np.asarray(value) if isinstance(value, list | tuple) else as_array(what, value)


def weighted(values: Any, sample_weight: Any) -> tuple[float, float]:
    """Return the sum of `values` and of their weights, both computed in float64. Local.

    Parameters
    ----------
    values : array, tensor, sequence or number
        May be empty.
    sample_weight : array, tensor, sequence or number, optional
        Broadcast to `values`; by default 1 for each.

    Raises
    ------
    ValueError
        If `sample_weight` cannot be broadcast to `values`.
    TypeError
        If one of them holds no real numbers.
    """
    values = _as_float64("values", values)
    xp = namespace_of(values)
    if sample_weight is None:
        return float(xp.sum(values)), float(values.size)
    weights = _as_float64("sample_weight", sample_weight)
    try:
        weights = xp.broadcast_to(beside(weights, values), values.shape)
    except ValueError:
        raise ValueError(
            f"sample_weight of shape {tuple(weights.shape)} cannot be broadcast to values of "
            f"shape {tuple(values.shape)}."
        ) from None
    return float(xp.sum(values * weights)), float(xp.sum(weights))


def _as_float64(what: str, value: Any) -> Array:
    array = as_values(what, value)
    if not np.can_cast(array.dtype, np.float64, "same_kind"):
        raise TypeError(f"{what} of a metric must be real numbers, not of dtype {array.dtype}.")
    return array.astype(np.float64, copy=False)


def beside(array: Array, other: Array) -> Array:
    """Return `array` where `other` lies, on the host or the device. Local."""
    return host_view(array) if is_on_host(other) else namespace_of(other).asarray(array)
