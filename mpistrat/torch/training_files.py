"""Checkpoints of a training that a trainer of a different library runs: restore, save, preempt."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

from mpistrat.checkpoint.checkpoint import Checkpoint
from mpistrat.checkpoint.preemption import PreemptionCheckpointHandler
from mpistrat.checkpoint.prepared import PreparedManager

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


class TrainingFiles:
    """The files of one training. Creating it, and all methods but `close`, are **Collective**.

    Parameters
    ----------
    objects : dict
        The objects to save by name, like the arguments of `Checkpoint`.
    prepare : callable
        Function that brings the objects up to date before a save; may be collective.
    directory, max_to_keep
        As for `CheckpointManager`.
    signals : iterable of signal.Signals
        As for `PreemptionCheckpointHandler`.
    """

    def __init__(
        self,
        objects: dict[str, Any],
        prepare: Callable[[], None],
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        signals: Iterable[signal.Signals | int],
    ) -> None:
        checkpoint = Checkpoint(**objects)
        self._manager = PreparedManager(prepare, checkpoint, directory, max_to_keep=max_to_keep)
        self._handler = PreemptionCheckpointHandler(self._manager, signals)
        self._last_step: int | None = None

    def restore(self) -> str | None:
        """Restore the newest intact file, and return its path; ``None`` without any."""
        return self._manager.restore_or_initialize()

    def save(self, step: int) -> None:
        """Save, unless the last file is of this step."""
        if step != self._last_step:
            self._manager.save(step)
            self._last_step = step

    def end_if_preempted(self, step: int) -> None:
        """Save and raise SystemExit(75) on all ranks, if the job is about to end."""
        if self._handler.save_checkpoint_if_preempted(step):
            raise SystemExit(EXIT_CODE)

    def close(self) -> None:
        """Let the signals have their earlier effects. Local."""
        self._handler.close()


def passes_multiple(before: int, after: int, of: int | None) -> bool:
    """Return whether a count has passed a multiple of `of`; never for ``None``. Local."""
    return of is not None and before // of != after // of
