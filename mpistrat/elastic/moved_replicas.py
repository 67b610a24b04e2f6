"""Replicas of an elastic strategy that outlive their rank: values, datasets, the replica set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpistrat import nests
from mpistrat.collectives.collectives import Collectives
from mpistrat.data.distributed_dataset import DistributedDataset, ReplicaPart
from mpistrat.errors import ReplicaLostError
from mpistrat.replicas.replica_set import Make, ReplicaSet
from mpistrat.values import PerReplica, local_component

_Again = Callable[[Sequence[int]], Sequence[Any]]
"""Function that returns the components of some replicas."""


class ElasticReplicas(PerReplica[Any]):
    """A `PerReplica` that knows where the components of other replicas come from."""

    __slots__ = ("_again", "_ids", "_replica_set")

    def __init__(self, components: Sequence[Any], replicas: ElasticReplicaSet) -> None:
        super().__init__(components[0])
        self._join(components, replicas.turn_now)
        self._replica_set, self._ids = replicas, replicas.ids
        self._again: _Again | None = None

    @property
    def values(self) -> tuple[Any, ...]:
        """Components on this rank, in the order of the replicas. Local."""
        self._renew()
        return self._components

    def _own(self) -> Any:
        self._renew()
        return super()._own()

    def _renew(self) -> None:
        """Get the components of the replicas that this rank has now."""
        ids = self._replica_set.ids
        # True almost always: the replicas of this rank change only after a loss.
        if ids == self._ids:
            return
        if self._again is None:
            raise self._lost(ids)
        self._components, self._ids = tuple(self._again(ids)), ids
        self._component = self._components[0]

    def _lost(self, ids: Sequence[int]) -> ReplicaLostError:
        missing = [each for each in ids if each not in self._ids]
        return ReplicaLostError(
            f"A PerReplica of this rank holds replicas {self._ids[0]}-{self._ids[-1]}. After the "
            f"loss of a rank this one also computes {', '.join(map(str, missing))}, but their "
            "components are lost. mpistrat restores only values from distributed datasets, from "
            "distribute_values_from_function, and results of run up to 1 MiB per "
            "replica."
        )

    def short_components(self, limit: int) -> dict[int, Any]:
        """Return the components by replica; none if one is larger than `limit` bytes."""
        size = max(int(getattr(each, "nbytes", 0)) for each in self._components)
        return dict(zip(self._ids, self._components, strict=True)) if size <= limit else {}

    def remember(self, of_all: Callable[[], Mapping[int, Any]]) -> None:
        """Get the components of other replicas from the result of `of_all`, if it has them."""

        def again(ids: Sequence[int]) -> list[Any]:
            found = of_all()
            if not found.keys() >= set(ids):
                raise self._lost(ids)
            return [found[each] for each in ids]

        self._again = again


class ElasticReplicaSet(ReplicaSet):
    """The replicas of this rank, whose number may grow."""

    @property
    def _dataset_class(self) -> type[DistributedDataset]:
        return ElasticDataset

    def per_replica(self, components: Sequence[Any]) -> ElasticReplicas:
        """Return the distributed value of the replicas' components."""
        return ElasticReplicas(components, self)

    def values_from(self, make: Make) -> Any:
        """Return the values that `make` creates. It is called again after a loss."""
        joined = super().values_from(make)
        self.remember(joined, lambda ids: [nests.flatten(each)[0] for each in make(ids)])
        return joined

    def remember(self, nest: Any, again: Callable[[Sequence[int]], Sequence[list[Any]]]) -> None:
        """Let values in `nest` call `again` after a loss, which returns the leaves of replicas."""
        found: list[tuple[Sequence[int], Sequence[list[Any]]]] = []

        def of_leaf(position: int) -> _Again:
            def components(ids: Sequence[int]) -> list[Any]:
                if not found or found[0][0] != ids:  # once for all leaves
                    found[:] = [(ids, again(ids))]
                return [leaves[position] for leaves in found[0][1]]

            return components

        for position, leaf in enumerate(nests.flatten(nest)[0]):
            if isinstance(leaf, ElasticReplicas):
                leaf._again = of_leaf(position)


class ElasticDataset(DistributedDataset):
    """The parts of the replicas of this rank, whose number may grow."""

    def __init__(
        self, parts: Sequence[ReplicaPart], ranks: Collectives, replicas: ElasticReplicaSet
    ) -> None:
        super().__init__(parts, ranks, replicas)
        self._of_replicas = dict(zip(replicas.ids, parts, strict=True))
        """Parts by replica, for all replicas that this rank has ever had."""

    def _part(self, replica: int) -> ReplicaPart:
        known = self._of_replicas.get(replica, self._parts[0])
        of_replica: Any = known.rank_dataset
        if replica not in self._of_replicas:
            of_replica = of_replica.of_replica(replica)
        # After a loss a replica communicates with the surviving ranks.
        part = ReplicaPart(of_replica, known.device, self._replica_set.member(replica))
        self._of_replicas[replica] = part
        return part

    def _joined(self, elements: Sequence[Any], pass_number: int, number: int) -> Any:
        """Return the joined `elements`, which can be read again after a loss."""

        def read(replica: int) -> list[Any]:
            part = self._part(replica).elements(pass_number, number)
            with contextlib.closing(part):
                return [local_component(each) for each in nests.flatten(next(part))[0]]

        joined = super()._joined(elements, pass_number, number)
        self._replica_set.remember(joined, lambda ids: [read(each) for each in ids])
        return joined
