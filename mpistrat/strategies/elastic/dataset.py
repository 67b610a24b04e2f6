"""Distributed data set of an elastic strategy: any rank can read any replica's part."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

from mpistrat import nests
from mpistrat.data.distributed_dataset import DistributedDataset, ReplicatedDataset
from mpistrat.values import local_component

_END = object()


class ElasticDataset(ReplicatedDataset):
    """The parts of the replicas that this rank has, also once these are more."""

    def __init__(self, of_replicas: Sequence[DistributedDataset], replicas: Any) -> None:
        self._replica_set = replicas
        self._parts = dict(
            zip(replicas.ids, (each._rank_dataset for each in of_replicas), strict=True)
        )
        """By replica, of all that this rank has had."""
        super().__init__(
            of_replicas, replicas.each, replicas.per_replica, replicas.own, replicas.ranks
        )

    def _part(self, replica: int) -> DistributedDataset:
        if replica not in self._parts:
            of_any: Any = self._rank_dataset
            self._parts[replica] = of_any.of_replica(replica)
        member = self._replica_set.member(replica)
        return DistributedDataset(self._parts[replica], self._device, member)

    def _own_elements(self, pass_number: int, start: int) -> Generator[Any, None, None]:
        """Yield the elements of a pass, each array as a `PerReplica` of all replicas here."""
        number = start
        while True:
            ids = self._replica_set.ids
            parts = [self._part(each)._own_elements(pass_number, number) for each in ids]
            with contextlib.ExitStack() as stack:
                for part in parts:
                    stack.enter_context(contextlib.closing(part))
                while ids == self._replica_set.ids:
                    elements = self._each(lambda: next(self._own_of(parts), _END))  # noqa: B023
                    if elements[0] is _END:
                        return
                    number += 1
                    yield self._remembered(elements, pass_number, number - 1)
                    del elements

    def _remembered(self, elements: Sequence[Any], pass_number: int, number: int) -> Any:
        """Return the joined `elements`, which know their place in the data set."""

        def read(replica: int) -> list[Any]:
            part = self._part(replica)._own_elements(pass_number, number)
            with contextlib.closing(part):
                return [local_component(each) for each in nests.flatten(next(part))[0]]

        joined = self._joined(elements)
        self._replica_set.remember(joined, lambda ids: [read(each) for each in ids])
        return joined
