"""Checkpoints of a training that a trainer of a different library runs: restore, save, preempt."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

from mpistrat.checkpoint.checkpoint import Checkpoint
from mpistrat.checkpoint.manager import CheckpointManager
from mpistrat.checkpoint.preemption import PreemptionCheckpointHandler

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals by which schedulers announce the end of a job."""
EXIT_CODE = PreemptionCheckpointHandler.EXIT_CODE
"""Exit code of a job that has saved and asks to be run again."""


class SavedProgress:
    """The progress of a training, as a checkpoint saves and restores it.

    Parameters
    ----------
    check : callable
        Function that raises ValueError for a content that does not fit the program.

    Attributes
    ----------
    content : dict
        The content of the next file, or of the restored one; empty before both.
    """

    def __init__(self, check: Callable[[dict[str, Any]], None]) -> None:
        self.content: dict[str, Any] = {}
        self._check = check

    def state_dict(self) -> dict[str, Any]:
        """Return the content."""
        return self.content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a content until the training begins, or raise ValueError if it does not fit."""
        if state:  # it is empty if a restore that other objects refused is rolled back
            self._check(state)
        self.content = state


class _Manager(CheckpointManager):
    """A manager that calls `prepare` before each save, also one that a signal asks for."""

    def __init__(self, prepare: Callable[[], None], *arguments: Any, **options: Any) -> None:
        self._prepare = prepare
        super().__init__(*arguments, **options)

    def save(self, step: int | None = None) -> str:
        self._prepare()
        path: str = super().save(step)
        return path


class TrainingFiles:
    """The files of a callback that saves one training after another, and when to save.

    Parameters
    ----------
    directory, max_to_keep
        As for `CheckpointManager`.
    every_n_steps : int or None
        After how many steps to save; ``None`` saves at the end of each epoch.
    signals : iterable of signal.Signals
        As for `PreemptionCheckpointHandler`.
    walltime_margin_s : float, optional
        As for `PreemptionCheckpointHandler`.

    Attributes
    ----------
    is_due : bool
        Whether to save at the next occasion.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        every_n_steps: int | None,
        signals: Iterable[signal.Signals | int],
        walltime_margin_s: float | None = None,
    ) -> None:
        self._directory, self._max_to_keep = directory, max_to_keep
        self.every_n_steps, self.signals = every_n_steps, tuple(signals)
        self._walltime_margin_s = walltime_margin_s
        self._manager: _Manager | None = None
        self._handler: PreemptionCheckpointHandler | None = None
        self._last: tuple[int, Any] | None = None
        self.is_due = False

    @property
    def is_open(self) -> bool:
        """Whether a training is running. Local."""
        return self._manager is not None

    def open(self, prepare: Callable[[], None], objects: dict[str, Any]) -> str | None:
        """Restore the newest intact file, and return its path; ``None`` without any.

        **Collective**. From the call on, signals do not end the program before a save.

        Parameters
        ----------
        prepare : callable
            Function that brings the objects up to date before a save; may be collective.
        objects : dict
            The objects to save by name, like the arguments of `Checkpoint`.
        """
        self.close()
        self._last, self.is_due = None, False
        self._manager = _Manager(
            prepare, Checkpoint(**objects), self._directory, max_to_keep=self._max_to_keep
        )
        self._handler = PreemptionCheckpointHandler(
            self._manager, self.signals, self._walltime_margin_s
        )
        return self._manager.restore_or_initialize()

    def count_steps(self, before: int, after: int) -> None:
        """Set `is_due` if a multiple of `every_n_steps` lies between two steps. Local."""
        every = self.every_n_steps
        if every is not None and before // every != after // every:
            self.is_due = True

    def end_epoch(self) -> None:
        """Set `is_due` if the end of an epoch is saved. Local."""
        self.is_due = self.is_due or self.every_n_steps is None

    def end_if_preempted(self, step: int) -> None:
        """Save and raise SystemExit(75) on all ranks, if the job is about to end.

        **Collective**.
        """
        assert self._handler is not None
        if self._handler.save_checkpoint_if_preempted(step):
            raise SystemExit(EXIT_CODE)

    def save_if_due(self, step: int, place: Any = None) -> None:
        """Save if it is time to and the last file is of a different step or place.

        **Collective**.
        """
        if not self.is_due or self._manager is None:
            return
        self.is_due = False
        if (step, place) != self._last:
            self._manager.save(step)
            self._last = step, place

    def close(self) -> None:
        """Let the signals have their earlier effects. Local."""
        if self._handler is not None:
            self._handler.close()
        self._handler = self._manager = None
