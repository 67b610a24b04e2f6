"""Units: public collective calls that an elastic strategy undoes and repeats after a loss.

Variables the strategy restores itself; whatever else a call changes says here how to undo that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["RunsUnits", "at_end_of_unit", "note_by", "on_undo"]

_Action = Callable[[], object]
_Note = Callable[[_Action], object]

_note_undo: _Note | None = None
_note_check: _Note | None = None


class RunsUnits:
    """Base of collectives: here each public call runs once."""

    is_elastic = False
    """Whether calls are repeated without the ranks that are lost meanwhile."""

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

    def on_commit(self, do: Callable[[], object]) -> None:
        """Call `do`, which nothing could reverse, once the unit in which this is called is over."""
        do()


def note_by(note_undo: _Note, note_check: _Note) -> None:
    """Have these be called with each undo and check: of an elastic job, where there is one."""
    global _note_undo, _note_check
    _note_undo, _note_check = note_undo, note_check


def on_undo(undo: _Action) -> None:
    """Have `undo` be called if the unit in which this is called is repeated; the last first."""
    if _note_undo is not None:
        _note_undo(undo)


def at_end_of_unit(check: _Action) -> None:
    """Have `check` be called, which may raise, when the unit is done but not yet over."""
    if _note_check is not None:
        _note_check(check)
