"""Mirrored and SyncOnRead variables."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.arrays import Array, host_view, namespace_of, pieces
from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.collectives.operations.broadcast import broadcast
from mpistrat.options import ReduceOp, VariableAggregation
from mpistrat.user_warnings import empty_parts
from mpistrat.values import PerReplica
from mpistrat.variables.variable import Variable
from mpistrat.variables.writes import ASSIGN, DenseWrite, Write


def warn_of_nan(variable: Variable, write: Write, checked: Any) -> None:
    """Warn if the replica that runs writes a NaN because its part of a batch is empty."""
    if empty_parts.of_replicas:
        named = [(f"{write.how} of {variable.name!r}", each) for each in write.arrays(checked)]
        empty_parts.warn_of_nan(variable.strategy.extended._layout.replica_id, named)


class WrittenTogether(Variable):
    """A variable with one value, which all replicas write together.

    In replica context the values of the replicas are merged by `aggregation` first. In
    cross-replica context all ranks give the same value. In update context each rank writes
    its own component.
    """

    _adjective = "mirrored"

    def _write_in_context(self, write: Write, value: Any) -> None:
        kind = context.mode_for(self._strategy, f"The variable {self.name!r}")
        if kind is context.Kind.UPDATE:
            self._write_locally(write, value)
        elif kind is context.Kind.CROSS_REPLICA:
            write.apply(self._own_storage, self._agreed(write, value))
            self._settle()
        else:
            write.apply(self._own_storage, self._merged(write, value))
            self._settle()

    def _merge(self, call: CollectiveCall, write: Write, value: Any) -> Any:
        """Return what the replicas' checked values amount to here. **Collective**."""
        return write.merged(call, self._target, value)

    def _agreed(self, write: Write, value: Any) -> Any:
        with self._collectives_of_writes.call(f"Variable.{write.how}", self.name) as call:
            if isinstance(value, PerReplica):
                raise ValueError(
                    f"{write.how} of the {self._adjective} variable {self.name!r} in cross-replica "
                    "context takes one value for all replicas, not a PerReplica: forgot "
                    "strategy.run? Write inside of it, or reduce the value first."
                )
            checked = write.checked(self._target, value)
            own = self._apart(self._own(checked))
            call.include_values(map(host_view, write.arrays(checked)))
            call.agree("one value", write.signature(checked))
        return own

    def _merged(self, write: Write, value: Any) -> Any:
        with self.strategy.extended._replicas.call(f"Variable.{write.how}", self.name) as call:
            if self.aggregation is VariableAggregation.NONE:
                raise ValueError(
                    f"{write.how} of the {self._adjective} variable {self.name!r} in replica "
                    "context needs an aggregation: make the variable with "
                    "aggregation=VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA, or write in "
                    "cross-replica context (merge_call)."
                )
            checked = write.checked(self._target, value)
            warn_of_nan(self, write, checked)
            return self._merge(call, write, self._apart(checked))

    def _apart(self, value: Any) -> Any:
        """Return a checked `value` in memory that no other rank writes to."""
        return value

    @property
    def _collectives(self) -> Collectives:
        collectives: Collectives = self.strategy.extended._collectives
        return collectives

    @property
    def _collectives_of_writes(self) -> Collectives:
        """Those of the ranks that give the same value in cross-replica context."""
        return self._collectives


class MirroredVariable(WrittenTogether, kind="mirrored"):
    """A variable of which every rank holds all, and whose every write reaches every replica."""


_SAVE = "save of SyncOnRead variable"
_BYTES_REDUCED_AT_ONCE = 2**22
"""So that a save needs little memory in addition to the result, whatever way the values take."""


class SyncOnReadVariable(Variable, kind="on_read"):
    """A variable that each replica reads and writes alone.

    A read in cross-replica context aggregates the components over replicas.
    """

    def value(self) -> Array:
        """Return the local component, or the aggregated value in cross-replica context.

        **Collective** in cross-replica context, else **Local**.

        Raises
        ------
        ValueError
            In cross-replica context, if the aggregation is NONE.
        """
        if self._kind() is not context.Kind.CROSS_REPLICA:
            return super().value()
        with self._replicas.call("read of SyncOnRead variable", self.name) as call:
            self._check_can_aggregate("read")
            if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
                return broadcast(call, self._storage)
            (value,) = call.all_reduce(ReduceOp[self.aggregation.name], [self._storage])
        return value

    def _write_in_context(self, write: Write, value: Any) -> None:
        if self._kind() is not context.Kind.CROSS_REPLICA:
            self._check_is_dense(write)
            checked = write.checked(self._target, value)
            warn_of_nan(self, write, checked)
            write.apply(self._storage, checked)
            return
        with self._collectives_of_writes.call(f"Variable.{write.how}", self.name) as call:
            self._check_is_dense(write)
            if isinstance(value, PerReplica):
                raise ValueError(
                    f"{write.how} of the SyncOnRead variable {self.name!r} in cross-replica "
                    "context takes one value for all replicas, not a PerReplica: forgot "
                    "strategy.run? Write inside of it."
                )
            if write is not ASSIGN and self.aggregation is VariableAggregation.SUM:
                raise ValueError(
                    f"{write.how} of the SyncOnRead variable {self.name!r} under SUM has no "
                    "meaning in cross-replica context: call it inside strategy.run, or use assign."
                )
            checked = write.checked(self._target, value)
            share = self._share(checked)
            call.include_values(map(host_view, write.arrays(checked)))
            call.agree("one value", write.signature(share))
        write.apply(self._storage, share)

    def _check_is_dense(self, write: Write) -> None:
        if not isinstance(write, DenseWrite):
            raise NotImplementedError(
                f"{write.how} is not defined for the SyncOnRead variable {self.name!r}. Use "
                "assign, assign_add or assign_sub, or a mirrored variable."
            )

    def _share(self, array: Array) -> Array:
        """Return this replica's component of the one value `array`."""
        if self.aggregation is not VariableAggregation.SUM:
            return array
        layout = self._collectives.layout
        size, replica_id = layout.num_replicas, layout.replica_id
        if self.dtype.kind == "b":
            raise ValueError(f"The bool variable {self.name!r} cannot be divided under SUM.")
        if self.dtype.kind not in "iu":
            quotient: Array = array / self.dtype.type(size)
            return quotient
        # The number of replicas may not fit into a small dtype, but the shares do.
        wide = array.astype("i8" if self.dtype.kind == "i" else "u8")
        replicas = wide.dtype.type(size)
        # The first replicas hold one more, so that the sum is exact.
        share: Array = wide // replicas + (replica_id < wide % replicas)
        return share.astype(self.dtype)

    def _kind(self) -> context.Kind:
        return context.mode_for(self._strategy, f"The variable {self.name!r}")

    def _check_can_aggregate(self, what: str) -> None:
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"The SyncOnRead variable {self.name!r} has aggregation NONE, so a {what} across "
                "replicas has no meaning. Make it with SUM, MEAN or ONLY_FIRST_REPLICA, or read "
                "it inside strategy.run."
            )

    @property
    def _collectives(self) -> Collectives:
        collectives: Collectives = self.strategy.extended._collectives
        return collectives

    @property
    def _replicas(self) -> Collectives:
        replicas: Collectives = self.strategy.extended._replicas
        return replicas

    @property
    def _collectives_of_writes(self) -> Collectives:
        """Those of the ranks that give the same value in cross-replica context."""
        return self._collectives

    def _save_value(self) -> Array | None:
        """Return the aggregated value on rank 0, ``None`` elsewhere. **Collective**."""
        return self._aggregated(self._collectives.rank == 0)

    def _aggregated(self, is_wanted: bool) -> Array | None:
        """Return the aggregate where it `is_wanted`, on the first replica. **Collective**."""
        is_first = self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA
        value = self._storage if is_wanted else None
        with self._replicas.call(_SAVE, self.name) as call:
            self._check_can_aggregate("checkpoint")
            if is_wanted and not is_first:
                value = namespace_of(self._storage).empty_like(self._storage)
            call.agree(str(self.dtype), self.shape)
        if not is_first:
            self._reduce_to(value)
        return value

    def _reduce_to(self, value: Array | None) -> None:
        """Write the components' aggregate to `value`, where it is there. **Collective**."""
        begin = 0
        for piece in pieces(self._storage, _BYTES_REDUCED_AT_ONCE):
            with self._replicas.call(_SAVE, self.name) as call:
                reduced = call.reduce(ReduceOp[self.aggregation.name], [piece], 0)
            if value is not None and reduced is not None:
                value.reshape(-1)[begin : begin + piece.size] = reduced[0]
            begin += piece.size

    def _own_part(self, array: np.ndarray) -> np.ndarray:
        own: np.ndarray = self._share(array)
        return own

    def _load_value(self, array: np.ndarray) -> None:
        """Set this replica's component: value / N under SUM, else the value."""
        ASSIGN.apply(self._storage, self._share(ASSIGN.checked(self._target, array)))
