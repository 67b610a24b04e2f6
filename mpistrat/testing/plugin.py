"""Fixtures and hooks for pytest under mpiexec: ``pytest_plugins = ["mpistrat.testing.plugin"]``."""

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

from mpistrat.strategies import MPIStrategy
from mpistrat.testing.launch import rank_and_size

__all__ = ["DeadlockReporter", "shared_tmp_path", "strategy"]

_SIGNAL = signal.SIGRTMIN + 7
"""Asks a rank for its stacks. No MPI library and no launcher uses it."""
_PATIENCE_S = 1.0
"""How long the ranks have to write them. They need no lock and no interpreter for it."""


class DeadlockReporter:
    """Ends a test that runs too long, and says where each rank of this node is.

    The ranks of a node have one parent, and so find a folder in common. Each has a file there,
    which it fills when it is asked by a signal, also while it is blocked in MPI. The first rank
    whose limit is over asks all, prints the files in rank order and ends the job.

    Parameters
    ----------
    rank, size : int
        Of this process in the world that the launcher has started.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._size = size
        # Tests capture standard error: this is where it went before they began.
        self._error_output = os.dup(2)
        self._timer: threading.Timer | None = None
        self._folder = Path(tempfile.gettempdir()) / f"mpistrat-stacks-{_parent()}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._path = self._folder / f"{rank:09d} {os.getpid()}"
        self._stacks = self._path.open("w")
        faulthandler.register(_SIGNAL, self._stacks)

    def start(self, test: str, limit_s: float) -> None:
        """Give `test` so much time from now. Local."""
        self.cancel()
        self._timer = threading.Timer(limit_s, self._end, (test, limit_s))
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Forget the limit: the test is over. Local."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Leave: nobody asks this rank any more. Local."""
        self.cancel()
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are still there
            self._folder.rmdir()
        faulthandler.unregister(_SIGNAL)
        self._stacks.close()
        os.close(self._error_output)

    def _end(self, test: str, limit_s: float) -> None:
        try:
            (self._folder / "asked").touch(exist_ok=False)
        except OSError:  # another rank asks, and needs time to print
            time.sleep(3 * _PATIENCE_S)
            os._exit(1)
        title = f"{test} ran over {limit_s:g} s. The stacks of the ranks on this node:\n"
        text = "\n".join([f"\nmpistrat: {title}", *self._collect()])
        with os.fdopen(self._error_output, "w") as output:
            output.write(text)
        sys.stdout.flush()
        shutil.rmtree(self._folder, ignore_errors=True)
        time.sleep(_PATIENCE_S)  # the launcher passes on what it has read, and then ends
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
    """Return a name for the parent that no process before or after it has."""
    pid = os.getppid()
    start_time = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{pid}-{start_time}"


_REPORTER = pytest.StashKey[DeadlockReporter]()


@pytest.fixture
def strategy() -> MPIStrategy:
    """A strategy over all ranks. **Collective**.

    It is usable again where the test before has ended in an `EpochError` on all ranks.
    """
    return MPIStrategy()


@pytest.fixture
def shared_tmp_path(strategy: MPIStrategy, tmp_path: Path) -> Path:
    """A new folder, the same one on every rank. **Collective**."""
    return Path(strategy.extended._collectives.broadcast_json(str(tmp_path), kind="tmp_path"))


def pytest_configure(config: pytest.Config) -> None:
    """Get ready to say where the ranks are, where there are several. Local."""
    world = rank_and_size()
    if world is not None:
        config.stash[_REPORTER] = DeadlockReporter(*world)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave. Local."""
    if _REPORTER in config.stash:
        config.stash[_REPORTER].close()
        del config.stash[_REPORTER]


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Take the limit of pytest-timeout over, where there are several ranks. Local."""
    reporter = item.config.stash.get(_REPORTER, None)
    if reporter is None:
        return None
    reporter.start(item.nodeid, settings.timeout)
    return True


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool | None:
    """Forget the limit. Local."""
    reporter = item.config.stash.get(_REPORTER, None)
    if reporter is None:
        return None
    reporter.cancel()
    return True
