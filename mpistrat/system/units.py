"""Units: public collective calls that an elastic strategy undoes and repeats after a loss.

Variables the strategy restores itself; whatever else a call changes says here how to undo that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_Undo = Callable[[], object]

_note: Callable[[_Undo], object] | None = None


class RunsUnits:
    """Base of collectives: here each public call runs once."""

    is_elastic = False
    """Whether calls are repeated without the ranks that are lost meanwhile."""
    replica_set: type[Any] | None = None
    """The class of the replicas of a rank, where it is not the usual one."""

    @property
    def needs_unit(self) -> bool:
        """Whether this is an elastic strategy, and no unit runs."""
        return False

    def as_unit(
        self, what: str, function: Callable[[], Any], writes: bool | Sequence[Any] = False
    ) -> Any:
        """Return what `function` returns: the public call `what`, with all that belongs to it."""
        # `writes` are the variables that it may change, or whether it may change any.
        return function()

    def at_end(self, check: Callable[[], object]) -> None:
        """Call `check`, which may raise, when the unit in which this is called is done."""
        # Only a unit that may be repeated has to end what it has begun.

    def note_variable(self, variable: Any) -> None:
        """Return `variable` to what it was before a unit that is repeated: none is here."""

    def check_can_copy(self, what: str) -> None:
        """Refuse to copy `what`, which a unit that is repeated could not return: here it could."""

    def note_optimizer(self, optimizer: Any) -> None:
        """Have `optimizer` prepare its steps again after a loss: there is none here."""

    def on_commit(self, do: Callable[[], object]) -> None:
        """Call `do`, which nothing could reverse, once the unit in which this is called is over."""
        do()


def note_undos_by(note: Callable[[_Undo], object]) -> None:
    """Have `note` be called with each undo: of an elastic job, where a process has one."""
    global _note
    _note = note


def on_undo(undo: _Undo) -> None:
    """Have `undo` be called if the unit in which this is called is repeated; the last first."""
    if _note is not None:
        _note(undo)
