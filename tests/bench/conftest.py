"""Tests of pure code, which run once, outside of mpiexec."""

from tests.helpers import outside_mpiexec

collect_ignore = outside_mpiexec(
    *("test_benchmark.py", "test_data_files.py", "test_machine.py", "test_measure.py"),
    "test_two_nodes.py",
)
