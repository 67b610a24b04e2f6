"""Plain names of `Strategy`: methods of tf.distribute under shorter names, and collectives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpistrat import context
from mpistrat.collectives.collectives import Collectives
from mpistrat.collectives.group_collectives import GroupCollectives
from mpistrat.options import (
    CommunicationOptions,
    InputOptions,
    ReduceOpLike,
    ValueContext,
)
from mpistrat.strategies.extended import StrategyExtended
from mpistrat.system.hints import Hinted

if TYPE_CHECKING:
    from mpistrat.data.dataset import Dataset
    from mpistrat.data.distributed_dataset import DistributedDataset

_OF_GRAPHS = frozenset(
    {
        *("colocate_vars_with", "configure", "experimental_distribute_datasets_from_function"),
        *("experimental_make_numpy_dataset", "experimental_run", "group", "make_dataset_iterator"),
        *("make_input_fn_iterator", "unwrap", "update_config_proto"),
    }
)
"""What only programs of TensorFlow 1 need, which `dir` leaves out."""


class _Replicas(GroupCollectives):
    """The collectives of the replicas of a strategy, outside of `Strategy.run`."""

    def __init__(self, extended: StrategyExtended) -> None:
        self._extended = extended

    def _group(self) -> Collectives:
        return self._extended._replicas


class PlainNames(Hinted):
    """Mixin of `Strategy`."""

    _extended: StrategyExtended

    @property
    def xp(self) -> Any:
        """The array namespace of the replica's device: NumPy's or CuPy's. Local."""
        return self._extended.xp

    def distribute_dataset(
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Return `dataset` with each global batch split over the replicas.

        **Collective**. The name in tf.distribute is ``experimental_distribute_dataset``. All ranks
        pass the same dataset; the contents of arrays given to `Dataset.from_arrays` are compared.

        Raises
        ------
        ValueError
            If the dataset was not batched.
        DataError
            On every rank, if its files do not fit, or the datasets of the ranks differ.
        """
        return self._extended._distribute_dataset(dataset, options)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return ``value_fn(context)`` with each leaf of the nest as a `PerReplica`. Local.

        The name in tf.distribute is ``experimental_distribute_values_from_function``.
        """
        return self._extended._values_from_function(value_fn)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of `value` on this rank: a tuple with one element. Local.

        The name in tf.distribute is ``experimental_local_results``.
        """
        return self._extended._local_results(value)

    def assert_replicas_agree(self, variables: object) -> None:
        """Make sure that mirrored variables still hold the same bytes on every rank.

        **Collective**: see `StrategyExtended.assert_replicas_agree`.

        Raises
        ------
        ReplicaDriftError
            On every rank, if a variable differs.
        """
        self._extended.assert_replicas_agree(variables)

    def all_reduce(
        self, reduce_op: ReduceOpLike, value: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduce `value` over replicas, outside of `run`: see `ReplicaContext.all_reduce`.

        **Collective**. `Strategy.reduce` can reduce over axes too, and returns host arrays.

        Parameters
        ----------
        reduce_op : ReduceOp or str
        value : nest of arrays, numbers, IndexedSlices or PerReplica
            The value of this rank's replica. With ``num_replicas=`` a `PerReplica`.
        options : CommunicationOptions, optional

        Returns
        -------
        nest
            As `value`, on the same device, equal on every rank.

        Raises
        ------
        ContextError
            Inside a replica function: use ``get_replica_context().all_reduce`` there.
        ValueError, TypeError
            For a bad argument.
        CollectiveError
            If the ranks disagree.
        """
        return self._as_replicas(
            "all_reduce", value, lambda group, own: group.all_reduce(reduce_op, own, options)
        )[0]

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate `value` over replicas, outside of `run`: see `ReplicaContext.all_gather`.

        **Collective**; arguments and errors as of `all_reduce` and `gather`.
        """
        return self._as_replicas(
            "all_gather", value, lambda group, own: group.all_gather(own, axis, options)
        )[0]

    def broadcast(
        self, value: Any, root: int = 0, options: CommunicationOptions | None = None
    ) -> Any:
        """Return the `value` of replica `root` on every rank: see `ReplicaContext.broadcast`.

        **Collective**; the values of other replicas do not matter. For Python objects there is
        `broadcast_object`.
        """
        return self._as_replicas(
            "broadcast", value, lambda group, own: group.broadcast(own, root, options)
        )[0]

    def scatter(
        self, value: Any, root: int = 0, options: CommunicationOptions | None = None
    ) -> Any:
        """Return this replica's part of the `value` of replica `root`, cut along axis 0.

        **Collective**: see `ReplicaContext.scatter`. With several replicas on a rank the result is
        a `PerReplica`.
        """
        parts = self._as_replicas(
            "scatter", value, lambda group, own: group.scatter(own, root, options)
        )
        return self._extended._joined(parts)

    def _as_replicas(
        self, kind: str, value: Any, collective: Callable[[_Replicas, Any], Any]
    ) -> list[Any]:
        """Return the result of each replica of this rank. **Collective**."""
        context.require_cross_replica(self, kind)
        group = _Replicas(self._extended)
        return self._extended._with_components(kind, value, lambda own: collective(group, own))

    # Names that steer graphs and sessions.

    def group(self, value: object, name: str | None = None) -> None:
        """Do nothing: `value` is already computed. A no-op by nature. Local."""
        return

    def configure(
        self,
        session_config: object = None,
        cluster_spec: object = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Do nothing: there are no sessions and no servers. A no-op by nature. Local."""
        return

    def update_config_proto(self, config_proto: Any) -> Any:
        """Return a copy of `config_proto`: there are no sessions. A no-op by nature. Local."""
        return copy.deepcopy(config_proto)

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()) - _OF_GRAPHS)
