"""Hooks of `StrategyExtended`: what other strategies do in another way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpistrat.collectives.collectives import Collectives
from mpistrat.layout import Layout
from mpistrat.values import localize


class StrategyHooks:
    """Mixin of `StrategyExtended`: where a rank has one replica, and variables are mirrored."""

    _collectives: Collectives

    # Variables: what a strategy makes, and where they may be used

    _is_remote = False
    """Whether variables lie on other ranks, which this one asks by messages."""
    _kind_of_variables = "mirrored"
    """Of those that are written together and not cut."""
    _kind_of_counters = "mirrored"
    """Of variables that all ranks change alike without a message."""
    _kind_on_read = "on_read"
    """Of SyncOnRead variables."""
    _variable_partitioner: Callable[..., Any] | None = None
    """What is asked into how many parts a variable is cut."""

    def _kind_of_variable(self, initial: Any, on_read: bool) -> str:
        """Return the kind of a new variable, by the name that its class has registered."""
        if on_read:
            return "split_on_read" if initial.is_split else self._kind_on_read
        if initial.is_cut_by(self._variable_partitioner):
            return "sharded"
        if initial.is_replicated:
            return self._kind_of_counters
        kind = self._kind_of_variables
        return "split" if initial.is_split and kind == "mirrored" else kind

    def _note_optimizer(self, optimizer: Any) -> None:
        """Do what is needed for a new optimizer, which all ranks make."""

    def _check_may_save(self, what: str) -> None:
        """Refuse to save or restore on a rank that cannot."""

    # Replicas: several on a rank with `num_replicas=`

    @property
    def _layout(self) -> Layout:
        """Which replica and which shard of it this rank is."""
        return self._collectives.layout

    @property
    def local_replica_ids(self) -> range:
        """The numbers of the replicas of this rank. Local."""
        return self._layout.local_replicas

    def _as_unit(self, what: str, write: Callable[[], None]) -> None:
        """Do `write`: see `RunsUnits.as_unit`."""
        self._collectives.as_unit(what, write, writes=True)

    def _on_replicas(self, function: Callable[[], Any]) -> Any:
        """Return what `function` returns, called as each replica of this rank; of the first."""
        return function()

    def _once(self, function: Callable[[], Any]) -> Any:
        """Return what `function` returns, called once where the replicas of this rank meet."""
        return function()

    def _make_together(self, make: Callable[[], Any], name: str | None, modes: str) -> Any:
        """Return the variable called `name` that the replicas of this rank make."""
        return make()

    def _own_of(self, of_replicas: Sequence[Any]) -> Any:
        """Return the item of the replica that runs, of one for each replica of this rank."""
        return of_replicas[0]

    def _each_own(self, make: Callable[[], Any]) -> list[Any]:
        """Return one item for each replica of this rank."""
        return [make()]

    def _with_components(self, kind: str, value: Any, function: Callable[[Any], Any]) -> list[Any]:
        """Return what `function` returns of the component of each replica of this rank."""
        return [function(localize(value))]

    def _joined(self, of_replicas: Sequence[Any]) -> Any:
        """Return the results of the replicas of this rank as one value."""
        return of_replicas[0]
