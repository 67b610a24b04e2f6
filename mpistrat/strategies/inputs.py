"""Distribution of data sets and values: what each replica gets of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpistrat import context, nests
from mpistrat.collectives.collectives import Collectives
from mpistrat.options import InputContext, InputOptions, ValueContext
from mpistrat.values import DistributedValues, PerReplica, localize
from mpistrat.variables import Variable

if TYPE_CHECKING:
    from mpistrat.data import Dataset, DistributedDataset


class InputDistribution:
    """Mixin of `StrategyExtended`: what the methods of `Strategy` about data sets do."""

    _container: Any
    _collectives: Collectives

    def _distribute_dataset(
        self, dataset: Dataset, options: InputOptions | None
    ) -> DistributedDataset:
        """Split each global batch over replicas. **Collective**."""
        from mpistrat.data.distributed import distribute  # programs without data need none of it

        context.require_cross_replica(self._container, "experimental_distribute_dataset")
        return self._owned(
            distribute(dataset, options, self._collectives, self._collectives.device)
        )

    def _distribute_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None
    ) -> DistributedDataset:
        """Make one distributed data set of each rank's own. **Collective**."""
        from mpistrat.data.distributed import distribute_from_function

        context.require_cross_replica(self._container, "distribute_datasets_from_function")
        made = distribute_from_function(
            dataset_fn, options, self._collectives, self._collectives.device
        )
        return self._owned(made)

    def _owned(self, dataset: DistributedDataset) -> DistributedDataset:
        dataset.strategy = self._container
        check, owner = context.require_cross_replica, self._container
        dataset._check_context = functools.partial(check, owner, "next(iterator)")
        return dataset

    def _local_results(self, value: Any) -> tuple[Any, ...]:
        """Return a tuple with this rank's component of `value`."""
        return value.values if isinstance(value, Variable) else (localize(value),)

    def _values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return ``value_fn(context)`` with each leaf as a `PerReplica`."""
        layout = self._collectives.layout
        nest = value_fn(ValueContext(layout.replica_id, layout.num_replicas))
        return nests.map_nest(_as_per_replica, nest)


def _as_per_replica(leaf: Any) -> Any:
    return leaf if isinstance(leaf, DistributedValues | Variable | None) else PerReplica(leaf)
