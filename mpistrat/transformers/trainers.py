"""Hugging Face's `Trainer` as a callback needs it: found, and resumed where a file says.

A callback gets neither the trainer nor a way to continue within an epoch. ``train`` can: with
``resume_from_checkpoint`` it skips the batches of the interrupted epoch. Here the trainer gets the
same instructions, with the progress of our file in place of a folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def load_transformers() -> Any:
    """Return the package `transformers`; ImportError if it is not installed. Local."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(
            "mpistrat.transformers needs Hugging Face Transformers, which is not installed: "
            "pip install transformers accelerate"
        ) from None
    return transformers


def trainer_of(callback: object) -> Any:
    """Return the trainer that calls a callback now. Local."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        handler = getattr(found, "callback_handler", None)
        if any(each is callback for each in getattr(handler, "callbacks", ())):
            return found
        frame = frame.f_back
    raise RuntimeError(
        "HDF5Checkpoint works only as a callback of transformers.Trainer: pass it as "
        "Trainer(callbacks=[...])."
    )


class ResumingTrainer:
    """A trainer whose epochs begin where a file says, until `close`.

    Parameters
    ----------
    trainer : transformers.Trainer
        The trainer, which is about to train.
    place : callable
        Function of the number of updates per epoch. It returns the epoch in which
        the training continues, and its updates that are left out; ``None`` if it begins.
    set_generators : callable
        Function that sets the random generators as they were at the place.
    on_error : callable
        Function that is called if an epoch ends by an exception.

    Raises
    ------
    NotImplementedError
        If this version of transformers does not run its epochs one at a time.
    """

    def __init__(
        self,
        trainer: Any,
        place: Callable[[int], tuple[int, int] | None],
        set_generators: Callable[[], None],
        on_error: Callable[[], None],
    ) -> None:
        if not (hasattr(trainer, "_run_epoch") and hasattr(trainer, "_load_rng_state")):
            version = load_transformers().__version__
            raise NotImplementedError(
                f"mpistrat.transformers needs transformers 5, and this is {version}: older ones "
                "cannot resume from a callback. Install a newer one: "
                'pip install "transformers>=5"'
            )
        self._trainer, self._place, self._set_generators = trainer, place, set_generators
        self._original, self._on_error = trainer._run_epoch, on_error
        self.num_updates = 0
        """Number of steps of the optimizer per epoch, once the first has begun."""
        trainer._run_epoch = self._run_epoch

    def _run_epoch(self, **options: Any) -> Any:
        """Run an epoch as `_run_rest` does."""
        try:
            return self._run_rest(**options)
        except Exception:  # not the end of a preempted job
            self._on_error()
            raise

    def _run_rest(self, **options: Any) -> Any:
        """Run one epoch, or the rest of it; nothing if it has ended before."""
        trainer = self._trainer
        self.num_updates = options["num_update_steps_per_epoch"]
        place = self._place(self.num_updates)
        if place is None:
            return self._original(**options)
        if options.get("resume_from_checkpoint") is not None:
            raise ValueError(
                "train got resume_from_checkpoint, but HDF5Checkpoint has restored a file too. "
                "Leave one of them out."
            )
        epoch, updates = place
        state = trainer.state
        if options["epoch"] < epoch or state.global_step >= state.max_steps:
            return None
        if options["epoch"] > epoch:
            return self._original(**options)
        trainer._load_rng_state = lambda checkpoint: self._set_generators()
        try:
            return self._original(
                **options
                | {
                    "resume_from_checkpoint": "an HDF5 file",
                    "epochs_trained": epoch,
                    "steps_trained_in_current_epoch": (
                        updates * trainer.args.gradient_accumulation_steps
                    ),
                }
            )
        finally:
            vars(trainer).pop("_load_rng_state", None)

    def close(self) -> None:
        """Let the trainer run its epochs as before. Local."""
        vars(self._trainer).pop("_run_epoch", None)
