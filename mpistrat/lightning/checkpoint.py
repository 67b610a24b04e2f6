"""`HDF5Checkpoint`: a callback by which `Trainer.fit` continues after its job has ended."""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Iterable, Sequence
from typing import Any

import mpistrat.torch  # noqa: F401 - its groups are then known to checkpoints
from mpistrat.arguments import as_integer
from mpistrat.checkpoint.training_files import EXIT_CODE, SIGNALS, SavedProgress, TrainingFiles
from mpistrat.lightning import loops
from mpistrat.lightning.positions import Position, datasets_of
from mpistrat.lightning.requirements import check_version, load_lightning
from mpistrat.torch.datasets import HDF5Dataset
from mpistrat.torch.random_states import own_states, row_of, set_own_states, states_of_ranks
from mpistrat.torch.ranks import check_trainer_size, from_root, rank_and_size

_WHAT = "mpistrat.lightning.HDF5Checkpoint"
_logger = logging.getLogger("mpistrat")
_Callback: Any = load_lightning().Callback


class HDF5Checkpoint(_Callback):
    """Save the training to HDF5 files, and resume it from the newest one on any number of ranks.

    Pass it to ``Trainer(callbacks=[...])`` on every rank, as the last of the callbacks. Its methods
    are **Collective**. It works over `mpistrat.torch.init`, with gloo or NCCL under torchrun, and
    in a single process.

    At the start of ``fit``, it restores the newest intact file of the folder: module, optimizers,
    schedulers, the progress of the loops, the position of `data`, the states of callbacks, of the
    datamodule and of the precision plugin, and, on the same number of ranks, the global random
    generators. ``fit`` then continues at that step. Batches of a ``DataLoader`` that an earlier
    run has trained on are read and dropped. Damaged files are skipped with a warning.

    It saves ``<directory>/checkpoint-<global_step>.h5`` at the end of each epoch, or every
    `every_n_steps` steps and at the end of the training. When the job is about to end, it saves
    after the current step and ends the program with exit code 75 on every rank. With gradient
    accumulation, it waits for the step of the optimizer. If validation follows a step, the file is
    written after it.

    Parameters
    ----------
    directory : path
        Folder of the files. Only one training may use it.
    every_n_steps : int, optional
        After how many steps of the optimizer (``trainer.global_step``) to save. Default: at the end
        of each epoch.
    max_to_keep : int or None
        How many of the newest files stay; ``None`` keeps all.
    signals : sequence of signal.Signals
        Signals that announce the end of the job. They are handled during ``fit``, in place of
        Lightning's own handlers.
    data : object or sequence of objects
        Training data whose position is saved: each `mpistrat.torch.HDF5Dataset`, and other datasets
        or loaders with ``state_dict()`` and ``load_state_dict()``.

    Attributes
    ----------
    restored_path : str or None
        The file that the last ``fit`` has resumed from.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or is out of range. At the start of ``fit``: if it does
        not train on `data`, trains on an `mpistrat.torch.HDF5Dataset` that is not in it, or gets
        ``ckpt_path`` although the folder has a file.
    LaunchError
        At the start of ``fit``, if the trainer does not use all ranks.
    NotImplementedError
        At the start of ``fit``, if Lightning is older than 2.6.
    CheckpointCorruptError
        At the start of ``fit``, if the folder has files, but none is intact.
    CheckpointMismatchError
        At the start of ``fit``, if the file is of a different module, of different optimizers,
        schedulers or `data`.
    CheckpointError
        If a file cannot be written.
    SystemExit
        With the code 75, after a signal, once the file is there.

    Notes
    -----
    Values that ``self.log(..., on_epoch=True)`` averages over an epoch, and metrics that are not
    in the module's ``state_dict()``, start again after a restore: in the epoch that was
    interrupted, they are of the steps since then. What a hook ``on_save_checkpoint`` adds is not
    saved; a warning names such hooks.

    Examples
    --------
    >>> class Line(lightning.pytorch.LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = torch.nn.Linear(3, 1)
    ...
    ...     def training_step(self, batch):
    ...         return self.layer(batch).square().mean()
    ...
    ...     def configure_optimizers(self):
    ...         return torch.optim.Adam(self.parameters())
    >>> rows = np.ones((12, 3), np.float32)
    >>> data = mst.HDF5Dataset(ms.data.Dataset.from_arrays(rows).batch(6))
    >>> saved = mpistrat.lightning.HDF5Checkpoint("runs/lightning", data=data)
    >>> trainer = lightning.pytorch.Trainer(
    ...     accelerator="cpu", max_epochs=2, callbacks=[saved], logger=False,
    ...     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ... )
    >>> trainer.fit(Line(), torch.utils.data.DataLoader(data, batch_size=None))
    >>> sorted(os.listdir("runs/lightning"))
    ['checkpoint-2.h5', 'checkpoint-4.h5']
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_n_steps: int | None = None,
        max_to_keep: int | None = 5,
        signals: Iterable[signal.Signals | int] = SIGNALS,
        data: Any = (),
    ) -> None:
        super().__init__()
        if every_n_steps is not None:
            every_n_steps = as_integer("every_n_steps", every_n_steps, 1)
        given = [*data] if isinstance(data, Sequence) else [data]
        for number, each in enumerate(given):
            if isinstance(dataset := getattr(each, "dataset", None), HDF5Dataset):
                given[number] = each = dataset
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise TypeError(
                    "data must hold objects with state_dict() and load_state_dict(), not "
                    f"{each!r}. A DataLoader of a dataset without these needs no data=."
                )
        self.restored_path: str | None = None
        self._files = TrainingFiles(directory, max_to_keep, every_n_steps, signals)
        self._data = [Position(each) for each in given]
        self._trainer: Any = None
        self._progress: SavedProgress
        self._resumed: dict[str, Any] | None = None
        """The progress in the file, until the training has continued there."""
        self._step = 0
        self._is_deferred = self._has_begun = False
        self._place = {"epochs": 0, "batches": 0, "in_step": False}
        """Arguments of `loops.progress_of` for the next save."""
        # How the generators were when the iterator of this epoch was created, and now.
        self._of_epoch, self._now = own_states(), own_states()
        self._epoch_began_with_fit = True
        """Whether `_of_epoch` is from the start of `fit`, before loaders were created."""

    # What follows is in the order in which Lightning calls it.

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the newest file."""
        self._close()
        self.restored_path = None
        if trainer.fast_dev_run:  # which leaves no files
            return
        check_trainer_size(
            _WHAT,
            trainer.world_size,
            'Pass Trainer(strategy="ddp", devices=<ranks per node>, num_nodes=<nodes>).',
        )
        check_version(trainer.fit_loop, load_lightning().__version__)
        self._trainer = trainer
        self._warn_of_hooks(pl_module)
        self._is_deferred = self._has_begun = False
        schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
        objects = {
            "optimizers": list(trainer.optimizers),
            "schedulers": schedulers,
            "data": self._data,
        }
        self._progress = SavedProgress(self._check)
        for each in self._data:
            each.begin_epoch()
        objects = {name: each for name, each in objects.items() if each}
        self.restored_path = self._files.open(
            self._prepare, {"model": pl_module, **objects, "training": self._progress}
        )
        own = {each: signal.getsignal(each) for each in self._files.signals}
        loops.keep_signals(trainer, lambda: _install(own))
        self._resumed = None if self.restored_path is None else self._progress.content
        if self._resumed is not None:
            self._resume(self._resumed)
        else:
            self._of_epoch, self._epoch_began_with_fit = own_states(), True
        self._now = own_states()
        self._step = trainer.global_step

    def _warn_of_hooks(self, pl_module: Any) -> None:
        others = (pl_module, self._trainer.datamodule, *self._trainer.callbacks)
        bases = ("Callback.", "CheckpointHooks.", "_ours")
        names = sorted(
            type(each).__name__
            for each in others
            if not getattr(type(each), "on_save_checkpoint", _ours).__qualname__.startswith(bases)
        )
        if names and rank_and_size(_WHAT)[0] == 0:
            _logger.warning(
                "HDF5Checkpoint does not call on_save_checkpoint of %s, so what it adds is not "
                "saved. Return it from state_dict(), or keep it in a buffer of the module.",
                ", ".join(names),
            )

    def _counts(self) -> dict[str, int]:
        trainer = self._trainer
        return {
            "optimizers": len(trainer.optimizers),
            "schedulers": len(trainer.lr_scheduler_configs),
            "data": len(self._data),
        }

    def _check(self, content: dict[str, Any]) -> None:
        """Raise ValueError for a file of a training with more or fewer objects."""
        if "loops" not in content:
            raise ValueError(f"it was not saved by {_WHAT}")
        own = self._counts()
        for name, number in content["counts"].items():
            if number != own[name]:
                where = "HDF5Checkpoint was given data= of" if name == "data" else "the trainer has"
                raise ValueError(f"it was saved with {number} {name}, but {where} {own[name]}")

    def _resume(self, content: dict[str, Any]) -> None:
        """Set all that Lightning has created by now to the progress in the file."""
        trainer = self._trainer
        if trainer.ckpt_path:
            raise ValueError(
                f"fit got ckpt_path={trainer.ckpt_path!r}, but HDF5Checkpoint has restored "
                f"{self.restored_path}. Leave out ckpt_path, or use a different folder."
            )
        loops.resume(trainer.fit_loop, content["loops"], content["batches"])
        states = content["callbacks"]
        for each in trainer.callbacks:
            if each.state_key in states:
                each.load_state_dict(states[each.state_key])
        if content["datamodule"] and trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(content["datamodule"])
        if content["precision"]:
            trainer.precision_plugin.load_state_dict(content["precision"])
        self._epoch_began_with_fit = content["epoch_began_with_fit"]
        of_epoch = self._own_row(content["random_of_epoch"])
        self._of_epoch = of_epoch or own_states()
        if content["batches"] and self._epoch_began_with_fit and of_epoch is not None:
            set_own_states(of_epoch)  # so loaders draw again what they drew then

    def _own_row(self, states: dict[str, Any]) -> Any:
        return row_of(states, *rank_and_size(_WHAT))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue within the epoch that was interrupted."""
        if self._trainer is None:
            return
        fit_loop = trainer.fit_loop
        if self.restored_path is not None:
            fit_loop._restarting = False  # it has noted where it restarts
        self._check_data()
        content = self._resumed
        if content is None or not content["batches"]:
            return
        self._resumed, self._has_begun = None, True
        batches = self._batches_today(content)
        must_read = True
        if self._data or not self._epoch_began_with_fit:
            self._go_back(content["random_of_epoch"])
            must_read = not self._go_on(batches)
            loops.begin_again(trainer)
        loops.skip(trainer, batches if must_read else 0)
        for each in self._data:
            each.batches = batches
        self._go_back(content["random"])

    def _go_on(self, batches: int) -> bool:
        """Let data begin with a batch of the epoch; return False if it begins with the first."""
        if len(loops.loaders_of(self._trainer)) == len(self._data) == 1:
            return self._data[0].go_on(batches)
        # A loader that is shorter than others begins again within the epoch.
        for each in self._data:
            each.go_on(0)
        return False

    def _go_back(self, states: dict[str, Any]) -> None:
        own = self._own_row(states)
        if own is not None:
            set_own_states(own)

    def _batches_today(self, content: dict[str, Any]) -> int:
        """Return how many batches of the epoch to leave out, which may be longer or shorter now."""
        batches: int = content["batches"]
        before, today = content["num_batches"], _num_batches(self._trainer)
        if today is None or before is None or before == today:
            return batches
        there: int = batches * today // before
        progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
        progress.ready = progress.started = progress.processed = progress.completed = there
        if rank_and_size(_WHAT)[0] == 0:
            _logger.warning(
                "%s was saved after %d of %d batches of an epoch, which has %d batches now: the "
                "training continues after %d of them. Keep the batch size times the number of "
                "ranks, and drop_last, so that each example counts once.",
                *(self.restored_path, batches, before, today, there),
            )
        return there

    def _check_data(self) -> None:
        """Raise for data whose position would not fit, or warn if it is not saved."""
        used = datasets_of(loops.loaders_of(self._trainer))
        given = [each.data for each in self._data]
        for each in given:
            if not any(each is other for other in used):
                raise ValueError(
                    f"fit does not train on the object of data= of HDF5Checkpoint, {each!r}. Pass "
                    "the same object to both. If it is a loader, Lightning replaces it: pass "
                    "Trainer(use_distributed_sampler=False)."
                )
        for each in used:
            if isinstance(each, HDF5Dataset) and not any(each is other for other in given):
                raise ValueError(
                    "fit trains on an mpistrat.torch.HDF5Dataset, whose position HDF5Checkpoint "
                    "must save. Pass HDF5Checkpoint(..., data=dataset)."
                )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Save the epoch before, or begin the one after the file."""
        if self._trainer is None:
            return
        content, self._resumed = self._resumed, None
        if content is not None:
            self._go_back(content["random"])
            for each in self._data:
                each.go_on(0)
            self._of_epoch, self._epoch_began_with_fit = own_states(), False
            loops.begin_again(trainer)
            self._has_begun = True
            return
        if not self._has_begun:
            self._has_begun = True
            return
        self._files.end_epoch()
        self._now = own_states()
        for each in self._data:
            each.begin_epoch()
        self._of_epoch, self._epoch_began_with_fit = self._now, False
        self._save_here(trainer.fit_loop.epoch_progress.current.processed, 0)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after the validation that has followed the last step."""
        if self._trainer is not None and self._is_deferred:
            fit_loop = trainer.fit_loop
            batches = fit_loop.epoch_loop.batch_progress.current.completed
            self._save_here(fit_loop.epoch_progress.current.processed, batches)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time to, or if the job is about to end."""
        if self._trainer is None:
            return
        before, self._step = self._step, trainer.global_step
        if self._step == before and pl_module.automatic_optimization:
            return  # gradients that are accumulated are not saved
        self._now = own_states()
        fit_loop = trainer.fit_loop
        self._files.count_steps(before, self._step)
        # What follows the step belongs to it.
        hook = type(pl_module).on_train_batch_end.__qualname__
        self._is_deferred = (
            loops.ends_epoch(fit_loop)
            or not hook.startswith("ModelHooks.")
            or loops.may_validate_now(trainer)
        )
        batches = fit_loop.epoch_loop.batch_progress.current.ready
        for each in self._data:
            each.batches = batches
        if not self._is_deferred:
            epochs = fit_loop.epoch_progress.current.processed
            self._save_here(epochs, batches, in_step=True)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note the random generators, which validation may have used."""
        if self._trainer is not None and not trainer.sanity_checking:
            self._now = own_states()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the end of the training."""
        if self._trainer is None:
            return
        fit_loop = trainer.fit_loop
        epochs = fit_loop.epoch_progress.current.processed
        progress = fit_loop.epoch_loop.batch_progress.current
        # `max_steps` may end the training within an epoch, which then counts as one that has ended.
        is_whole = loops.ends_epoch(fit_loop) or not progress.completed
        self._files.is_due = True
        if is_whole:
            for each in self._data:
                each.begin_epoch()
            self._of_epoch, self._epoch_began_with_fit = own_states(), False
            self._save_here(epochs, 0)
        else:
            self._save_here(epochs - 1, progress.completed)

    def _save_here(self, epochs: int, batches: int, in_step: bool = False) -> None:
        """End the program if it is preempted, or save if it is time to."""
        self._is_deferred = False
        self._place = {"epochs": epochs, "batches": batches, "in_step": in_step}
        step = self._trainer.global_step
        self._files.end_if_preempted(step)
        self._files.save_if_due(step)

    def _prepare(self) -> None:
        """Describe the progress, before a file is written. **Collective**."""
        trainer = self._trainer
        callbacks = {
            each.state_key: state for each in trainer.callbacks if (state := each.state_dict())
        }
        datamodule = None if trainer.datamodule is None else trainer.datamodule.state_dict()
        # Callbacks may hold times and paths, which differ between ranks.
        callbacks, datamodule = from_root((callbacks, datamodule))
        self._progress.content = {
            "loops": loops.progress_of(trainer.fit_loop, **self._place),  # type: ignore[arg-type]
            "batches": self._place["batches"],
            "num_batches": _num_batches(trainer),
            "counts": self._counts(),
            "callbacks": callbacks,
            "datamodule": datamodule,
            "precision": trainer.precision_plugin.state_dict(),
            "random": states_of_ranks(self._now),
            "random_of_epoch": states_of_ranks(self._of_epoch),
            "epoch_began_with_fit": self._epoch_began_with_fit,
        }

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Let the signals have their earlier effects."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let the signals have their earlier effects, unless the job is ending."""
        is_preempted = isinstance(exception, SystemExit) and exception.code == EXIT_CODE
        self._close(keeps_signals=is_preempted)

    def _close(self, keeps_signals: bool = False) -> None:
        trainer, self._trainer, self._resumed = self._trainer, None, None
        if trainer is not None:
            loops.forget(trainer.fit_loop)
        if not keeps_signals:
            if trainer is not None:
                loops.forget_signals(trainer)
            self._files.close()


def _num_batches(trainer: Any) -> int | None:
    """Return the number of batches of an epoch, ``None`` if it is unknown."""
    number = trainer.num_training_batches
    return None if math.isinf(number) else int(number)


def _ours() -> None:
    """Stand for a hook that an object does not have."""


def _install(handlers: dict[Any, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
