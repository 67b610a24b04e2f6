"""`Replicas`: a callback that keeps the ranks one model."""

from __future__ import annotations

from typing import Any

import keras
import torch.distributed as dist

from mpistrat.keras.ranks import check_replicated, check_same_batches, gather
from mpistrat.keras.training import Training, training_of


class Replicas(keras.callbacks.Callback):
    """Keep the ranks one model in the places where Keras leaves them apart.

    Pass it to ``fit``, and to an ``evaluate`` outside of ``fit``, on every rank. Its methods are
    **Collective**.

    - Before the first step of ``fit`` and of each evaluation, the ranks compare their numbers of
      batches. Otherwise ``evaluate`` returns wrong numbers, different on each rank.
    - Dropout and other random layers draw different numbers on each rank, by seeds that depend on
      the seed at the start, the rank and the step: a run with the same seed and the same number of
      ranks draws the same again.
    - Before each evaluation, at the end of each epoch and of the training, moving statistics, such
      as in BatchNormalization, become their means over the ranks. They are the floating variables
      that layers have created with ``trainable=False``.

    Raises
    ------
    DataError
        On every rank, if the ranks have different numbers of batches. Nothing has changed then.
    NotImplementedError
        If the model itself is divided among ranks, by ``ModelParallel``.
    LaunchError
        If this process is one of several, and `init` has not been called.

    Examples
    --------
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0, callbacks=[mk.Replicas()])
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Compare the ranks, and make their seeds differ."""
        self._training.begin_fit(self.model, self.params)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Seed PyTorch's generator for this rank and this step."""
        self._training.begin_step(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the step."""
        self._training.end_step(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average moving statistics over the ranks."""
        self._training.average(self.model, again=False)

    def on_train_end(self, logs: Any = None) -> None:
        """Average moving statistics over the ranks."""
        self._training.average(self.model, again=False)

    def on_test_begin(self, logs: Any = None) -> None:
        """Compare the numbers of batches, and average moving statistics over the ranks."""
        check_replicated()
        self._test_batches = self._number_of_test_batches()
        check_same_batches(gather(self._test_batches))
        self._training.average(self.model)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """If the number of batches is unknown, wait for the other ranks."""
        # At its end, a rank with fewer batches reduces metrics, as the others do after each batch.
        # Their barrier differs from that, so the ranks and lines are named.
        if self._test_batches is None and dist.is_initialized():
            dist.barrier()

    def _number_of_test_batches(self) -> int | None:
        """Return the number of batches of the evaluation that begins."""
        # Within `fit`, the parameters are those of the training.
        within = getattr(self.model, "_eval_epoch_iterator", None)
        if within is not None and self._training.is_of_fit(self.params):
            found: int | None = within.num_batches
            return found
        number: int | None = self.params.get("steps")
        return number

    @property
    def _training(self) -> Training:
        return training_of(self.model)
