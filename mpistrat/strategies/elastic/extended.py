"""Extended interface of an elastic strategy, whose replicas outlive their ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.errors import CollectiveError
from mpistrat.failures.losses import leave_lost
from mpistrat.options import CommunicationOptions
from mpistrat.strategies.elastic.job import job
from mpistrat.strategies.elastic.values import ElasticReplicaSet
from mpistrat.strategies.extended import StrategyExtended
from mpistrat.strategies.groups import RankGroups
from mpistrat.variables import Variable


class ElasticCollectives(Collectives):
    """The collectives of an elastic strategy, each in a unit."""

    is_elastic = True

    @property
    def needs_unit(self) -> bool:
        """Whether no unit runs."""
        return not job.is_in_unit

    def as_unit(
        self, what: str, function: Callable[[], Any], writes: bool | Sequence[Any] = False
    ) -> Any:
        """Return what `function` returns, which is repeated after a loss. **Collective**."""
        return job.run(what, function, writes)

    def at_end(self, check: Callable[[], object]) -> None:
        """Have `check` be called once the unit is done, of which this must be part."""
        job.checks.append(check)

    def on_commit(self, do: Callable[[], object]) -> None:
        """Have `do` be called once the unit is over, of which this must be part."""
        job.commits.append(do)

    def call(
        self, kind: str, name: str | None = None, options: CommunicationOptions | None = None
    ) -> CollectiveCall:
        """Return the context manager of a collective, which must be part of a unit."""
        if not job.is_in_unit and not self.is_closed:
            raise NotImplementedError(
                f"{kind} is not supported with elastic=True: it could not be repeated after a loss."
            )
        return super().call(kind, name, options)

    def take_over(self, other: Collectives) -> None:
        """Have the ranks of `other`, which is not used afterwards."""
        other.abandon()
        own = self._unclosed, self.on_close
        vars(self).update(vars(other))
        (self._unclosed, self.on_close), self.is_closed = own, False
        self.channel.users.add(self)

    def close(self, error: RuntimeError) -> None:
        """Free what no other strategy uses; all later calls raise `error`. **Collective**."""
        try:
            with job.alone():
                super().close(error)
        except CollectiveError as failure:
            if not job.is_loss(failure):
                raise
            leave_lost(self.channel)
            self.abandon()
            self.channel.closed = error


class ElasticExtended(StrategyExtended):
    """`StrategyExtended` of a job that may lose ranks."""

    _replica_set: ElasticReplicaSet
    _replica_set_class = ElasticReplicaSet

    def _take_over(self, other: ElasticExtended) -> None:
        """Have the ranks of `other`: those that are left."""
        ranks = self._replica_set.ranks
        assert isinstance(ranks, ElasticCollectives)
        ranks.take_over(other._replica_set.ranks)
        self._replica_set.reform()
        self._groups = RankGroups.of_one_rank(ranks)
        self._shards = self._groups.shards

    def _copied_for(self, container: Any) -> Any:
        raise NotImplementedError("A strategy with elastic=True cannot be copied. Make another.")

    def _close(self) -> None:
        super()._close()
        job.forget(self._container)

    def _note_variable(self, variable: Variable) -> None:
        job.state.add(variable)

    def _check_may_copy(self, variable: Variable) -> None:
        raise NotImplementedError(
            f"The SyncOnRead variable {variable.name!r} of a strategy with elastic=True cannot be "
            "copied. Make another one."
        )

    def _note_optimizer(self, optimizer: Any) -> None:
        job.note_optimizer(optimizer)

    def _joined_datasets(self, of_replicas: Sequence[Any]) -> Any:
        from mpistrat.strategies.elastic.dataset import ElasticDataset

        parts = [part for each in of_replicas for part in each._parts]
        return ElasticDataset(parts, self._replica_set)
