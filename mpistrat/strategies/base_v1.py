"""The part of `Strategy` that tf.distribute keeps for programs of its version 1."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from mpistrat.data.contexts import InputContext
from mpistrat.data.dataset import Dataset
from mpistrat.data.distributed_dataset import DistributedDataset
from mpistrat.data.iterators import Optional
from mpistrat.deprecation import warn_deprecated
from mpistrat.errors import OutOfRangeError
from mpistrat.options import InputOptions, InputReplicationMode
from mpistrat.strategies.cluster_resolver import ClusterResolver
from mpistrat.strategies.extended import StrategyExtended

__all__ = ["InputIterator", "StrategyV1"]


class InputIterator:
    """An iterator that starts again when it is initialised.

    Parameters
    ----------
    dataset : iterable
        A distributed data set, or a plain one under the default strategy.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        # Made by the first get_next, so that initialising a new iterator skips no pass.
        self._iterator: Any = None

    def initialize(self) -> None:
        """Start the next pass, or the first one. Local."""
        self._iterator = None

    def get_next(self) -> Any:
        """Return the next element.

        Raises
        ------
        OutOfRangeError
            Past the end.
        """
        element = self.get_next_as_optional()
        if not element.has_value():
            raise OutOfRangeError("The pass has ended. Call initialize() for the next.")
        return element.get_value()

    def get_next_as_optional(self) -> Optional:
        """Return an `Optional` with the next element, without one at the end of the pass."""
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        try:
            return Optional(next(self._iterator))
        except StopIteration:
            return Optional()


class StrategyV1(abc.ABC):
    """Names that are deprecated, and names that steer graphs and sessions."""

    @property
    @abc.abstractmethod
    def extended(self) -> StrategyExtended:
        """What algorithms need that know about distribution. Local."""

    @abc.abstractmethod
    def run(self, fn: Callable[..., Any], args: Any = ()) -> Any:
        """Call `fn` once on each replica."""

    @abc.abstractmethod
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of `value` on this rank. Local."""

    @abc.abstractmethod
    def experimental_distribute_dataset(
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Return `dataset` with each global batch split over the replicas."""

    @abc.abstractmethod
    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Dataset],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Return the data sets that `dataset_fn` makes on each rank, as one."""

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """Return `experimental_local_results`. Deprecated. Local."""
        warn_deprecated("unwrap", "Use experimental_local_results.")
        return self.experimental_local_results(value)

    def group(self, value: Any, name: str | None = None) -> None:
        """Do nothing: `value` is already computed. A no-op by nature. Local."""
        return

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Do nothing: there are no sessions and no servers. A no-op by nature. Local."""
        return

    def update_config_proto(self, config_proto: Any) -> Any:
        """Return a copy of `config_proto`: there are no sessions. A no-op by nature. Local."""
        return copy.deepcopy(config_proto)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """Where this rank stands in the cluster; ``None`` where there is none. Local."""
        return None

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: None = None) -> Dataset:
        """Return a data set of the examples along the first axis of a nest of arrays. Local."""
        return self.extended.experimental_make_numpy_dataset(numpy_input, session)

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """Return `StrategyExtended.colocate_vars_with`. Deprecated. Local."""
        warn_deprecated("Strategy.colocate_vars_with", "Use extended.colocate_vars_with.")
        return self.extended.colocate_vars_with(colocate_with_variable)

    def make_dataset_iterator(self, dataset: Dataset) -> InputIterator:
        """Return an iterator over the distributed data set. Deprecated. **Collective**."""
        warn_deprecated("make_dataset_iterator", "Use iter(experimental_distribute_dataset(...)).")
        return InputIterator(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Dataset],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """Return an iterator over the data sets of `input_fn`. Deprecated. **Collective**.

        Raises
        ------
        ValueError
            For another replication mode than PER_WORKER.
        """
        warn_deprecated("make_input_fn_iterator", "Use distribute_datasets_from_function.")
        if replication_mode is not InputReplicationMode.PER_WORKER:
            raise ValueError(
                f"make_input_fn_iterator: the replication mode {replication_mode!r} is not "
                "supported. Use InputReplicationMode.PER_WORKER."
            )
        return InputIterator(self.distribute_datasets_from_function(input_fn))

    def experimental_run(self, fn: Callable[..., Any], input_iterator: Any = None) -> Any:
        """Run `fn` on the next element of `input_iterator`. Deprecated.

        **Collective**: every rank makes the call.
        """
        warn_deprecated("experimental_run", "Use run(fn, args=(next(iterator),)).")
        self.extended.require_cross_replica("experimental_run")
        return self.run(fn, args=() if input_iterator is None else (input_iterator.get_next(),))

    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Dataset],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Return `distribute_datasets_from_function`. Deprecated. **Collective**."""
        warn_deprecated(
            "experimental_distribute_datasets_from_function",
            "Use distribute_datasets_from_function.",
        )
        return self.distribute_datasets_from_function(dataset_fn, options)
