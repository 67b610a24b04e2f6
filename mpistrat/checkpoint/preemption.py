"""`PreemptionCheckpointHandler`: save before the scheduler takes the job away."""

from __future__ import annotations

import logging
import numbers
import operator
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from mpistrat.checkpoint.manager import CheckpointManager, knows_step
from mpistrat.checkpoint.object_graph import collectives_for, tree_of
from mpistrat.context import collective
from mpistrat.options import ReduceOp
from mpistrat.settings import environment

_WHAT = "PreemptionCheckpointHandler"
_END_TIME = "SLURM_JOB_END_TIME"
_JOB = "SLURM_JOB_ID"
_logger = logging.getLogger("mpistrat")


_ranks = operator.attrgetter("_collectives")


class PreemptionCheckpointHandler:
    """Saves once, on all ranks at the same step, when the job is about to end.

    Creating a handler is **Collective**, in the main thread. It handles `signals` from then on
    until `close`; all ranks may get the signals, or only one. Create it before a restore, so that a
    signal does not end the program while it reads.

    Parameters
    ----------
    manager : CheckpointManager
        Manager that saves the checkpoint.
    signals : sequence of signal.Signals
        Signals that announce the end of the job. Default: SIGTERM and SIGUSR1.
    walltime_margin_s : float, optional
        Save this many seconds before the end of a Slurm job, as if a signal had arrived. The end is
        ``SLURM_JOB_END_TIME``, which ``jobs/train.sbatch`` sets if Slurm does not. Without Slurm
        the job has no end. ``None``: only the signals count.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or is out of range, or if this is not the main thread.

    Attributes
    ----------
    EXIT_CODE : int
        75, the code by which Unix programs ask to be run again later (EX_TEMPFAIL).
        ``jobs/train.sbatch`` queues a job again if it ends with this code.

    Examples
    --------
    >>> manager = ms.CheckpointManager(ms.Checkpoint(weight=ms.Variable(0.0)), "runs/b")
    >>> handler = ms.PreemptionCheckpointHandler(manager, signals=[signal.SIGUSR1])
    >>> for step in range(3):
    ...     if handler.save_checkpoint_if_preempted(step):
    ...         raise SystemExit(handler.EXIT_CODE)
    >>> handler.close()
    """

    EXIT_CODE = 75

    def __init__(
        self,
        manager: CheckpointManager,
        signals: Iterable[signal.Signals | int] = (signal.SIGTERM, signal.SIGUSR1),
        walltime_margin_s: float | None = None,
    ) -> None:
        if not isinstance(manager, CheckpointManager):
            raise TypeError(f"{_WHAT} needs a CheckpointManager, not {manager!r}.")
        self._manager = manager
        self._collectives = collectives_for(tree_of(manager.checkpoint), _WHAT)
        self._noticed: str | None = None
        self._has_saved = False
        self._has_warned = False
        self._previous: dict[signal.Signals, Any] = {}
        self._own = np.zeros(1, np.int64)
        numbers_of_signals = self._agree(signals, walltime_margin_s)
        if walltime_margin_s is not None and self._collectives.rank == 0:
            _warn_without_end()
        # Only after all ranks have agreed: if the arguments are wrong on one rank, no rank installs
        # a handler.
        for number in numbers_of_signals:
            self._previous[number] = signal.signal(number, self._note)

    @collective(_WHAT, of=_ranks)
    def _agree(
        self, signals: Iterable[signal.Signals | int], walltime_margin_s: float | None
    ) -> list[signal.Signals]:
        """Check the arguments, and return the signals. **Collective**."""
        with self._collectives.call(_WHAT) as call:
            numbers = _checked_signals(signals)
            self._end_s = _end_of_job(walltime_margin_s)
            call.agree(*numbers, walltime_margin_s)
        return numbers

    def __repr__(self) -> str:
        names = ", ".join(each.name for each in self._previous)
        state = "saved" if self._has_saved else self._noticed or "nothing noticed"
        return f"<PreemptionCheckpointHandler of {self._manager!r} for {names or 'none'}: {state}>"

    def save_checkpoint_if_preempted(self, step: int | None = None) -> bool:
        """Save if any rank has noticed the end of the job. **Collective**, once per step.

        The ranks agree by a reduction of one number. The file is on disk when this returns, also
        with ``asynchronous=True``. It saves once; from then on the signals are ignored, so that
        they do not disturb the rest of the program.

        Parameters
        ----------
        step : int, optional
            Step of the checkpoint, as for `CheckpointManager.save`. Without a step, and without a
            step counter of the manager, the file gets the number after the last file. One warning
            says so, because a program that resumes could not tell how far this one had come.

        Returns
        -------
        bool
            Whether the checkpoint has been saved, the same on every rank. If so, end the program.

        Raises
        ------
        CheckpointError
            In the same cases as `CheckpointManager.save`.
        """
        # It is the same on all ranks, so all of them skip the reduction below.
        if self._has_saved:
            return True
        if step is None and not knows_step(self._manager):
            self._warn_without_step()
        # The clocks of nodes differ. Because of the reduction below, all ranks notice the end at
        # the same step, as soon as the first rank does.
        if self._noticed is None and time.time() >= self._end_s:
            self._noticed = "the end of the job is near"
        self._own[0] = self._noticed is not None
        if not self._any_has_noticed():
            return False
        if self._noticed is not None:
            _logger.warning("%s: all ranks save a checkpoint.", self._noticed)
        path = self._manager.save(step)
        self._manager.wait()
        self._has_saved = True
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)
        if self._collectives.rank == 0:
            _logger.warning("Saved %s before the end of the job.", path)
        return True

    @collective(_WHAT, of=_ranks)
    def _any_has_noticed(self) -> bool:
        """Return whether any rank has noticed the end of the job. **Collective**."""
        with self._collectives.call(_WHAT) as call:
            (noticed,) = call.all_reduce(ReduceOp.MAX, [self._own])
        return bool(noticed[0])

    def close(self) -> None:
        """Restore the handling of signals from before this object was created. Local."""
        while self._previous:
            number, previous = self._previous.popitem()
            signal.signal(number, previous)

    def __enter__(self) -> PreemptionCheckpointHandler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _warn_without_step(self) -> None:
        """Warn once, while the program can still be fixed, that its step will be missing."""
        if not self._has_warned and self._collectives.rank == 0:
            _logger.warning(
                "If this job is preempted, its checkpoint is numbered after the last file, "
                "because the program's step is not known. Call "
                "save_checkpoint_if_preempted(step), or pass a step_counter to the manager."
            )
        self._has_warned = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Python runs this between any two bytecodes of the main thread, even during a collective of
        # the program. So it only sets a flag, and the save waits for the next step.
        if self._noticed is None:
            self._noticed = f"got {signal.Signals(number).name}"


def _checked_signals(signals: Any) -> list[signal.Signals]:
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(f"{_WHAT} must be created in the main thread: only it gets signals.")
    if isinstance(signals, str) or not isinstance(signals, Iterable):
        raise TypeError(f"signals must be a sequence of signal.Signals, not {signals!r}.")
    checked: list[signal.Signals] = []
    for each in signals:
        if isinstance(each, bool) or not isinstance(each, numbers.Integral):
            raise TypeError(f"signals must hold signal.Signals, not {each!r}.")
        found: signal.Signals = signal.Signals(int(each))
        if found in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"No program can handle {found.name}. Leave it out of signals.")
        checked.append(found)
    return checked


def _end_of_job(margin_s: Any) -> float:
    """Return when to save the job, in seconds since 1970."""
    if margin_s is None:
        return float("inf")
    if isinstance(margin_s, bool) or not isinstance(margin_s, numbers.Real):
        raise TypeError(f"walltime_margin_s must be a number or None, not {margin_s!r}.")
    if not float(margin_s) > 0:
        raise ValueError(f"walltime_margin_s must be positive or None, but it is {margin_s!r}.")
    text = environment().get(_END_TIME)
    if text is None:
        return float("inf")
    if not text.isdigit():
        raise ValueError(f"{_END_TIME} must be a number of seconds since 1970, not {text!r}.")
    return float(text) - float(margin_s)


def _warn_without_end() -> None:
    if _JOB in environment() and _END_TIME not in environment():
        _logger.warning(
            "walltime_margin_s has no effect: this Slurm job has no variable %s. Set it in the "
            "launch file, as jobs/train.sbatch does.",
            _END_TIME,
        )
