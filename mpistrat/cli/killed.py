"""Explanation of a job that a signal has ended, for the last line of ``mpistrat run``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

_PATTERN = "checkpoint-*.h5"
_MAX_FOLDERS = 2000
_MAX_DEPTH = 3

_OF_CRASHES = (
    *(signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE),
    *(signal.SIGILL, signal.SIGTERM),
)
_CAUSES = {
    signal.SIGKILL: "the node ran out of memory",
    signal.SIGBUS: "/dev/shm is full, or the disk of a file that is mapped",
}


def killing_signal(code: int, family: str) -> signal.Signals | None:
    """Return the signal that ended a rank, by the exit code of a launcher of an MPI `family`."""
    # MPICH's mpiexec returns the number of the signal, the others and shells add 128.
    number = code - 128 if code > 128 else code if family == "MPICH" else 0
    try:
        found = signal.Signals(number)
    except ValueError:
        return None
    return found if code > 128 or found in _OF_CRASHES else None


def explain_killed(
    code: int, sign: signal.Signals, folders: Iterable[str], began_s: float, can_restart: bool
) -> str:
    """Return one line: the signal, its probable cause, the newest checkpoint, and the remedy."""
    own = "" if code > 128 else f", unless exit code {code} is the program's own"
    cause = f", probably because {_CAUSES[sign]}" if sign in _CAUSES else ""
    newest = _newest_checkpoint(folders, began_s)
    resumes = f"The newest checkpoint is {newest}." if newest else "No new checkpoint was found."
    remedy = (
        " With --restarts K it is started again, up to K times, and resumes if the program calls "
        "CheckpointManager.restore_or_initialize()."
    )
    return f"a rank was killed by {sign.name}{cause}{own}. {resumes}{remedy if can_restart else ''}"


def _newest_checkpoint(folders: Iterable[str], began_s: float) -> Path | None:
    """Return the newest file of a `CheckpointManager` below `folders` written since `began_s`."""
    found: list[tuple[float, Path]] = []
    for folder in _folders_below(folders):
        for path in folder.glob(_PATTERN):
            try:
                changed_s = path.stat().st_mtime
            except OSError:
                continue
            if changed_s >= began_s:
                found.append((changed_s, path))
    return max(found)[1] if found else None


def _folders_below(folders: Iterable[str]) -> Iterator[Path]:
    """Yield the folders, and those within them, as far as a quick look gets."""
    waiting = [(Path(each), 0) for each in dict.fromkeys(folders) if os.path.isdir(each)]
    for _ in range(_MAX_FOLDERS):
        if not waiting:
            return
        folder, depth = waiting.pop(0)
        yield folder
        if depth < _MAX_DEPTH:
            try:
                inner = [e for e in os.scandir(folder) if e.is_dir(follow_symlinks=False)]
            except OSError:
                continue
            waiting += [(Path(e.path), depth + 1) for e in inner if not e.name.startswith(".")]
