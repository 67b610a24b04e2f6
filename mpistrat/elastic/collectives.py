"""Collectives of an elastic strategy, whose replicas outlive their ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.elastic.job import job
from mpistrat.elastic.values import ElasticReplicaSet
from mpistrat.errors import CollectiveError
from mpistrat.failures.losses import leave_lost
from mpistrat.options import CommunicationOptions


class ElasticCollectives(Collectives):
    """The collectives of an elastic strategy, each in a unit."""

    is_elastic = True
    replica_set = ElasticReplicaSet

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

    def note_variable(self, variable: Any) -> None:
        """Return `variable` to what it was before a unit that is repeated."""
        job.state.add(variable)

    def check_can_copy(self, what: str) -> None:
        """Refuse to copy `what`, of which a unit that is repeated would not know."""
        raise NotImplementedError(f"{what} cannot be copied. Make another one.")

    def note_optimizer(self, optimizer: Any) -> None:
        """Have `optimizer` prepare its steps again after a loss."""
        job.note_optimizer(optimizer)

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
        job.forget(self)
