"""Loops of Lightning's `fit`: their progress in a checkpoint, and how they resume from it.

Lightning saves its counters in the middle of a step, and guesses from them where it was. Here a
file only has two kinds of progress: between two epochs, or after a step within one, with all
counters of the step complete. So a resumed run never repeats or leaves out an update, such as that
of ``ReduceLROnPlateau``, which follows the validation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mpistrat import nests

_COUNTERS = ("ready", "started", "processed", "completed")


def progress_of(fit_loop: Any, epochs: int, batches: int, in_step: bool) -> dict[str, Any]:
    """Return the state of the loops, as it is between steps. Local.

    Parameters
    ----------
    fit_loop : lightning.pytorch.loops._FitLoop
        The loop of epochs.
    epochs : int
        Number of epochs that have ended, in this call of ``fit`` and those it resumed.
    batches : int
        Number of batches of the current epoch; 0 between epochs.
    in_step : bool
        Whether Lightning has not yet counted the last step, as in ``on_train_batch_end``.
    """
    found = fit_loop.state_dict()
    # Counters of validation start again with each epoch. Positions of loaders are in `data`.
    state = {name: each for name, each in found.items() if ".val_loop" not in name}
    state["state_dict"] = {}
    progress = state["epoch_loop.batch_progress"]
    taken = progress["total"]["ready" if in_step else "completed"]
    _set(progress["total"], dict.fromkeys(_COUNTERS, taken))
    _set(progress["current"], dict.fromkeys(_COUNTERS, batches))
    progress["is_last_batch"] = False
    progress = state["epoch_progress"]
    begun = 1 if batches else 0
    earlier = progress["total"]["completed"] - progress["current"]["completed"]
    for name, before in (("total", earlier), ("current", 0)):
        ended = before + epochs
        counts = (ended + begun, ended + begun, ended, ended)
        _set(progress[name], dict(zip(_COUNTERS, counts, strict=True)))
    if in_step:
        own = state["epoch_loop.state_dict"]
        own["_batches_that_stepped"] += 1
    return state


def _set(tracker: dict[str, Any], counts: dict[str, int]) -> None:
    tracker.update({name: each for name, each in counts.items() if name in tracker})


def resume(fit_loop: Any, state: dict[str, Any], batches: int) -> None:
    """Let the loops continue with the epoch after `batches` of its batches. Local."""
    fit_loop.load_state_dict(state)
    epoch_loop = fit_loop.epoch_loop
    # A loop that restarts would look at validation that came after the last step, but that is done.
    epoch_loop._restarting = False
    fit_loop._restarting = bool(batches)
    if not batches:
        return
    progress = epoch_loop.batch_progress
    progress.current.ready = progress.current.started = batches
    progress.current.processed = progress.current.completed = batches

    def keep() -> None:
        forget(fit_loop)

    # A loop that does not restart counts its batches from 0, here once from `batches`.
    progress.reset_on_run = keep


def forget(fit_loop: Any) -> None:
    """Let the next epoch count its batches from 0, if `resume` has had no effect yet. Local."""
    vars(fit_loop.epoch_loop.batch_progress).pop("reset_on_run", None)


def loaders_of(trainer: Any) -> list[Any]:
    """Return the loaders of `fit`, as Lightning has prepared them. Local."""
    loaders, _ = nests.flatten(trainer.train_dataloader)
    return loaders


def ends_epoch(fit_loop: Any) -> bool:
    """Return whether the batch that was taken last ends its epoch. Local."""
    progress = fit_loop.epoch_loop.batch_progress
    return bool(progress.is_last_batch or progress.current.ready == fit_loop.max_batches)


def may_validate_now(trainer: Any) -> bool:
    """Return whether validation may follow the step that ends now, within an epoch. Local."""
    every = trainer.val_check_batch
    if not trainer.enable_validation or trainer.should_stop:
        return bool(trainer.should_stop)
    if every is None:  # it depends on the time
        return True
    progress = trainer.fit_loop.epoch_loop.batch_progress
    count = progress.current if trainer.check_val_every_n_epoch is not None else progress.total
    return math.isfinite(every) and count.ready % every == 0


def _fetcher(trainer: Any) -> Any:
    return trainer.fit_loop._data_fetcher


def begin_again(trainer: Any) -> None:
    """Create the iterator over the batches of the epoch again. Local."""
    epoch = trainer.fit_loop.epoch_progress.current.processed
    for loader in loaders_of(trainer):
        batch_sampler = getattr(loader, "batch_sampler", None)
        samplers: list[Any] = [getattr(each, "sampler", None) for each in (loader, batch_sampler)]
        for each in [*samplers, batch_sampler]:
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
    iter(_fetcher(trainer))


def skip(trainer: Any, batches: int) -> None:
    """Take batches that an earlier run has trained on. Local."""
    fetcher = _fetcher(trainer)
    if hasattr(fetcher, "iterator_wrapper"):
        raise NotImplementedError(
            "HDF5Checkpoint cannot resume within an epoch if training_step takes dataloader_iter. "
            "Let it take batches, or resume from a file of the end of an epoch."
        )
    for _ in range(batches):
        next(fetcher)
    fetcher.fetched = 0  # Lightning adds the number of batches itself


def _signals(trainer: Any) -> Any:
    return trainer._signal_connector


def keep_signals(trainer: Any, install: Callable[[], None]) -> None:
    """Let `install` run after Lightning has installed its handlers of signals. Local.

    Lightning's handler of SIGTERM calls a collective inside of the handler, and ends the training
    without a file.
    """
    connector = _signals(trainer)
    original = connector.register_signal_handlers

    def register() -> None:
        vars(connector).pop("register_signal_handlers", None)
        original()
        install()

    connector.register_signal_handlers = register


def forget_signals(trainer: Any) -> None:
    """Let Lightning install no handlers, also not those that it found, when it ends. Local."""
    connector = _signals(trainer)
    vars(connector).pop("register_signal_handlers", None)
    connector.teardown()
