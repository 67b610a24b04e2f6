"""Tests that start launchers, or are of pure code: they run once, outside of mpiexec."""

from tests.helpers import outside_mpiexec

collect_ignore_glob = outside_mpiexec("test_*.py")
