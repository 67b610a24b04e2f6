"""Units: public collective calls that an elastic strategy undoes and repeats after a loss.

The strategy restores variables itself. Code that changes anything else registers here how to undo
the change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_Undo = Callable[[], object]

_note: Callable[[_Undo], object] | None = None


class RunsUnits:
    """Base class of collectives, in which each public call runs once."""

    is_elastic = False
    """Whether calls are repeated, without the lost ranks, after a loss."""
    replica_set: type[Any] | None = None
    """Class for the replicas of a rank, if it is not the usual one."""

    @property
    def needs_unit(self) -> bool:
        """Whether this is an elastic strategy and no unit is running."""
        return False

    def as_unit(
        self, what: str, function: Callable[[], Any], writes: bool | Sequence[Any] = False
    ) -> Any:
        """Run `function`, which is the public call `what`, as a unit, and return its result."""
        # `writes` has the variables that it may change, or says whether it may change any.
        return function()

    def at_end(self, check: Callable[[], object]) -> None:
        """Call `check`, which may raise, at the end of the current unit. Here do nothing."""
        # Only a unit that may be repeated has to finish what it has begun.

    def note_variable(self, variable: Any) -> None:
        """Make sure that repeating a unit restores `variable`. Here no unit is repeated."""

    def check_can_copy(self, what: str) -> None:
        """Raise an error if a repeated unit would not know of a copy of `what`. Never here."""

    def note_optimizer(self, optimizer: Any) -> None:
        """Make `optimizer` prepare its steps again after a loss. Here do nothing."""

    def on_commit(self, do: Callable[[], object]) -> None:
        """Call `do`, which cannot be reversed, when the current unit is over. Here call it now."""
        do()


def note_undos_by(note: Callable[[_Undo], object]) -> None:
    """Call `note` with each undo function from now on. Only an elastic job calls this."""
    global _note
    _note = note


def on_undo(undo: _Undo) -> None:
    """Call `undo` if the current unit is repeated. The last registered one is called first."""
    if _note is not None:
        _note(undo)
