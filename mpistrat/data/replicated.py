"""Distributed data set of a rank with several replicas: one part for each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat import nests
from mpistrat.data.distributed_dataset import DistributedDataset
from mpistrat.values import PerReplica

if TYPE_CHECKING:
    from mpistrat.collectives.collectives import Collectives

_END = object()


class ReplicatedDataset(DistributedDataset):
    """The data sets of the replicas of this rank, whose elements are joined."""

    def __init__(
        self,
        of_replicas: Sequence[DistributedDataset],
        each: Callable[[Callable[[], Any]], list[Any]],
        per_replica: Callable[[Sequence[Any]], Any],
        own_of: Callable[[Sequence[Any]], Any],
        ranks: Collectives,
    ) -> None:
        # `each` calls a function as each replica, and `own_of` returns the item of the one that
        # runs; `per_replica` joins components.
        first = of_replicas[0]
        super().__init__(first._rank_dataset, first._device, ranks)
        self._of_replicas = of_replicas
        self._each, self._per_replica, self._own_of = each, per_replica, own_of

    def _own_elements(self, pass_number: int, start: int) -> Generator[Any, None, None]:
        """Yield the elements of a pass, each array as a `PerReplica` of all replicas here."""
        parts = [each._own_elements(pass_number, start) for each in self._of_replicas]
        with contextlib.ExitStack() as stack:
            for part in parts:
                stack.enter_context(contextlib.closing(part))
            while True:
                elements = self._each(lambda: next(self._own_of(parts), _END))
                if elements[0] is _END:
                    return
                yield self._joined(elements)
                del elements

    def _joined(self, elements: Sequence[Any]) -> Any:
        flat = [nests.flatten(each) for each in elements]
        rows = zip(*(leaves for leaves, _ in flat), strict=True)
        return nests.unflatten(flat[0][1], [self._joined_leaf(row) for row in rows])

    def _joined_leaf(self, leaves: Sequence[Any]) -> Any:
        if not isinstance(leaves[0], PerReplica):
            return leaves[0]
        return self._per_replica([leaf.values[0] for leaf in leaves])
