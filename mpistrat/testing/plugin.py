"""Fixtures and hooks for pytest under mpiexec: ``pytest_plugins = ["mpistrat.testing.plugin"]``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpistrat.strategies import MPIStrategy
from mpistrat.testing.deadlocks import DeadlockReporter
from mpistrat.testing.launch import rank_and_size

__all__ = ["shared_tmp_path", "strategy"]

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
    return Path(strategy.extended.collectives.broadcast_json(str(tmp_path), kind="tmp_path"))


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
