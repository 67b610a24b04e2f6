"""Pytest plugin for tests under mpiexec: ``pytest_plugins = ["mpistrat.testing.plugin"]``."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mpistrat import context
from mpistrat.strategies import MPIStrategy
from mpistrat.testing.launch import rank_and_size

_SIGNAL = signal.SIGRTMIN + 7
"""Signal that asks a rank for its stacks; no MPI library or launcher uses it."""
_PATIENCE_S = 1.0
"""Time for the ranks to write their stacks, which needs neither lock nor interpreter."""


class _DeadlockReporter:
    """Ends a test that runs too long, and prints the stacks of all ranks of this node."""

    # The ranks of a node have the same parent process, whose id names their common folder. Each
    # rank has a file there, and writes its stacks to it on a signal, even while it is blocked in
    # MPI. The first rank over its limit signals all, prints the files in rank order and ends the
    # job.

    def __init__(self, rank: int, size: int) -> None:
        self._size = size
        # Tests capture standard error, so duplicate it before they begin.
        self._error_output = os.dup(2)
        self._timer: threading.Timer | None = None
        self._folder = Path(tempfile.gettempdir()) / f"mpistrat-stacks-{_parent()}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._path = self._folder / f"{rank:09d} {os.getpid()}"
        self._stacks = self._path.open("w")
        faulthandler.register(_SIGNAL, self._stacks)

    def start(self, test: str, limit_s: float) -> None:
        """Start the time limit of `test`."""
        self.cancel()
        self._timer = threading.Timer(limit_s, self._end, (test, limit_s))
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Cancel the time limit at the end of the test."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Remove the file and the signal handler of this rank."""
        self.cancel()
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other ranks still have files there
            self._folder.rmdir()
        faulthandler.unregister(_SIGNAL)
        self._stacks.close()
        os.close(self._error_output)

    def _end(self, test: str, limit_s: float) -> None:
        try:
            (self._folder / "asked").touch(exist_ok=False)
        except OSError:  # another rank reports the hang, and needs time to print
            time.sleep(3 * _PATIENCE_S)
            os._exit(1)
        title = f"{test} ran over {limit_s:g} s. The stacks of the ranks on this node:\n"
        text = "\n".join([f"\nmpistrat: {title}", *self._collect()])
        with os.fdopen(self._error_output, "w") as output:
            output.write(text)
        sys.stdout.flush()
        shutil.rmtree(self._folder, ignore_errors=True)
        time.sleep(_PATIENCE_S)  # for the launcher to forward the output
        os._exit(1)

    def _collect(self) -> list[str]:
        files = sorted(self._folder.glob("* *"))
        for file in files:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.name.split()[1]), _SIGNAL)
        time.sleep(_PATIENCE_S)
        ranks = [int(file.name.split()[0]) for file in files]
        return [
            f"--- rank {rank} of {self._size}\n{file.read_text()}"
            for rank, file in zip(ranks, files, strict=True)
        ]


def _parent() -> str:
    """Return a name of the parent process that stays unique when its pid is reused."""
    pid = os.getppid()
    # Field 22 is the start time of the process (proc(5)). The last ")" ends field 2.
    start_time = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{pid}-{start_time}"


_REPORTER = pytest.StashKey[_DeadlockReporter]()


@pytest.fixture
def strategy() -> MPIStrategy:
    """A strategy over all ranks. **Collective**.

    It works even if the test before has ended with a `CollectiveError` on all ranks.
    """
    return MPIStrategy()


@pytest.fixture
def shared_tmp_path(strategy: MPIStrategy, tmp_path: Path) -> Path:
    """A new folder, the same one on every rank. **Collective**."""
    return Path(context.collectives_of(strategy).broadcast_json(str(tmp_path), kind="tmp_path"))


def pytest_configure(config: pytest.Config) -> None:
    """Create the reporter if mpiexec has started this process."""
    world = rank_and_size()
    if world is not None:
        config.stash[_REPORTER] = _DeadlockReporter(*world)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the reporter."""
    if _REPORTER in config.stash:
        config.stash[_REPORTER].close()
        del config.stash[_REPORTER]


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Replace the timer of pytest-timeout if mpiexec has started this process."""
    reporter = item.config.stash.get(_REPORTER, None)
    if reporter is None:
        return None
    reporter.start(item.nodeid, settings.timeout)
    return True


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool | None:
    """Cancel the timer."""
    reporter = item.config.stash.get(_REPORTER, None)
    if reporter is None:
        return None
    reporter.cancel()
    return True
