"""Position of a dataset in a checkpoint: where its epoch began, and the batches trained on since.

Lightning may have fetched one batch more than it has trained on, so the dataset's own position
would be too far.
"""

from __future__ import annotations

from typing import Any

from mpistrat.torch.datasets import HDF5Dataset


class Position:
    """Position of a dataset or a loader, as a checkpoint saves and restores it.

    Parameters
    ----------
    data : object
        Object with ``state_dict()`` and ``load_state_dict()``, such as an `HDF5Dataset`.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self.batches = 0
        """Batches of this epoch on which the training has trained."""
        self._start = self._next_epoch()

    def begin_epoch(self) -> None:
        """Note where an epoch begins, before its iterator is created. Local."""
        self._start, self.batches = self._next_epoch(), 0

    def _next_epoch(self) -> dict[str, Any]:
        """Return the position at which the next iteration begins."""
        state = dict(self.data.state_dict())
        if isinstance(self.data, HDF5Dataset) and state["batch"] and not self.data._is_restored:
            # An iteration that ended early, as by `limit_train_batches`, is not continued.
            state |= {"pass": state["pass"] + 1, "batch": 0}
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the same on all ranks for an `HDF5Dataset`."""
        return {"epoch": self._start, "batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where the epoch began; ValueError if the dataset is a different one."""
        self._start, self.batches = state["epoch"], state["batches"]
        if self.batches:
            self.go_on(self.batches)  # a position within an epoch fits only the same dataset
        self.go_on(0)

    def go_on(self, batches: int) -> bool:
        """Go to a batch of the epoch; return False if it must be reached by reading. Local."""
        start = dict(self._start)
        knows = isinstance(self.data, HDF5Dataset)
        if knows:
            start["batch"] += batches
        self.data.load_state_dict(start)
        return knows


def datasets_of(loaders: list[Any]) -> list[Any]:
    """Return loaders and their datasets. Local."""
    datasets = [getattr(each, "dataset", None) for each in loaders]
    return [*loaders, *(each for each in datasets if each is not None)]
