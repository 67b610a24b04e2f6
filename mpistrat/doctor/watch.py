"""What is said where MPI ends a task of a launcher while it starts, or never returns."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator

from mpistrat.doctor import guard
from mpistrat.launcher import Launcher

__all__ = ["guarded", "look_at_shared_memory"]

_ROOM = 64 * 2**20
"""Bytes of shared memory that a few ranks need; Open MPI asks for 16 MiB for each."""


@contextlib.contextmanager
def guarded(launcher: Launcher, limit_s: float) -> Iterator[None]:
    """Say what has happened if this process does not come to the end of the block. Local.

    The first task of each node says so. It is killed where the block takes too long: in there no
    thread of Python runs, and no signal is seen.

    Parameters
    ----------
    launcher : Launcher
    limit_s : float
        How long the block may take, in seconds.
    """
    if launcher.name == "none" or launcher.local_task:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-S", guard.__file__],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a launcher ends the task's
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(_orders(launcher, limit_s)) + "\n")
    process.stdin.flush()
    try:
        yield
    finally:
        process.communicate("started\n")


def _orders(launcher: Launcher, limit_s: float) -> dict[str, object]:
    task = f"task {launcher.task} of {launcher.num_tasks} on {platform.node()}"
    shared = " ".join(look_at_shared_memory())
    hint = f"\n  {shared}" if shared else ""
    return {
        "pid": os.getpid(),
        "limit_s": limit_s,
        "ended": f"mpistrat doctor: MPI has ended {task} while it started.{hint}",
        "late": f"mpistrat doctor: MPI has not started {task} within {limit_s:.0f} s. Either "
        "another task does not come, or this process is no task, but was started by one and has "
        f"inherited its variables.{hint}",
    }


def look_at_shared_memory(folder: str = "/dev/shm") -> tuple[str, ...]:
    """Return what keeps MPI from its shared memory and what to type, or nothing. Local."""
    try:
        state = os.statvfs(folder)
    except OSError as error:
        return (f"There is no {folder}: {error.strerror}.", "MPI libraries need it on each node.")
    free = state.f_bavail * state.f_frsize
    if state.f_flag & os.ST_RDONLY:
        return (f"{folder} is read-only.", f"mount -o remount,rw {folder}, or ask who may.")
    if free < _ROOM:
        return (
            f"{folder} has {free / 2**20:.1f} MiB left, and MPI puts its shared memory there.",
            f"ls -l {folder} shows who has filled it; a container gets more by --shm-size=1g.",
        )
    return ()
