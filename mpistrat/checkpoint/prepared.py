"""`PreparedManager`: a manager whose objects collect their state right before each save."""

from __future__ import annotations

from typing import Any

from mpistrat.checkpoint.manager import CheckpointManager


class PreparedManager(CheckpointManager):
    """A manager that calls a function before each save.

    Parameters
    ----------
    prepare : callable
        Function without arguments; may be collective.
    *arguments, **options
        The arguments of `CheckpointManager`.
    """

    def __init__(self, prepare: Any, *arguments: Any, **options: Any) -> None:
        self._prepare = prepare
        super().__init__(*arguments, **options)

    def save(self, step: int | None = None) -> str:
        """Prepare, and save as a `CheckpointManager`. **Collective**."""
        self._prepare()
        path: str = super().save(step)
        return path
