"""`HDF5Checkpoint`: a callback by which `Trainer.train` continues after its job has ended."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
from collections.abc import Iterable
from typing import Any

import mpistrat.torch  # noqa: F401 - its groups are then known to checkpoints
from mpistrat.arguments import as_integer
from mpistrat.checkpoint.training_files import SIGNALS, SavedProgress, TrainingFiles
from mpistrat.torch.random_states import own_states, row_of, set_own_states, states_of_ranks
from mpistrat.torch.ranks import check_trainer_size, from_root, rank_and_size
from mpistrat.transformers.trainers import ResumingTrainer, load_transformers, trainer_of

_WHAT = "mpistrat.transformers.HDF5Checkpoint"
_logger = logging.getLogger("mpistrat")
_TrainerCallback: Any = load_transformers().TrainerCallback

_RESTORED = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
"""What of the trainer's state is progress. The rest are arguments, and which rank this is."""


class HDF5Checkpoint(_TrainerCallback):
    """Save the training to HDF5 files, and resume it from the newest one on any number of ranks.

    Pass it to ``Trainer(callbacks=[...])`` on every rank, as the last of the callbacks. Its methods
    are **Collective**. It works over `mpistrat.torch.init`, with gloo or NCCL under torchrun, and
    in a single process.

    At the start of ``train``, it restores the newest intact file of the folder: model, optimizer,
    scheduler, ``trainer.state``, the state of callbacks that have one, such as
    ``EarlyStoppingCallback``, and, on the same number of ranks, the global random generators.
    ``train`` then continues at that step: it skips epochs and batches as with
    ``resume_from_checkpoint``. Damaged files are skipped with a warning.

    It saves ``<directory>/checkpoint-<global_step>.h5`` at the end of each epoch, or every
    `every_n_steps` steps and at the end of the training. When the job is about to end, it saves
    after the current step and ends the program with exit code 75 on every rank. If an evaluation
    or a log follows a step, the file is written after it.

    Parameters
    ----------
    directory : path
        Folder of the files. Only one training may use it. It may not be the ``output_dir`` of the
        trainer, whose own checkpoints ``save_strategy="no"`` turns off.
    every_n_steps : int, optional
        After how many steps of the optimizer (``state.global_step``) to save. Default: at the end
        of each epoch.
    max_to_keep : int or None
        How many of the newest files stay; ``None`` keeps all.
    signals : sequence of signal.Signals
        Signals that announce the end of the job. They are handled during ``train``.

    Attributes
    ----------
    restored_path : str or None
        The file that the last ``train`` has resumed from.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or is out of range. At the start of ``train``: if it gets
        ``resume_from_checkpoint`` although the folder has a file.
    LaunchError
        At the start of ``train``, if the trainer does not use all ranks.
    NotImplementedError
        At the start of ``train``, if transformers is older than version 5, or with DeepSpeed.
    CheckpointCorruptError
        At the start of ``train``, if the folder has files, but none is intact.
    CheckpointMismatchError
        At the start of ``train``, if the file is of a different model, optimizer or scheduler.
    CheckpointError
        If a file cannot be written.
    SystemExit
        With the code 75, after a signal, once the file is there.

    Examples
    --------
    >>> config = transformers.BertConfig(
    ...     vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
    ...     intermediate_size=8,
    ... )
    >>> model = transformers.BertForSequenceClassification(config)
    >>> rows = [{"input_ids": [1, 2, 3], "labels": 0}, {"input_ids": [4, 5, 6], "labels": 1}] * 4
    >>> arguments = transformers.TrainingArguments(
    ...     "runs/bert", num_train_epochs=2, per_device_train_batch_size=4, use_cpu=True,
    ...     save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no",
    ... )
    >>> saved = mpistrat.transformers.HDF5Checkpoint("runs/transformers")
    >>> trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[saved])
    >>> trainer.remove_callback(transformers.PrinterCallback)
    >>> trainer.train().global_step
    4
    >>> sorted(os.listdir("runs/transformers"))
    ['checkpoint-2.h5', 'checkpoint-4.h5']
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_n_steps: int | None = None,
        max_to_keep: int | None = 5,
        signals: Iterable[signal.Signals | int] = SIGNALS,
    ) -> None:
        super().__init__()
        if every_n_steps is not None:
            every_n_steps = as_integer("every_n_steps", every_n_steps, 1)
        self.restored_path: str | None = None
        self._files = TrainingFiles(directory, max_to_keep, every_n_steps, signals)
        self._trainer: Any = None
        self._epochs: ResumingTrainer
        self._progress: SavedProgress
        self._resumed: dict[str, Any] | None = None
        """The progress in the file."""
        self._place: tuple[int, int] | None = None
        """The epoch in which the training continues, and its updates that an earlier run did."""
        self._epoch = self._updates = -1
        """The epoch, and how many of its updates have ended."""
        self._is_deferred = self._has_ended = False
        self._now = own_states()
        """The random generators after the last step, or the evaluation that followed it."""

    # What follows is in the order in which the trainer calls it.

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Restore the newest file."""
        self._close()
        trainer = trainer_of(self)
        check_trainer_size(
            _WHAT,
            args.world_size,
            "Call mpistrat.torch.init() before TrainingArguments is created, with use_cpu=True.",
        )
        if trainer.is_deepspeed_enabled:
            raise NotImplementedError(
                "HDF5Checkpoint cannot save the optimizer of DeepSpeed. Use DDP, or the "
                "checkpoints of the trainer."
            )
        self._trainer = trainer
        self._place = self._resumed = None
        self._epoch, self._updates = -1, 0
        self._is_deferred = False
        self._progress = SavedProgress(_check)
        scaler = getattr(trainer.accelerator, "scaler", None)
        found = {
            "model": objects["model"],
            "optimizer": objects["optimizer"],
            "scheduler": objects["lr_scheduler"],
            "scaler": scaler,
            "training": self._progress,
        }
        self._epochs = ResumingTrainer(trainer, self._begin, self._set_generators, self._close)
        self.restored_path = self._files.open(
            self._prepare, {name: each for name, each in found.items() if each is not None}
        )
        if self.restored_path is not None:
            self._resumed = self._progress.content
            self._resume(self._resumed, state)

    def _resume(self, content: dict[str, Any], state: Any) -> None:
        """Set the state of the trainer and of callbacks to the progress in the file."""
        trainer = self._trainer
        for name in _RESTORED:
            setattr(state, name, content["state"][name])
        for callback, saved in zip(self._stateful(), content["callbacks"], strict=False):
            if type(callback).__name__ == saved["class"]:
                for name, value in saved["attributes"].items():
                    setattr(callback, name, value)
        # The trainer has read these from its state before it has called this.
        trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen
        trainer._initial_global_step = trainer._globalstep_last_logged = state.global_step

    def _stateful(self) -> list[Any]:
        """Return the callbacks that the trainer itself would save."""
        callbacks = self._trainer.callback_handler.callbacks
        return [each for each in callbacks if callable(getattr(each, "state", None))]

    def _begin(self, num_updates: int) -> tuple[int, int] | None:
        """Return where the training continues, for an epoch of `num_updates`."""
        content = self._resumed
        if content is None:
            return None
        if self._place is None:
            epoch, updates = content["epoch"], content["updates"]
            before = content["num_updates"]
            if updates and before != num_updates:
                today = updates * num_updates // before
                if rank_and_size(_WHAT)[0] == 0:
                    _logger.warning(
                        "%s was saved after %d of %d steps of an epoch, which has %d steps now: "
                        "the training continues after %d of them. Keep the batch size times the "
                        "number of ranks, so that each example counts once.",
                        *(self.restored_path, updates, before, num_updates, today),
                    )
                updates = today
            self._place = epoch, updates
            self._updates = updates
        return self._place

    def _set_generators(self) -> None:
        """Set the random generators to those in the file, if it is of as many ranks."""
        assert self._resumed is not None
        own = row_of(self._resumed["random"], *rank_and_size(_WHAT))
        if own is not None:
            set_own_states(own)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Save the epoch before."""
        if not self._files.is_open:
            return
        self._epoch += 1
        resumed = self._resumed
        if resumed is not None and self._epoch <= resumed["epoch"]:
            return  # an earlier run has trained it, or began it
        if self._epoch:
            self._files.end_epoch()
            self._now = own_states()
            self._updates = 0
            self._save_here()

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Save after the evaluation or the log that has followed the last step."""
        if self._files.is_open and self._is_deferred:
            self._save_here()

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Save if it is time to, or if the job is about to end."""
        if not self._files.is_open:
            return
        self._now = own_states()
        self._updates += 1
        step = state.global_step
        self._files.count_steps(step - 1, step)
        # What follows the step belongs to it.
        self._is_deferred = bool(
            control.should_evaluate
            or control.should_log
            or control.should_training_stop
            or self._updates == self._epochs.num_updates
        )
        if not self._is_deferred:
            self._save_here()

    def on_evaluate(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Note the random generators, which the evaluation may have used."""
        if self._files.is_open:
            self._now = own_states()

    def on_log(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Save the end of the training, before the trainer goes back to the best model."""
        if self._files.is_open and "train_runtime" in objects.get("logs", {}):
            self._save_end()

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Save the end of the training, and let the signals have their earlier effects."""
        if self._files.is_open:
            if not self._has_ended:
                self._save_end()
            self._close()

    def _save_end(self) -> None:
        if self._resumed is not None and self._step_of_file() == self._trainer.state.global_step:
            return  # nothing was trained
        self._has_ended = self._files.is_due = True
        if self._updates == self._epochs.num_updates:
            self._epoch, self._updates = self._epoch + 1, 0
        self._save_here()

    def _step_of_file(self) -> int:
        assert self._resumed is not None
        step: int = self._resumed["state"]["global_step"]
        return step

    def _save_here(self) -> None:
        """End the program if it is preempted, or save if it is time to."""
        self._is_deferred = False
        step = self._trainer.state.global_step
        self._files.end_if_preempted(step)
        self._files.save_if_due(step)

    def _prepare(self) -> None:
        """Describe the progress, before a file is written. **Collective**."""
        trainer = self._trainer
        trainer.store_flos()  # sums those of all ranks
        state = dataclasses.asdict(dataclasses.replace(trainer.state, stateful_callbacks={}))
        callbacks = [
            {"class": type(each).__name__, "attributes": each.state().get("attributes", {})}
            for each in self._stateful()
        ]
        # Only rank 0 measures times, and callbacks may hold some.
        state, callbacks = from_root((state, callbacks))
        self._progress.content = {
            "state": {name: state[name] for name in _RESTORED},
            "callbacks": callbacks,
            "epoch": self._epoch,
            "updates": self._updates,
            "num_updates": self._epochs.num_updates,
            "random": states_of_ranks(self._now),
        }

    def _close(self) -> None:
        if self._files.is_open:
            self._files.close()
            self._epochs.close()
        self._trainer = self._resumed = None
        self._has_ended = False


def _check(content: dict[str, Any]) -> None:
    """Raise ValueError for a file of a different kind of training."""
    if "num_updates" not in content:
        raise ValueError(f"it was not saved by {_WHAT}")
