"""A variable that is the same on every replica."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.arrays import Array, host_copy
from mpistrat.collectives import Collectives
from mpistrat.options import ReduceOp, VariableAggregation
from mpistrat.values import PerReplica
from mpistrat.variables.base import Variable

__all__ = ["MirroredVariable"]


class MirroredVariable(Variable, on_read=False):
    """A variable whose every write reaches every replica.

    In replica context the values of the replicas are merged by `aggregation` first. In
    cross-replica context all ranks give the same value. In update context each rank writes
    its own component.
    """

    def value(self) -> Array:
        """Return a read-only view of the local component. Local in every context."""
        return self._view()

    def _write_in_context(self, how: str, value: Any) -> None:
        what = f"The variable {self.name!r}"
        kind = context.mode_for(self._strategy, what)
        if kind is context.Kind.UPDATE:
            self._apply(how, self._checked(how, value))
        elif kind is context.Kind.CROSS_REPLICA:
            self._apply(how, self._agreed(how, value))
        else:
            self._apply(how, self._merged(how, value))

    def _agreed(self, how: str, value: Any) -> Array:
        with self._collectives.call(f"Variable.{how}", self.name) as call:
            if isinstance(value, PerReplica):
                raise ValueError(
                    f"{how} of the mirrored variable {self.name!r} in cross-replica context takes "
                    "one value for all replicas, not a PerReplica. Reduce it first, or assign "
                    "inside strategy.run."
                )
            array = self._checked(how, value)
            call.agree("one value", str(self.dtype), self.shape)
        return array

    def _merged(self, how: str, value: Any) -> Array:
        options = self._collectives.lossless_options
        with self._collectives.call(f"Variable.{how}", self.name, options) as call:
            if self.aggregation is VariableAggregation.NONE:
                raise ValueError(
                    f"{how} of the mirrored variable {self.name!r} in replica context needs an "
                    "aggregation: make the variable with aggregation=VariableAggregation.SUM, MEAN "
                    "or ONLY_FIRST_REPLICA, or assign in cross-replica context (merge_call)."
                )
            array = self._checked(how, value)
            if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
                return call.broadcast(array)
            (merged,) = call.all_reduce(ReduceOp[self.aggregation.name], [array])
        return merged

    @property
    def _collectives(self) -> Collectives:
        collectives: Collectives = self.strategy.extended.collectives
        return collectives

    def save_value(self) -> np.ndarray | None:
        """Return a copy of rank 0's component there, ``None`` elsewhere. Local."""
        return host_copy(self._storage) if self._collectives.rank == 0 else None
