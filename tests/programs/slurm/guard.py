"""The end of a cluster, also where the tests are killed.

``python guard.py FOLDER`` waits until its standard input is closed, ends every process of the
cluster in that folder, and removes the folder.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

__all__ = ["configuration_of", "processes_of"]

LIMIT_S = 10


def configuration_of(folder):
    """Return where the cluster in `folder` has its configuration."""
    return Path(folder) / "slurm.conf"


def processes_of(folder):
    """Return the ids of the daemons in `folder`, and of the steps and tasks of their jobs.

    All of them know the configuration by a variable, and no other process has.
    """
    mark = f"SLURM_CONF={configuration_of(folder)}\0".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def main(folder):
    """Wait for the end of the tests, and clean up."""
    sys.stdin.read()
    end = time.monotonic() + LIMIT_S
    while (pids := processes_of(folder)) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
