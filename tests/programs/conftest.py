"""Whole programs, which start their ranks themselves."""

from tests.helpers import outside_mpiexec

collect_ignore_glob = outside_mpiexec("test_*.py")
