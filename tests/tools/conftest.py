"""Tests of pure code, which run once, outside of mpiexec."""

from tests.helpers import outside_mpiexec

collect_ignore = outside_mpiexec(
    "test_cost_model.py",
    "test_gpu_report.py",
    "test_pictures.py",
    "test_same_claims.py",
    "test_sentences.py",
    "test_site_check.py",
)
