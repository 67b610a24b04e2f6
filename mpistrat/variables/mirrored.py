"""A variable that is the same on every replica."""

from __future__ import annotations

from typing import Any

from mpistrat import context
from mpistrat.collectives import Collectives
from mpistrat.options import VariableAggregation
from mpistrat.values import PerReplica
from mpistrat.variables.base import Variable
from mpistrat.variables.writes import Write

__all__ = ["MirroredVariable"]


class MirroredVariable(Variable, on_read=False):
    """A variable whose every write reaches every replica.

    In replica context the values of the replicas are merged by `aggregation` first. In
    cross-replica context all ranks give the same value. In update context each rank writes
    its own component.
    """

    def _write_in_context(self, write: Write, value: Any) -> None:
        kind = context.mode_for(self._strategy, f"The variable {self.name!r}")
        if kind is context.Kind.UPDATE:
            self._write_locally(write, value)
        elif kind is context.Kind.CROSS_REPLICA:
            write.apply(self._storage, self._agreed(write, value))
        else:
            write.apply(self._storage, self._merged(write, value))

    def _agreed(self, write: Write, value: Any) -> Any:
        with self._collectives.call(f"Variable.{write.how}", self.name) as call:
            if isinstance(value, PerReplica):
                raise ValueError(
                    f"{write.how} of the mirrored variable {self.name!r} in cross-replica context "
                    "takes one value for all replicas, not a PerReplica. Reduce it first, or write "
                    "inside strategy.run."
                )
            checked = write.checked(self._target, value)
            call.agree("one value", write.words(checked))
        return checked

    def _merged(self, write: Write, value: Any) -> Any:
        with self._collectives.call(f"Variable.{write.how}", self.name) as call:
            if self.aggregation is VariableAggregation.NONE:
                raise ValueError(
                    f"{write.how} of the mirrored variable {self.name!r} in replica context needs "
                    "an aggregation: make the variable with aggregation=VariableAggregation.SUM, "
                    "MEAN or ONLY_FIRST_REPLICA, or write in cross-replica context (merge_call)."
                )
            return write.merged(call, self._target, write.checked(self._target, value))

    @property
    def _collectives(self) -> Collectives:
        collectives: Collectives = self.strategy.extended.collectives
        return collectives
