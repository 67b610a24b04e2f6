"""Mirrored and SyncOnRead variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from mpistrat import context, user_warnings
from mpistrat.arrays import Array, host_view, namespace_of, pieces, place
from mpistrat.collectives.collectives import Collectives
from mpistrat.collectives.operations.broadcast import broadcast
from mpistrat.options import ReduceOp, VariableAggregation
from mpistrat.sharding import replicas_of_ranks
from mpistrat.values import PerReplica, register_storage
from mpistrat.variables.placement import read_only
from mpistrat.variables.variable import Variable
from mpistrat.variables.writes import ASSIGN, DenseWrite, Write


def warn_of_nan(variable: Variable, write: Write, checked: Any) -> None:
    """Warn if the running replica writes a NaN because its part of a batch is empty."""
    if user_warnings.empty_parts:
        named = [(f"{write.how} of {variable.name!r}", each) for each in write.arrays(checked)]
        user_warnings.warn_of_nan(context.layout_of(variable.strategy).replica_id, named)


class WrittenTogether(Variable):
    """A variable with one value, which all replicas write together.

    In replica context the values of the replicas are first merged by `aggregation`. In
    cross-replica context all ranks pass the same value. In update context each rank writes
    its own component.
    """

    _adjective = "mirrored"

    def _write_in_context(self, write: Write, value: Any) -> None:
        kind = context.mode_for(self._strategy, f"The variable {self.name!r}")
        if kind is context.Kind.REPLICA:
            merged = self._merged(write, value)
            # The replicas of a rank share the storage, so one of them writes for all. If each did,
            # an assign_add would count once per replica.
            context.replica_set_of(self.strategy).once(lambda: self._apply(write, merged))
        elif kind is context.Kind.CROSS_REPLICA:
            self._in_unit(
                f"Variable.{write.how}",
                lambda: self._apply(write, self._agreed(write, value)),
                writes=(self,),
            )
        else:
            self._write_locally(write, value)

    def _apply(self, write: Write, own: Any) -> None:
        """Write this rank's part of a value, and wait if other ranks read it."""
        placement = self._placement
        write.apply(placement.own_storage(self._storage), own)
        placement.settle(self._name)

    def _agreed(self, write: Write, value: Any) -> Any:
        with self._collectives_of_writes.call(f"Variable.{write.how}", self.name) as call:
            if isinstance(value, PerReplica):
                raise ValueError(
                    f"{write.how} of the {self._adjective} variable {self.name!r} in cross-replica "
                    "context takes one value for all replicas, not a PerReplica: forgot "
                    "strategy.run? Write inside of it, or reduce the value first."
                )
            checked = write.checked(self._target, value)
            # Copied before the ranks agree: afterwards a different rank may write to memory that
            # `value` is a view of.
            own = self._placement.apart(self._placement.own(checked), self._storage)
            # The ranks compare the whole value, although this rank may write only a part: owners of
            # different rows could not compare their parts.
            call.include_values(map(host_view, write.arrays(checked)))
            call.agree("one value", write.signature(checked))
        return own

    def _merged(self, write: Write, value: Any) -> Any:
        with context.replicas_of(self.strategy).call(f"Variable.{write.how}", self.name) as call:
            # Raised inside the call, so that all ranks raise and none is left waiting.
            if self.aggregation is VariableAggregation.NONE:
                raise ValueError(
                    f"{write.how} of the {self._adjective} variable {self.name!r} in replica "
                    "context needs an aggregation: create the variable with "
                    "aggregation=VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA, or write in "
                    "cross-replica context (merge_call)."
                )
            checked = write.checked(self._target, value)
            warn_of_nan(self, write, checked)
            apart = self._placement.apart(checked, self._storage)
            return self._placement.merge(call, write, self._target, apart)


class MirroredVariable(WrittenTogether):
    """A variable that each replica reads locally. Every write reaches every replica."""


_READ = "read of SyncOnRead variable"
_SAVE = "save of SyncOnRead variable"
_BYTES_REDUCED_AT_ONCE = 2**22
"""Limits the memory that a save needs in addition to the result."""


class SyncOnReadVariable(Variable):
    """A variable that each replica reads and writes locally.

    A read in cross-replica context aggregates the components over replicas.
    """

    _components: Sequence[Array]
    """Components of the replicas of this rank, in the order of the replicas."""

    def _keep(self, storage: Array) -> None:
        others = [storage.copy() for _ in self._replica_ids[1:]]
        self._keep_components([storage, *others])
        self.strategy.extended._note_variable(self)

    def _keep_components(self, components: Sequence[Array]) -> None:
        """Store `components` as the components of this rank's current replicas."""
        self._components, self._storage = components, components[0]
        for each in components:
            register_storage(each, self)

    @property
    def _component(self) -> Array:
        """Component of the running replica; outside `run`, of this rank's first replica."""
        if len(self._components) == 1:
            return self._storage
        own: Array = context.replica_set_of(self.strategy).own(self._components)
        return own

    @property
    def values(self) -> tuple[Array, ...]:
        """Components on this rank, in the order of the replicas. Local."""
        return tuple(
            map(read_only, context.replica_set_of(self.strategy).running(self._components))
        )

    def value(self) -> Array:
        """Return the local component, or the aggregated value in cross-replica context.

        **Collective** in cross-replica context, else **Local**.

        Returns
        -------
        array
            A read-only view of the local component, or a new array with the aggregate.

        Raises
        ------
        ValueError
            In cross-replica context, if the aggregation is NONE.
        """
        if self._kind() is not context.Kind.CROSS_REPLICA:
            return read_only(self._component)
        value: Array = self._in_unit(_READ, lambda: self._on_replicas(self._value_of_all))
        return value

    def _value_of_all(self) -> Array:
        with self._replicas.call(_READ, self.name) as call:
            self._check_can_aggregate("read")
            if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
                return broadcast(call, self._component)
            (value,) = call.all_reduce(ReduceOp[self.aggregation.name], [self._component])
        return value

    def _write_in_context(self, write: Write, value: Any) -> None:
        kind = self._kind()
        if kind is context.Kind.REPLICA:
            self._write_component(write, value)
        elif kind is context.Kind.UPDATE:
            self._on_replicas(lambda: self._write_component(write, value))
        else:
            self._in_unit(
                f"Variable.{write.how}",
                lambda: self._on_replicas(lambda: self._write_of_all(write, value)),
                writes=True,
            )

    def _write_component(self, write: Write, value: Any) -> None:
        self._check_is_dense(write)
        checked = write.checked(self._target, value)
        warn_of_nan(self, write, checked)
        write.apply(self._component, checked)

    def _write_of_all(self, write: Write, value: Any) -> None:
        """Write this replica's share of the value that all ranks pass. **Collective**."""
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
            # Compares the value before the division, because shares of integers differ between
            # replicas.
            call.include_values(map(host_view, write.arrays(checked)))
            call.agree("one value", write.signature(share))
        # Only after all agree, because a write that raises must change nothing.
        write.apply(self._component, share)

    def _on_replicas(self, function: Callable[[], Any]) -> Any:
        return context.replica_set_of(self.strategy).each(function)[0]

    def _check_is_dense(self, write: Write) -> None:
        if not isinstance(write, DenseWrite):
            raise NotImplementedError(
                f"{write.how} is not defined for the SyncOnRead variable {self.name!r}. Use "
                "assign, assign_add or assign_sub, or a mirrored variable."
            )

    def _share(self, array: Array) -> Array:
        """Return this replica's component of the common value `array`."""
        if self.aggregation is not VariableAggregation.SUM:
            return array
        layout = self._ranks.layout
        size, replica_id = layout.num_replicas, layout.replica_id
        if self.dtype.kind == "b":
            raise ValueError(f"The bool variable {self.name!r} cannot be divided under SUM.")
        # Floats are rounded, so the sum of the shares may differ from the value in the last bits.
        if self.dtype.kind not in "iu":
            quotient: Array = array / self.dtype.type(size)
            return quotient
        # The number of replicas may not fit into a small dtype, but the shares do.
        wide = array.astype("i8" if self.dtype.kind == "i" else "u8")
        replicas = wide.dtype.type(size)
        # The first replicas get one more, so that the sum is exact.
        share: Array = wide // replicas + (replica_id < wide % replicas)
        return share.astype(self.dtype)

    def _kind(self) -> context.Kind:
        return context.mode_for(self._strategy, f"The variable {self.name!r}")

    def _check_can_aggregate(self, what: str) -> None:
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"The SyncOnRead variable {self.name!r} has aggregation NONE, so a {what} across "
                "replicas has no meaning. Create it with SUM, MEAN or ONLY_FIRST_REPLICA, or read "
                "it inside strategy.run."
            )

    @property
    def _replicas(self) -> Collectives:
        return context.replicas_of(self.strategy)

    def _component_to_save(self) -> Array | None:
        """Return the aggregate on the first replica, ``None`` elsewhere. **Collective**."""
        value: Array | None = self._on_replicas(self._aggregated)
        return value

    def _aggregated(self) -> Array | None:
        ranks = self._ranks
        is_split = self._split_axis is not None
        # For a split variable, each rank of the first replica saves its part. For others, rank 0
        # saves everything.
        is_wanted = (ranks.layout.replica_id if is_split else ranks.rank) == 0
        is_first = self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA
        value = self._component if is_wanted else None
        with self._replicas.call(_SAVE, self.name) as call:
            self._check_can_aggregate("checkpoint")
            if is_wanted and not is_first:
                # Allocated before the ranks agree, so that all ranks raise if memory is missing.
                value = namespace_of(self._storage).empty_like(self._storage)
            call.agree(str(self.dtype), self.shape)
        if not is_first:
            self._reduce_to(value)
        return value

    def _reduce_to(self, value: Array | None) -> None:
        """Write the components' aggregate to `value` unless it is ``None``. **Collective**."""
        begin = 0
        for piece in pieces(self._component, _BYTES_REDUCED_AT_ONCE):
            with self._replicas.call(_SAVE, self.name) as call:
                reduced = call.reduce(ReduceOp[self.aggregation.name], [piece], 0)
            if value is not None and reduced is not None:
                value.reshape(-1)[begin : begin + piece.size] = reduced[0]
            begin += piece.size

    def _load_value(self, array: np.ndarray) -> None:
        """Set the component of each replica of this rank: value / N under SUM, else the value."""
        load = super()._load_value
        self._in_unit("restore", lambda: self._on_replicas(lambda: load(array)), writes=True)

    def _load_piece(self, start: int, piece: np.ndarray) -> None:
        load = super()._load_piece
        self._on_replicas(lambda: load(start, piece))

    def _own_part(self, array: Any) -> Any:
        return self._share(array)

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncOnReadVariable:
        what = f"The SyncOnRead variable {self.name!r} of a strategy with elastic=True"
        self._ranks.check_can_copy(what)
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        memo[id(self)] = twin
        twin._keep_components([each.copy() for each in self._components])
        return twin


def saves_components(variable: Variable) -> TypeGuard[SyncOnReadVariable]:
    """Return whether files contain the components of all replicas, besides the aggregate."""
    # Only with num_replicas=, which promises the same bits after a resume. An equal share of the
    # aggregate would differ from the old component.
    return isinstance(variable, SyncOnReadVariable) and bool(variable._ranks.arithmetic)


def components_for_root(variable: SyncOnReadVariable) -> np.ndarray | None:
    """Return the components of all replicas on rank 0, ``None`` elsewhere. **Collective**."""
    ranks, layout = variable._ranks, variable._ranks.layout
    own = np.stack([host_view(each) for each in variable._components])
    shares = replicas_of_ranks(layout.num_replicas, layout.num_ranks)
    counts = [len(share) * own[0].size for share in shares]
    with ranks.call(_SAVE, variable.name) as call:
        call.agree("components", str(variable.dtype), variable.shape)
        with call.moving():
            gathered = ranks.channel.transport.gather(own.reshape(-1), counts, 0)
    # Ranks hold consecutive replicas, so rank order is the order of the replicas.
    return None if gathered is None else gathered.reshape(layout.num_replicas, *variable.shape)


def load_components(variable: SyncOnReadVariable, components: Mapping[int, np.ndarray]) -> None:
    """Set the components from a mapping that contains all replicas of this rank. **Local**."""
    ids, device = variable._replica_ids, variable._target.device

    def load() -> None:
        for replica, storage in zip(ids, variable._components, strict=True):
            storage[...] = place(components[replica], device)

    variable._in_unit("restore", load, writes=True)
