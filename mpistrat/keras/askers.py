"""Which method of Keras asks a dataset for something: Keras does not say it, the stack does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

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


def asker() -> str:
    """Return the name of the function that calls the caller. Local."""
    return sys._getframe(2).f_code.co_name


def _frame_of_fit() -> FrameType | None:
    return next((frame for frame in _frames() if frame.f_code.co_name == "fit"), None)


def training_data() -> object:
    """Return the data of the innermost `fit` that is running, ``None`` without one. Local."""
    frame = _frame_of_fit()
    return None if frame is None else frame.f_locals.get("x")


def has_steps_per_epoch() -> bool:
    """Return whether the innermost `fit` that is running got ``steps_per_epoch``. Local."""
    frame = _frame_of_fit()
    return frame is not None and bool(frame.f_locals.get("steps_per_epoch"))


def epoch_iterator() -> Any:
    """Return the iterator over the steps of the `fit` that is running. Local."""
    frame = _frame_of_fit()
    assert frame is not None
    return frame.f_locals["epoch_iterator"]
