"""Tests of pure code, which run once, outside of mpiexec."""

from tests.helpers import outside_mpiexec

collect_ignore = outside_mpiexec(
    "test_checkpoint.py",
    "test_retention.py",
    "test_generators.py",
    "test_json_text.py",
    "test_manager.py",
    "test_object_graph.py",
    "test_page_runs.py",
    "test_restore.py",
    "test_security.py",
    "test_share_out.py",
    "test_state_json.py",
    "test_validation.py",
    "test_writer.py",
)
