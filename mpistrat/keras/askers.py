"""Which method of Keras asks a dataset for something: Keras does not say it, the stack does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

_CALLS = ("fit", "evaluate", "predict")


def _frames() -> Iterator[FrameType]:
    """Yield the frames of functions of Keras that wait for this call, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("keras."):
            yield frame
        frame = frame.f_back


def call_of_keras(data: object) -> str | None:
    """Return for which call, "fit", "evaluate" or "predict", Keras uses `data` now. Local."""
    for frame in _frames():
        name = frame.f_code.co_name
        if name in _CALLS:
            # `fit` itself makes the adapter of its validation data.
            is_other = name == "fit" and frame.f_locals.get("x") is not data
            return "evaluate" if is_other else name
    return None


def learns_shapes() -> bool:
    """Return whether Keras takes a batch only to build the model from its shapes. Local."""
    return any(frame.f_code.co_name == "_symbolic_build" for frame in _frames())


def begins_an_iteration() -> bool:
    """Return whether Keras asks the caller because an iteration begins. Local."""
    # It also asks when it makes an adapter for the data, before it takes a batch for shapes.
    return sys._getframe(2).f_code.co_name in ("get_data_adapter", "_get_iterator")


def is_iterating() -> bool:
    """Return whether Keras asks the caller for the length of the iteration that runs. Local."""
    return sys._getframe(2).f_code.co_name == "_finite_generator"


def training_data() -> object:
    """Return the data of the innermost `fit` that is running, ``None`` without one. Local."""
    of_fits = (f.f_locals.get("x") for f in _frames() if f.f_code.co_name == "fit")
    return next(of_fits, None)


def shorten_epoch(steps: int) -> None:
    """Let the epochs of the `fit` that is running have `steps` steps, until called again. Local.

    Only if it was called with ``steps_per_epoch``.
    """
    frame = next(frame for frame in _frames() if frame.f_code.co_name == "fit")
    frame.f_locals["epoch_iterator"].steps_per_epoch = steps
