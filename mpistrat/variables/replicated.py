"""Variables of a strategy with ``num_replicas=``: one for a rank, or one for each replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.arrays import Array, host_view, place
from mpistrat.sharding import replicas_of_ranks
from mpistrat.values import register_storage
from mpistrat.variables.kinds import MirroredVariable, SyncOnReadVariable
from mpistrat.variables.variable import read_only
from mpistrat.variables.writes import Write


class ReplicatedVariable(MirroredVariable, kind="replicated"):
    """A mirrored variable, which the replicas of a rank share."""

    @property
    def values(self) -> tuple[Array, ...]:
        """The components on this rank: as many times the same view as it has replicas. Local."""
        return (read_only(self._storage),) * len(self.strategy.extended._group.ids)

    def _write_in_context(self, write: Write, value: Any) -> None:
        kind = context.mode_for(self._strategy, f"The variable {self.name!r}")
        if kind is not context.Kind.REPLICA:
            super()._write_in_context(write, value)
            return
        merged = self._merged(write, value)
        self.strategy.extended._once(lambda: write.apply(self._own_storage, merged))


class ReplicatedOnRead(SyncOnReadVariable, kind="replicated_on_read"):
    """A SyncOnRead variable with a component for each replica of this rank."""

    _storages: list[Array]

    @property
    def _storage(self) -> Array:
        """The component of the replica that runs; outside of all, that of the first one here."""
        own: Array = self.strategy._extended._own_of(self._storages)
        return own

    @_storage.setter
    def _storage(self, storage: Array) -> None:
        others = self.strategy.extended._each_own(storage.copy)[1:]
        self._storages = [storage, *others]
        for each in others:
            register_storage(each, self)

    @property
    def values(self) -> tuple[Array, ...]:
        """The components on this rank, in order of the replicas. Local."""
        if self.strategy.extended._group.turn is not None:
            return (read_only(self._storage),)
        return tuple(map(read_only, self._storages))

    def value(self) -> Array:
        """Return the component of this replica, or in cross-replica context the aggregate."""
        value: Array = self._on_replicas(super().value)
        return value

    def _write_in_context(self, write: Write, value: Any) -> None:
        written = super()._write_in_context
        self._on_replicas(lambda: written(write, value))

    def _save_value(self) -> Array | None:
        value: Array | None = self._on_replicas(super()._save_value)
        return value

    def _load_value(self, array: np.ndarray) -> None:
        load = super()._load_value
        self._on_replicas(lambda: load(array))

    def _load_piece(self, start: int, piece: np.ndarray) -> None:
        load = super()._load_piece
        self._on_replicas(lambda: load(start, piece))

    def _components_for_root(self) -> np.ndarray | None:
        """Return the components of all replicas on rank 0, ``None`` elsewhere. **Collective**."""
        group = self.strategy.extended._group
        own = np.stack([host_view(each) for each in self._storages])
        ranks, layout = group.ranks, group.ranks.layout
        size = own[0].size
        counts = [len(share) * size for share in replicas_of_ranks(layout.total, layout.num_ranks)]
        with ranks.call("save of SyncOnRead variable", self.name) as call:
            call.agree("components", str(self.dtype), self.shape)
            with call.moving():
                gathered = ranks.channel.transport.gather(own.reshape(-1), counts, 0)
        return None if gathered is None else gathered.reshape(layout.total, *self.shape)

    def _load_components(self, components: Mapping[int, np.ndarray]) -> None:
        """Set the components from those of at least this rank's replicas. **Local**."""
        for replica, storage in zip(self.strategy.extended._group.ids, self._storages, strict=True):
            storage[...] = place(components[replica], self._target.device)

    def _on_replicas(self, function: Any) -> Any:
        return self.strategy.extended._on_replicas(function)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicatedOnRead:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        twin._storages = [each.copy() for each in self._storages]
        for each in twin._storages:
            register_storage(each, twin)
        memo[id(self)] = twin
        return twin
