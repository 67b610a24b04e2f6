"""Distributed dataset of an elastic strategy: any rank can read any replica's part."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from mpistrat import nests
from mpistrat.collectives.collectives import Collectives
from mpistrat.data.distributed_dataset import DistributedDataset, ReplicaPart
from mpistrat.values import local_component


class ElasticDataset(DistributedDataset):
    """The parts of the replicas that this rank has, also once these are more."""

    def __init__(self, parts: Sequence[ReplicaPart], ranks: Collectives, replicas: Any) -> None:
        super().__init__(parts, ranks, replicas)
        self._of_replicas = dict(zip(replicas.ids, parts, strict=True))
        """By replica, the parts of all that this rank has had."""

    def _part(self, replica: int) -> ReplicaPart:
        known = self._of_replicas.get(replica, self._parts[0])
        of_replica: Any = known.rank_dataset
        if replica not in self._of_replicas:
            of_replica = of_replica.of_replica(replica)
        # After a loss a replica communicates with the ranks that are left.
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
