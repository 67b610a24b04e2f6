"""Kinds of variables that a strategy makes, and where they may be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["VariableKinds"]


class VariableKinds:
    """Mixin of `StrategyExtended`: what it decides about variables and what holds them."""

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
