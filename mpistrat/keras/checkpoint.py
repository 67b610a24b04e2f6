"""`HDF5Checkpoint`: a callback by which a training continues after its job has ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from mpistrat.arguments import as_integer
from mpistrat.checkpoint.training_files import SIGNALS, TrainingFiles
from mpistrat.keras.askers import epoch_iterator, training_data
from mpistrat.keras.datasets import HDF5Dataset, end_at_once
from mpistrat.keras.ranks import rank_and_size
from mpistrat.keras.replicas import Replicas
from mpistrat.keras.saved_training import CallbackStates, SavedTraining, restore_metrics

_logger = logging.getLogger("mpistrat")


class HDF5Checkpoint(Replicas):
    """Save the training to HDF5 files, and resume it from the newest one on any number of ranks.

    Pass it to ``fit`` on every rank, as the last of the callbacks. Its methods are **Collective**.
    It does what `Replicas` does, and what Keras's ``BackupAndRestore`` promises:

    At the start of ``fit``, it restores the newest intact file of the folder: weights, optimizer,
    the position of `data`, the metrics of the epoch that was interrupted, seeds, and the state of
    `callbacks`. ``fit(epochs=E)`` continues in that epoch, at that step, and ends after E epochs
    in all. Damaged files are skipped with a warning.

    It saves ``<directory>/checkpoint-<step>.h5`` at the end of each epoch, or every `save_freq`
    steps and at the end of the training. When the job is about to end, it saves after the current
    step and ends the program with exit code 75 on every rank.

    Parameters
    ----------
    directory : path
        Folder of the files. Only one training may use it.
    data : HDF5Dataset, optional
        The data of ``fit``. Without it, a training that was interrupted within an epoch repeats
        this epoch from its beginning, with a warning.
    save_freq : "epoch" or int
        ``"epoch"``, or after how many steps to save.
    max_to_keep : int or None
        How many of the newest files stay; ``None`` keeps all.
    signals : sequence of signal.Signals
        Signals that announce the end of the job. They are handled during ``fit``.
    walltime_margin_s : float, optional
        Save this many seconds before the end of a Slurm job, as in `PreemptionCheckpointHandler`.
    callbacks : sequence of keras.callbacks.Callback
        Callbacks of the same ``fit`` whose state is saved too, such as ``EarlyStopping``: the
        attributes that are numbers, strings or ``None`` and that the training has changed. The best
        weights that ``EarlyStopping(restore_best_weights=True)`` keeps are not among them.

    Attributes
    ----------
    restored_path : str or None
        The file that the last ``fit`` has resumed from.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or is out of range. At the start of ``fit``: if
        ``fit`` trains on a dataset other than `data`, or if the file was saved within an epoch of
        different length.
    CheckpointCorruptError
        At the start of ``fit``, if the folder has files, but none is intact.
    CheckpointMismatchError
        At the start of ``fit``, if the file is of a different model, optimizer or order of `data`,
        of different metrics, or of different arguments `data` and `callbacks`.
    CheckpointError
        If a file cannot be written.
    SystemExit
        With the code 75, after a signal or near the end of the walltime, once the file is there.

    Examples
    --------
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    >>> model.compile("adam", "mse")
    >>> arrays = np.ones((12, 3), np.float32), np.ones((12, 2), np.float32)
    >>> data = mk.HDF5Dataset(ms.data.Dataset.from_arrays(arrays).batch(6))
    >>> saved = mk.HDF5Checkpoint("runs/keras", data=data)
    >>> history = model.fit(data, epochs=2, verbose=0, callbacks=[saved])
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        data: HDF5Dataset | None = None,
        save_freq: str | int = "epoch",
        max_to_keep: int | None = 5,
        signals: Iterable[signal.Signals | int] = SIGNALS,
        walltime_margin_s: float | None = None,
        callbacks: Sequence[keras.callbacks.Callback] = (),
    ) -> None:
        super().__init__()
        if data is not None and not isinstance(data, HDF5Dataset):
            raise TypeError(
                f"data must be the mpistrat.keras.HDF5Dataset of fit, or None, not {data!r}."
            )
        every_n_steps: int | None = None
        if save_freq != "epoch":
            if isinstance(save_freq, str):
                raise ValueError(f'save_freq must be "epoch" or a number, not {save_freq!r}.')
            every_n_steps = as_integer("save_freq", save_freq, 1)
        for each in callbacks:
            if not isinstance(each, keras.callbacks.Callback):
                raise TypeError(f"callbacks must hold keras.callbacks.Callback, not {each!r}.")
        self.restored_path: str | None = None
        self._data = data
        self._files = TrainingFiles(
            directory, max_to_keep, every_n_steps, signals, walltime_margin_s
        )
        self._callbacks = CallbackStates(callbacks)
        self._progress: SavedTraining
        self._epoch = self._batches = self._batches_before = 0
        """The epoch, how many of its steps have ended, and how many of these in earlier runs."""
        self._resumed: dict[str, Any] | None = None
        """The progress in the file, until the first epoch has begun."""
        self._step_before = 0
        self._lengths: tuple[int | None, int | None] | None = None
        """The numbers of steps and batches of Keras's epochs, while one is resumed."""
        self._quiet: warnings.catch_warnings[None] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Compare the ranks, and restore the newest file."""
        super().on_train_begin(logs)
        self._check_data()
        self._close()
        self._lengths = None
        self._batches = self._batches_before = 0
        num_metrics = len(self.model.metrics_variables)
        self._progress = SavedTraining(
            self._data is not None, len(self._callbacks.current()), num_metrics
        )
        objects = {"model": self.model, "optimizer": self.model.optimizer}
        if self._data is not None:
            objects["data"] = self._data
        self.restored_path = self._files.open(
            self._prepare, {**objects, "training": self._progress}
        )
        self._resumed = None if self.restored_path is None else self._progress.content
        if self._resumed is not None:
            self._resume(self._resumed)

    def _check_data(self) -> None:
        """Raise for data whose position would not fit, or warn if it is not saved."""
        trained_on = training_data()
        if self._data is None:
            if isinstance(trained_on, HDF5Dataset) and rank_and_size()[0] == 0:
                _logger.warning(
                    "fit trains on an HDF5Dataset, but HDF5Checkpoint was given no data=, so its "
                    "position is not saved, and a resumed run begins with the first pass again."
                )
            return
        if trained_on is not self._data:
            raise ValueError(
                "The data= of HDF5Checkpoint is not the dataset that fit trains on. Pass the same "
                "HDF5Dataset to both."
            )

    def _resume(self, content: dict[str, Any]) -> None:
        """Set the epoch, the seeds and the data to the progress in the file."""
        training = self._training
        training.seed, training.step = content["seed"], content["step"]
        training.set_seeds(self.model, content["seeds"])
        batches = content["batches"]
        if batches and self._data is None:
            if rank_and_size()[0] == 0:
                _logger.warning(
                    "%s was saved after %d steps of epoch %d, but HDF5Checkpoint was given no "
                    "data=, so this epoch begins again with its first batch.",
                    self.restored_path,
                    batches,
                    content["epoch"],
                )
            content["batches"] = 0
        elif batches:
            self._resume_within_epoch(content)
        self.model._initial_epoch = content["epoch"]

    def _resume_within_epoch(self, content: dict[str, Any]) -> None:
        steps, batches = self.params.get("steps"), content["batches"]
        if steps is None or batches > steps:
            raise ValueError(
                f"{self.restored_path} was saved after {batches} steps of an epoch, but an epoch "
                f"has {steps} steps now. Use the same steps_per_epoch."
            )
        if batches == steps:
            assert self._data is not None
            end_at_once(self._data, True)
            return
        # Keras reads the length of an epoch at its beginning.
        iterator = epoch_iterator()
        self._lengths = iterator.steps_per_epoch, iterator._num_batches
        if iterator.steps_per_epoch:
            iterator.steps_per_epoch = steps - batches
        else:
            iterator._num_batches = steps - batches

    def _end_resumed_epoch(self) -> None:
        """Let the next epochs have all their steps."""
        if self._lengths is not None:
            iterator = epoch_iterator()
            iterator.steps_per_epoch, iterator._num_batches = self._lengths
            self._lengths = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Save the epoch before, or continue the one that was interrupted."""
        # Only now, because callbacks may change in `on_epoch_end` after this one.
        self._save_if_due()
        self._epoch, resumed = epoch, self._resumed
        if resumed is None:
            return
        self._resumed = None
        self.model._initial_epoch = None  # a later `fit` counts its epochs itself
        if epoch != resumed["epoch"]:
            raise ValueError(
                f"{self.restored_path} was saved in epoch {resumed['epoch']}, but fit begins with "
                f"epoch {epoch}. Leave out initial_epoch."
            )
        # In `on_train_begin` callbacks reset themselves.
        self._callbacks.restore(resumed["callbacks"])
        self._batches = self._batches_before = resumed["batches"]
        if self._batches:
            restore_metrics(self.model, resumed)
        if self._batches and self._batches == self.params.get("steps"):
            _take_logs_from_metrics(self.model)
            iterator = epoch_iterator()
            self._lengths = iterator.steps_per_epoch, iterator._num_batches
            # Keras warns that this epoch has fewer batches than steps.
            self._quiet = warnings.catch_warnings()
            self._quiet.__enter__()
            warnings.filterwarnings("ignore", "Your input ran out of data")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Seed PyTorch's generator for this rank and this step."""
        super().on_train_batch_begin(batch, logs)
        self._step_before = self._training.step
        self._end_resumed_epoch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the step, and save if it is time to, or if the job is about to end."""
        super().on_train_batch_end(batch, logs)
        steps = self.params.get("steps") or sys.maxsize
        # Keras counts the steps of the last execution as if it were complete.
        self._batches = min(self._batches_before + batch + 1, steps)
        step = self._training.step
        self._files.end_if_preempted(step)
        self._files.count_steps(self._step_before, step)
        # An evaluation may follow the last step: it belongs to the epoch.
        if self._batches != steps:
            self._save_if_due()

    def _end_quiet(self) -> None:
        if self._quiet is not None:
            self._quiet.__exit__(None, None, None)
            self._quiet = None

    def on_test_begin(self, logs: Any = None) -> None:
        """Compare the numbers of batches, and average moving statistics over the ranks."""
        self._end_quiet()
        super().on_test_begin(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average moving statistics; the epoch is saved before the next one begins."""
        self._end_quiet()
        super().on_epoch_end(epoch, logs)
        self._end_resumed_epoch()
        if self._data is not None:
            end_at_once(self._data, False)
        self._epoch = epoch + 1
        self._batches = self._batches_before = 0
        is_last = self._epoch == self.params.get("epochs") or self.model.stop_training
        self._files.end_epoch()
        if is_last:  # `on_train_end` of other callbacks may change the weights
            self._files.is_due = True
            self._save_if_due()

    def on_train_end(self, logs: Any = None) -> None:
        """Save the end of the training, and let the signals have their earlier effects."""
        super().on_train_end(logs)
        self._save_if_due()
        self.model._initial_epoch = None
        self._close()

    def _save_if_due(self) -> None:
        self._files.save_if_due(self._training.step, (self._epoch, self._batches))

    def _prepare(self) -> None:
        """Describe the progress, before a file is written. **Collective**."""
        self._progress.describe(
            *(self._training, self.model, self._epoch, self._batches),
            self._callbacks.current(),
        )

    def _close(self) -> None:
        self._end_quiet()
        self._files.close()


def _take_logs_from_metrics(model: Any) -> None:
    """Let the next logs be the results of the metrics, though no step of the epoch is left."""
    # Keras takes the names of the logs from the last step.
    name = "_get_metrics_result_or_logs"

    def once(logs: Any) -> dict[str, Any]:
        del vars(model)[name]
        return dict(model.get_metrics_result())

    vars(model)[name] = once
