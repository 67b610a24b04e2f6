"""Tests of pure code, which run once, outside of mpiexec."""

from tests.helpers import outside_mpiexec

collect_ignore = outside_mpiexec("test_threads.py")
