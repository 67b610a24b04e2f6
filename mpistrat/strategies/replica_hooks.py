"""Hooks of `StrategyExtended` for several replicas on a rank, where each rank has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpistrat.collectives.collectives import Collectives
from mpistrat.layout import Layout

__all__ = ["ReplicaHooks"]


class ReplicaHooks:
    """What `ReplicatedExtended` does in another way."""

    @property
    def _layout(self) -> Layout:
        """Which replica and which shard of it this rank is."""
        return self._collectives.layout

    _collectives: Collectives

    @property
    def local_replica_ids(self) -> range:
        """The numbers of the replicas of this rank. Local."""
        return self._layout.local_replicas

    def _on_replicas(self, function: Callable[[], Any]) -> Any:
        """Return what `function` returns, called as each replica of this rank; of the first."""
        return function()

    def _once(self, function: Callable[[], Any]) -> Any:
        """Return what `function` returns, called once where the replicas of this rank meet."""
        return function()

    def _make_together(self, make: Callable[[], Any], name: str | None) -> Any:
        """Return the variable called `name` that the replicas of this rank make."""
        return make()

    def _own_of(self, of_replicas: Sequence[Any]) -> Any:
        """Return the item of the replica that runs, of one for each replica of this rank."""
        return of_replicas[0]

    def _each_own(self, make: Callable[[], Any]) -> list[Any]:
        """Return one item for each replica of this rank."""
        return [make()]
