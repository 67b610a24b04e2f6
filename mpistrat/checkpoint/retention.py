"""Retention of checkpoints in a directory: which files are there, and which of them to keep."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpistrat.checkpoint.format import checked_path
from mpistrat.checkpoint.object_graph import Tree, collectives_for
from mpistrat.checkpoint.reader import open_checkpoint
from mpistrat.errors import CheckpointCorruptError, CheckpointError

PREFIX = "checkpoint-"
_SKEW_S = 1.0
"""Seconds by which the clocks of nodes may differ without a warning."""
_NUM_LOOKS = 20
_NAME = re.compile(rf"{PREFIX}(\d+)\.h5")
_WHAT = "latest_checkpoint"
_logger = logging.getLogger("mpistrat")


@dataclass(frozen=True, order=True)
class Entry:
    """One checkpoint of a folder. Sorts from the oldest to the newest."""

    created_s: float
    """When it was written, in seconds since 1970."""
    step: int
    path: str


def file_name(step: int) -> str:
    """Return the name of the checkpoint of `step`."""
    return f"{PREFIX}{step}.h5"


def list_folder(directory: str | os.PathLike[str], num_looks: int = _NUM_LOOKS) -> list[Entry]:
    """Return the checkpoints in `directory`, which may be missing, oldest first."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as reason:
        raise CheckpointError(
            f"The folder {os.fspath(directory)} cannot be read: {reason.strerror}."
        ) from None
    steps = {
        os.path.join(directory, name): int(match[1])
        for name in names
        if (match := _NAME.fullmatch(name))
    }
    try:
        found = sorted(_entries(steps))
    except OSError as reason:
        raise CheckpointError(
            f"The files of the folder {os.fspath(directory)} cannot be looked at: "
            f"{reason.strerror}. Check its permissions: entering a folder needs x."
        ) from None
    if steps and not any(map(os.path.lexists, steps)):  # another process has newer ones
        return list_folder(directory, _looks_left(directory, num_looks))
    return found


def _looks_left(directory: str | os.PathLike[str], num_looks: int) -> int:
    """Wait before another look at a folder that changes, or raise if none is left."""
    if num_looks == 1:
        raise CheckpointError(
            f"The folder {os.fspath(directory)} lists checkpoints that are not there, "
            f"{_NUM_LOOKS} times in a row: other processes replace them, or its file system shows "
            "an old list. Try again later."
        )
    time.sleep(0.05)
    return num_looks - 1


def _entries(steps: dict[str, int]) -> Iterator[Entry]:
    for path, step in steps.items():
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            yield Entry(_created_s(path), step, path)


def _created_s(path: str) -> float:
    """Return when the file says it was written, or its modification time if it does not say."""
    try:
        with open_checkpoint(path) as reader:
            return reader.header.created_s
    except CheckpointError:
        return os.stat(path).st_mtime


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest checkpoint in `directory` that verifies, else ``None``.

    Damaged files are skipped with a warning. **Collective** in a strategy's scope, and outside of
    one if torch.distributed has a process group: rank 0 looks and all ranks get its answer.
    Otherwise **Local**, without MPI.

    Parameters
    ----------
    directory : path
        Folder of checkpoints; it may be missing. The same on all ranks.

    Returns
    -------
    str or None
        The path of the file, ``None`` if the folder has no checkpoints or only damaged ones.
        `Checkpoint.restore` does not take ``None``.

    Raises
    ------
    CheckpointError
        If the folder cannot be read or lists files that are gone, or if no file is intact and some
        cannot be read or have another format version: the program may continue from those.
    NotImplementedError
        In the scope of a strategy with ``elastic=True``. Use `CheckpointManager` there.
    TypeError, ValueError
        If `directory` is not a path.

    Examples
    --------
    >>> ms.latest_checkpoint("no/such/folder") is None
    True
    """
    collectives = collectives_for(Tree(), _WHAT)
    with collectives.call(_WHAT) as call:
        folder = checked_path(_WHAT, directory)
        call.agree(folder)
    answer: str | None = collectives.on_root(lambda: _find_sound(folder), _WHAT, folder)
    return answer


def _find_sound(directory: str, num_looks: int = _NUM_LOOKS) -> str | None:
    """Return the newest checkpoint that verifies."""
    found = list_folder(directory)
    warn_of_future(found, time.time())
    unreadable: CheckpointError | None = None
    has_lost = False
    for entry in reversed(found):
        try:
            with open_checkpoint(entry.path) as reader:
                reader.verify()
        except (CheckpointError, FileNotFoundError) as error:
            if not os.path.lexists(entry.path):  # another process keeps a newer one in its place
                has_lost = True
                continue
            if isinstance(error, FileNotFoundError):
                raise
            warn_of_damage(error)
            is_forbidden = isinstance(error.__cause__, PermissionError)
            if is_forbidden or not isinstance(error, CheckpointCorruptError):
                unreadable = unreadable or error
        else:
            return entry.path
    if has_lost:
        return _find_sound(directory, _looks_left(directory, num_looks))
    if unreadable is not None:  # it may be intact: None would silently restart training
        raise unreadable
    return None


def warn_of_damage(error: CheckpointError) -> None:
    """Log that a checkpoint is skipped because of `error`."""
    _logger.warning("Skipping a checkpoint that is not intact. %s", error)


def warn_of_future(entries: Sequence[Entry], now_s: float) -> None:
    """Log the files that were written by a clock that was ahead of this one."""
    names = [os.path.basename(each.path) for each in entries if each.created_s > now_s + _SKEW_S]
    if names:
        _logger.warning(
            "By the clock of this node, checkpoints in %s are from the future: %s. A clock was "
            "wrong when they were written, or is wrong now. They count as older than the next "
            "checkpoints, and as newer than the other files.",
            os.path.dirname(entries[0].path),
            ", ".join(names),
        )


class Retention:
    """Decides which files in a directory stay: the newest `max_to_keep`, and some older ones.

    Of the older files, one stays whenever `keep_every_s` seconds are between it and the last file
    that stayed for this reason; in an empty directory the seconds count from `now_s`.
    """

    def __init__(
        self,
        max_to_keep: int | None,
        keep_every_s: float | None,
        found: Sequence[Entry],
        now_s: float,
    ) -> None:
        self._max_to_keep = max_to_keep
        self._keep_every_s = keep_every_s
        self._count_from_s = float("-inf")
        # In the order in which they may be removed. Files beyond `max_to_keep` are there because
        # they were kept before.
        self._recent = list(found)
        self._kept: list[Entry] = []
        self._keep_some_of(self._older())
        if not self._kept:
            self._count_from_s = found[0].created_s if found else now_s

    def __copy__(self) -> Retention:
        twin = object.__new__(Retention)
        vars(twin).update(vars(self))
        twin._recent, twin._kept = list(self._recent), list(self._kept)
        return twin

    @property
    def entries(self) -> list[Entry]:
        """All files, oldest first."""
        return sorted(self._kept + self._recent)

    def add(self, entry: Entry) -> list[Entry]:
        """Add a new file, and return the files to remove."""
        self._kept = [each for each in self._kept if each.path != entry.path]
        self._recent = [each for each in self._recent if each.path != entry.path]
        self._recent.append(entry)
        surplus = self._keep_some_of(self._older())
        self._recent = [each for each in self._recent if each not in surplus]
        return surplus

    def time_after_all(self, now_s: float) -> float:
        """Return `now_s`, or a later time if a file seems newer: a new file is the newest."""
        # The header stores microseconds.
        return max([now_s, *(each.created_s + 1e-6 for each in self.entries)])

    def note_restored(self, path: str) -> None:
        """Keep the file `path` longer than newer files, which were damaged."""
        restored = [each for each in self._recent if each.path == path]
        self._recent = [each for each in self._recent if each.path != path] + restored

    def _older(self) -> list[Entry]:
        if self._max_to_keep is None:
            return []
        return self._recent[: max(len(self._recent) - self._max_to_keep, 0)]

    def _keep_some_of(self, older: Sequence[Entry]) -> list[Entry]:
        """Keep the files that stay for good, and return the rest."""
        surplus = []
        for entry in older:
            if self._keep_every_s is None or (
                entry.created_s - self._count_from_s < self._keep_every_s
            ):
                surplus.append(entry)
            else:
                self._count_from_s = entry.created_s
                self._kept.append(entry)
                self._recent.remove(entry)
        return surplus
