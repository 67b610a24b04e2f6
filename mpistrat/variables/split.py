"""Split variables: each rank of a replica holds a part along one axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from mpistrat.arrays import Array, host_view, native, place
from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.collectives.operations.broadcast import broadcast
from mpistrat.collectives.reduction import dtype_name
from mpistrat.variables.blocks import AxisSplit
from mpistrat.variables.divided import SavedInPieces
from mpistrat.variables.initial import InitialValue
from mpistrat.variables.kinds import MirroredVariable, SyncOnReadVariable
from mpistrat.variables.variable import Variable
from mpistrat.variables.writes import ASSIGN, Target


class _SplitParts(SavedInPieces):
    """Base of variables of which this rank holds one part, and replicas the same ones."""

    _split: AxisSplit

    def _begin(
        self, call: CollectiveCall, initial: InitialValue
    ) -> tuple[np.ndarray, tuple[int, ...]]:
        initial.check()
        extended, axis = self.strategy.extended, self._split_axis
        assert axis is not None
        layout = extended._layout
        if initial.is_made_in_parts:
            shape = initial.shape or ()
            self._split = AxisSplit(shape, axis, layout.ranks_per_replica, layout.shard)
            own = np.zeros(self._split.own_shape, initial.dtype)
            if own.size and not initial.is_zero:
                own = initial.part(self._name, own.shape, self._split.own_offset)
            call.agree((dtype_name(own.dtype), shape), self._checked_modes(own.dtype))
            if not initial.is_zero:
                own = self._of_first_replica(call, own)
        else:
            whole = initial.whole(self._name)
            self._split = AxisSplit(whole.shape, axis, layout.ranks_per_replica, layout.shard)
            own = self._split.cut_own(broadcast(call, whole, self._checked_modes(whole.dtype)))
        return np.array(own, order="C"), own.shape

    def _of_first_replica(self, call: CollectiveCall, own: np.ndarray) -> np.ndarray:
        """Return the part that the first replica has made. **Collective**."""
        extended = self.strategy.extended
        if extended._replicas is extended._collectives:
            return broadcast(call, own)
        with extended._replicas.call(call.kind, self._name) as among_replicas:
            part: np.ndarray = broadcast(among_replicas, own)
            return part

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the whole. Local."""
        return self._split.shape

    @property
    def _collectives_of_writes(self) -> Collectives:
        # Each shard has values of its own.
        replicas: Collectives = self.strategy.extended._replicas
        return replicas

    def _zeros(self, name: str, dtype: np.dtype) -> Variable:
        zeros = InitialValue.zeros(self.full_shape, dtype, 1, self._split_axis)
        return Variable(zeros, trainable=False, name=name)

    def _component_to_save(self) -> Array | None:
        """Return the own part of what is saved, on the first replica. Maybe **Collective**."""
        return self._storage

    def _pieces_for_root(self) -> Iterator[np.ndarray | None]:
        """Yield the whole in its flat order, some at a time, on rank 0. **Collective**."""
        layout, own = self.strategy.extended._layout, self._component_to_save()
        mine = np.empty(0, self.dtype)
        for number, slab in enumerate(self._split.slabs(self._elements_per_piece)):
            counts = [0] * layout.num_ranks
            counts[: layout.ranks_per_replica] = self._split.counts(slab)
            with self._ranks.call("save of split variable", self.name) as call:
                call.agree(number)
                with call.moving():
                    if layout.replica_id == 0 and own is not None:
                        mine = native(host_view(self._split.own_of(slab, own)))
                    call.note_moved(mine.nbytes, "gather")
                    joined = call.channel.transport.gather(mine, counts, 0)
            if joined is None:
                yield None
            else:
                bounds = np.cumsum(counts)[: layout.ranks_per_replica - 1]
                first = joined[: sum(counts)]
                yield self._split.join(slab, np.split(first, bounds))

    def _load_value(self, array: np.ndarray) -> None:
        whole = ASSIGN.checked(self._target_of_whole, array)
        ASSIGN.apply(self._storage, self._own_part(self._split.cut_own(whole)))

    def _load_piece(self, start: int, piece: np.ndarray) -> None:
        self._split.fill(self._storage, start, place(self._own_part(piece), self._target.device))

    @property
    def _target_of_whole(self) -> Target:
        whole: Target = dataclasses.replace(self._target, shape=self.full_shape)
        return whole

    def __repr__(self) -> str:
        whole = f"split along axis {self._split_axis} of the shape {self.full_shape}>"
        return f"{super().__repr__().removesuffix('>')}, {whole}"


class SplitVariable(_SplitParts, MirroredVariable, kind="split"):
    """A variable of which each rank of a replica holds a part, mirrored over the replicas."""


class SplitSyncOnReadVariable(_SplitParts, SyncOnReadVariable, kind="split_on_read"):
    """A SyncOnRead variable of which each rank of a replica holds a part."""

    def _component_to_save(self) -> Array | None:
        return self._aggregated(self._ranks.layout.replica_id == 0)
