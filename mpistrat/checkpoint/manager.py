"""`CheckpointManager`: a folder of checkpoints, one file per saved step."""

from __future__ import annotations

import copy
import logging
import numbers
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpistrat.arguments import as_bool, as_integer
from mpistrat.checkpoint.async_save import BackgroundSaver
from mpistrat.checkpoint.checkpoint import Checkpoint, save
from mpistrat.checkpoint.format import checked_path
from mpistrat.checkpoint.object_graph import Tree, collectives_for, tree_of
from mpistrat.checkpoint.plan import check_drift_option, writes_here
from mpistrat.checkpoint.restore import restore
from mpistrat.checkpoint.retention import (
    PREFIX,
    Entry,
    Retention,
    file_name,
    list_folder,
    warn_of_damage,
    warn_of_future,
)
from mpistrat.collectives.collectives import Collectives
from mpistrat.context import collective
from mpistrat.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from mpistrat.system.files import remove_file, remove_leftovers
from mpistrat.system.hints import Hinted
from mpistrat.system.text import html_table, keywords
from mpistrat.trackable import Trackable
from mpistrat.variables import Variable


def restore_newest(root: Trackable, directory: str, paths: Sequence[str]) -> str | None:
    """Restore the objects below `root` from the last intact file of `paths`. **Collective**.

    A restore changes all objects or none, so this tries each file, and reads it once.
    """
    errors: list[CheckpointError] = []
    for path in reversed(paths):
        try:
            restore(root, path, allow_missing=False)
        except CheckpointMismatchError:
            raise
        except CheckpointError as error:
            # Every rank gets the error. Only the rank that raised it first logs it.
            if not getattr(error, "_caused_elsewhere", False):
                warn_of_damage(error)
            errors.append(error)
        else:
            return path
    if not errors:
        return None
    # Starting again without an error would lose the progress of the program, and later checkpoints
    # would replace these files.
    corrupt = any(isinstance(error, CheckpointCorruptError) for error in errors)
    raise (CheckpointCorruptError if corrupt else CheckpointError)(
        f"The folder {directory} has checkpoints, but none of them can be restored:\n"
        + "\n".join(f"  {error}" for error in errors)
        + "\nPut an intact copy in place of one, or move these files away to start from the "
        "beginning."
    )


_logger = logging.getLogger("mpistrat")


def _ranks(manager: CheckpointManager) -> Collectives:
    """Return the ranks of the manager's strategy."""
    return collectives_for(manager._tree(), "CheckpointManager")


class CheckpointManager(Hinted):
    """Save checkpoints during training, delete old ones, and find the newest intact one.

    Creating a manager is **Collective**: rank 0 looks through the folder and removes temporary
    files of writers that are dead.

    Parameters
    ----------
    checkpoint : Checkpoint
        The objects to save and restore.
    directory : path
        Folder of the files, created with the first file. Only one manager at a time may use it. A
        relative path is relative to rank 0's working directory at the time when the manager is
        created.
    max_to_keep : int or None
        How many of the newest files stay; ``None`` keeps all.
    keep_every_n_hours : float, optional
        Keep a file that would be deleted, if this many hours have passed since the last file that
        was kept for this reason. Default: keep none.
    step_counter : Variable or callable, optional
        Variable that holds the step, or function that returns it, for calls of `save` without a
        step.
    asynchronous : bool
        Whether `save` returns once it has copied the state, and rank 0 writes the copy while the
        program continues. Rank 0 keeps the memory of the copy for the next save.
    parallel : bool
        Whether all ranks write each file, as ``Checkpoint.write(path, parallel=True)`` does. Not
        together with `asynchronous`.
    drift : str
        What to do about replicas that differ, as for `Checkpoint.write`: ``"warn"``, ``"raise"`` or
        ``"ignore"``.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or is out of range.

    Examples
    --------
    >>> checkpoint = ms.Checkpoint(weight=ms.Variable(np.zeros(2)))
    >>> manager = ms.CheckpointManager(checkpoint, "runs/a", max_to_keep=3, asynchronous=True)
    >>> manager.restore_or_initialize(lambda: print("a new run"))
    a new run
    >>> manager.save(step=100)
    'runs/a/checkpoint-100.h5'
    >>> manager.wait()
    >>> manager
    <CheckpointManager 'runs/a': 1 checkpoints, newest checkpoint-100.h5>
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        keep_every_n_hours: float | None = None,
        step_counter: Variable | Callable[[], int] | None = None,
        asynchronous: bool = False,
        parallel: bool = False,
        drift: str = "warn",
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(f"CheckpointManager needs a Checkpoint, not {checkpoint!r}.")
        self._checkpoint = checkpoint
        self._step_counter = step_counter
        options = max_to_keep, keep_every_n_hours, step_counter, asynchronous, parallel, drift
        self._open(directory, *options)

    @collective("CheckpointManager", of=_ranks)
    def _open(
        self,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_every_n_hours: float | None,
        step_counter: Variable | Callable[[], int] | None,
        asynchronous: bool,
        parallel: bool,
        drift: str,
    ) -> None:
        """Check the arguments, and look through the folder. **Collective**."""
        collectives = _ranks(self)
        with collectives.call("CheckpointManager") as call:
            self._given = checked_path("CheckpointManager", directory)
            _check_counter(step_counter)
            _check_limit("max_to_keep", max_to_keep, numbers.Integral)
            _check_limit("keep_every_n_hours", keep_every_n_hours, numbers.Real)
            asynchronous = as_bool("asynchronous", asynchronous)
            parallel = as_bool("parallel", parallel)
            if asynchronous and parallel:
                raise ValueError(
                    "A CheckpointManager saves with asynchronous=True or with parallel=True, not "
                    "with both: in the background only rank 0 writes."
                )
            check_drift_option(drift)
            given = keywords(
                max_to_keep=max_to_keep,
                keep_every_n_hours=keep_every_n_hours,
                asynchronous=asynchronous,
                parallel=parallel,
                drift=drift,
            )
            call.agree(self._given, *given)
        self._parallel, self._drift = parallel, drift
        self._saver = BackgroundSaver() if asynchronous else None
        self._planned: Retention | None = None
        keep_every_s = None if keep_every_n_hours is None else keep_every_n_hours * 3600.0
        # A program that changes its working directory still means the same folder as before.
        self._directory = self._given
        self._directory, now_s, found = self._from_root("CheckpointManager", self._look_through)
        entries = [Entry(*each) for each in found]
        self._retention = Retention(max_to_keep, keep_every_s, entries, now_s)

    @property
    def directory(self) -> str:
        """The folder, as the program passed it. Local."""
        return self._given

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint object. Local."""
        return self._checkpoint

    @property
    def checkpoints(self) -> list[str]:
        """The paths of all files in the folder, oldest first. Local.

        A file that is being written in the background is included after the next `save` or `wait`.
        """
        return [self._as_given(entry.path) for entry in self._retention.entries]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest of `checkpoints`, intact or not; ``None`` without any. Local."""
        return self.checkpoints[-1] if self.checkpoints else None

    @collective("CheckpointManager.save", of=_ranks, sets_attributes=True)
    def save(self, step: int | None = None) -> str:
        """Write ``<directory>/checkpoint-<step>.h5``, and return the path. **Collective**.

        Before it returns on any rank, older files that are not to be kept have been removed. With
        ``asynchronous=True`` it first waits for the previous file, and returns once the state has
        been copied; the new file appears later, and older files are removed after that.

        Parameters
        ----------
        step : int, optional
            Number of the file, the same on all ranks and not negative. Default: the value of the
            step counter; without one, the last step plus one.

        Returns
        -------
        str
            The path of the file, below `directory` as the program passed it.

        Raises
        ------
        CheckpointError
            In the same cases as `Checkpoint.write`. With ``asynchronous=True``, an error of writing
            the file is raised by the next call, which saves nothing; the one after it saves again.
        TypeError, ValueError
            If `step` is not an integer, or is negative.
        """
        self.wait()
        given = self._step(step)
        tree = self._tree()
        collectives = collectives_for(tree, "CheckpointManager.save")
        with collectives.call("CheckpointManager.save") as call:
            number = _checked_step(given)
            call.agree(number)
        path = os.path.join(self._directory, file_name(number))
        # Rank 0's clock decides, so that all ranks remove the same files.
        now_s = collectives.on_root(time.time, "CheckpointManager.save", self._directory)
        entry = Entry(self._retention.time_after_all(now_s), number, path)
        # This is a plan, which takes effect once the new file is there: a save that fails must not
        # remove an older file.
        planned = copy.copy(self._retention)
        surplus = planned.add(entry)
        if self._saver is not None:
            self._saver.begin(
                # The thread that writes removes the old files after the new one is on disk.
                *(self._checkpoint, path, number, entry.created_s),
                *(lambda: _remove_all(surplus), self._drift),
            )
            self._planned = planned
            return self._as_given(path)
        save(self._checkpoint, path, number, self._parallel, entry.created_s, self._drift)
        self._retention = planned
        if writes_here(tree, collectives):
            collectives.on_root(lambda: _remove_all(surplus), "CheckpointManager.save", path)
        return self._as_given(path)

    @collective("CheckpointManager.restore_or_initialize", writes=True, of=_ranks)
    def restore_or_initialize(self, init_fn: Callable[[], object] | None = None) -> str | None:
        """Restore the newest intact file; if there is no file, call `init_fn`. **Collective**.

        Files that are damaged or cannot be read are skipped with a warning. Every object that the
        program has must be in the file; use `Checkpoint.restore` to restore only some of them.

        Parameters
        ----------
        init_fn : callable, optional
            Function without arguments that every rank calls if the folder has no checkpoint.

        Returns
        -------
        str or None
            The path of the file that was restored, on every rank; ``None`` if there was no file.

        Raises
        ------
        CheckpointError
            If the folder has checkpoints but none can be restored (CheckpointCorruptError if one is
            damaged): training never restarts from the beginning unnoticed. Move the files away if
            you want that.
        CheckpointMismatchError
            If the file lacks an object of the program, or shapes or dtypes differ; the program is
            then unchanged.
        """
        what = "CheckpointManager.restore_or_initialize"
        with _ranks(self).call(what) as call:
            if init_fn is not None and not callable(init_fn):
                raise TypeError(f"init_fn must be a function or None, not {init_fn!r}.")
            call.agree()
        self.wait()
        found = self._from_root(what, lambda: [e.path for e in list_folder(self._directory)])
        path = restore_newest(self._checkpoint, self._directory, found)
        if path is not None:
            self._retention.note_restored(path)
            return self._as_given(path)
        if init_fn is not None:
            init_fn()
        return None

    def wait(self) -> None:
        """Wait until the last `save` is on disk. **Collective** with ``asynchronous=True``.

        Without ``asynchronous=True``, `save` itself waits, and `wait` returns at once.

        Raises
        ------
        CheckpointError
            On every rank, if the last file could not be written. If the rank that wrote it is lost
            (``elastic=True``), a warning says so instead.
        """
        if self._saver is not None:
            self._end()

    @collective("CheckpointManager.wait", of=_ranks, sets_attributes=True)
    def _end(self) -> None:
        assert self._saver is not None
        # If the file could not be written, its plan is dropped, and the old files stay.
        planned, self._planned = self._planned, None
        if self._saver.end(_ranks(self)) and planned is not None:
            self._retention = planned

    def __repr__(self) -> str:
        paths = [entry.path for entry in self._retention.entries]
        newest = f", newest {os.path.basename(paths[-1])}" if paths else ""
        return f"<CheckpointManager {self._given!r}: {len(paths)} checkpoints{newest}>"

    def _repr_html_(self) -> str:
        rows = [
            (each.step, os.path.basename(each.path), time.ctime(each.created_s))
            for each in self._retention.entries
        ]
        return html_table(repr(self), rows, ("step", "file", "saved"))

    def _step(self, step: int | None) -> Any:
        """Return the step that was passed, counted or next. **Collective** if the counter is."""
        counter = self._step_counter
        given: Any = step
        if given is None and counter is not None:
            given = counter.numpy()[()] if isinstance(counter, Variable) else counter()
        if given is None:
            steps = [entry.step for entry in self._retention.entries]
            return max(steps, default=0) + 1
        return given

    def _as_given(self, path: str) -> str:
        """Return the `path` of a file, below the folder as the program passed it."""
        return os.path.join(self._given, os.path.basename(path))

    def _look_through(self) -> tuple[str, float, list[tuple[float, int, str]]]:
        """Return the folder, the time and the files, after removing the files of dead writers."""
        directory = os.path.abspath(self._directory)
        # Listed first, because the error names the folder if it may not be read.
        found, now_s = list_folder(directory), time.time()
        for path in remove_leftovers(directory, PREFIX):
            _logger.info("Removed %s, which a writer left behind when it died.", path)
        warn_of_future(found, now_s)
        return directory, now_s, [(each.created_s, each.step, each.path) for each in found]

    def _from_root(self, what: str, look: Callable[[], Any]) -> Any:
        """Return on every rank the value that `look` returns on rank 0. **Collective**."""
        return _ranks(self).on_root(look, what, self._directory)

    def _tree(self) -> Tree:
        return tree_of(self._checkpoint)


def knows_step(manager: CheckpointManager) -> bool:
    """Return whether `manager.save` finds the program's step without an argument."""
    return manager._step_counter is not None


def _checked_step(given: Any) -> int:
    step = as_integer("The step of a checkpoint", given)
    if step < 0:
        raise ValueError(f"The step of a checkpoint must not be negative, but it is {step}.")
    if step >= 2**63:
        raise ValueError(f"The step of a checkpoint must be below 2**63, but it is {step}.")
    return step


def _check_counter(counter: Any) -> None:
    if counter is not None and not callable(getattr(counter, "numpy", counter)):
        raise TypeError(f"step_counter must be a variable or a function, not {counter!r}.")


def _check_limit(name: str, value: Any, kind: type[Any]) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} must be a number or None, not {value!r}.")
    if not value > 0:
        raise ValueError(f"{name} must be positive or None, but it is {value!r}.")


def _remove_all(entries: Iterable[Entry]) -> None:
    for entry in entries:
        _remove(entry.path)


def _remove(path: str) -> None:
    try:
        remove_file(path)
    except FileNotFoundError:
        pass
    except OSError as reason:
        _logger.warning("The old checkpoint %s cannot be removed: %s.", path, reason.strerror)
