"""How far a training has come: the part of a checkpoint that is neither weights nor data."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpistrat.keras.ranks import gather, rank_and_size, sums_of
from mpistrat.keras.training import Training

_SIMPLE = (str, numbers.Number, type(None))


class SavedTraining:
    """The progress of a training, as a checkpoint saves and restores it.

    Parameters
    ----------
    has_data : bool
        Whether the checkpoint has the position of the data.
    num_callbacks, num_metrics : int
        Number of callbacks whose state is saved, and of variables of metrics.

    Attributes
    ----------
    content : dict
        What is saved next, or what was restored; empty before both.
    """

    def __init__(self, has_data: bool, num_callbacks: int, num_metrics: int) -> None:
        self.content: dict[str, Any] = {}
        self._has_data = has_data
        self._num_callbacks, self._num_metrics = num_callbacks, num_metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the content."""
        return self.content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a content until the training begins, or raise ValueError if it does not fit."""
        if not state:  # what it was before a restore that others have refused
            self.content = state
            return
        if state["has_data"] and not self._has_data:
            raise ValueError(
                "it was saved with the position of the data, but HDF5Checkpoint was given no data="
            )
        if len(state["callbacks"]) != self._num_callbacks:
            raise ValueError(
                f"it was saved with callbacks= of {len(state['callbacks'])}, but HDF5Checkpoint "
                f"was given callbacks= of {self._num_callbacks}"
            )
        if state["batches"] and len(state["metrics"]) != self._num_metrics:
            raise ValueError(
                f"it was saved within an epoch with {len(state['metrics'])} variables of metrics, "
                f"but the model has {self._num_metrics}"
            )
        self.content = state

    def describe(
        self,
        training: Training,
        model: Any,
        epoch: int,
        batches: int,
        callbacks: Sequence[dict[str, Any]],
    ) -> None:
        """Set the content to the progress of a training, the same on all ranks. **Collective**."""
        training.average(model)
        metrics = model.metrics_variables if batches else []
        sums = sums_of([each.value for each in metrics])
        self.content = {
            "epoch": epoch,
            "batches": batches,
            "step": training.step,
            "seed": training.seed,
            "seeds": training.seeds(model),
            "metrics": {
                str(number): total.to(each.value.dtype).numpy()
                for number, (each, total) in enumerate(zip(metrics, sums, strict=True))
            },
            # Other attributes than these, such as times, may differ between ranks.
            "callbacks": gather(callbacks)[0],
            "has_data": self._has_data,
        }


def restore_metrics(model: Any, content: dict[str, Any]) -> None:
    """Give rank 0 the sums of the metrics, and the other ranks zeros. Local."""
    rank, _ = rank_and_size()
    for number, variable in enumerate(model.metrics_variables):
        total = content["metrics"][str(number)]
        variable.assign(np.zeros_like(total) if rank else total)


class CallbackStates:
    """The numbers and strings among the attributes of callbacks, as far as the training sets them.

    Parameters
    ----------
    callbacks : sequence of keras.callbacks.Callback
        The callbacks, as the program has made them.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = list(callbacks)
        # Attributes with the values of the program are settings, such as `patience`, which a later
        # run may change.
        self._settings = [_simple_attributes(each) for each in callbacks]

    def current(self) -> list[dict[str, Any]]:
        """Return for each callback the attributes that differ from the program's. Local."""
        return [
            {
                name: value
                for name, value in _simple_attributes(each).items()
                if name not in settings or value != settings[name]
            }
            for each, settings in zip(self._callbacks, self._settings, strict=True)
        ]

    def restore(self, saved: Sequence[dict[str, Any]]) -> None:
        """Set the attributes. Local."""
        for callback, attributes in zip(self._callbacks, saved, strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)


def _simple_attributes(callback: Any) -> dict[str, Any]:
    """Return the attributes that are numbers, strings or ``None``, as values of Python."""
    found = {}
    for name, value in vars(callback).items():
        if isinstance(value, torch.Tensor | np.ndarray | np.generic) and not value.shape:
            value = value.item()
        if isinstance(value, _SIMPLE):
            found[name] = value
    return found
