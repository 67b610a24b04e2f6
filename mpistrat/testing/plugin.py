"""Fixtures for pytest under mpiexec: ``pytest_plugins = ["mpistrat.testing.plugin"]``."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpistrat.strategies import MPIStrategy

__all__ = ["shared_tmp_path", "strategy"]


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
