"""Test helpers for MPI programs: a launcher, fault injection and a conformance suite.

`mpistrat.testing.plugin` has fixtures for pytest. The rest of this package does not need pytest.
"""

from mpistrat.faults import Injection
from mpistrat.testing.conformance import StrategyTests, assert_all_ranks, reduction_tree
from mpistrat.testing.faults import inject
from mpistrat.testing.launch import run as run_on_ranks

__all__ = [
    "Injection",
    "StrategyTests",
    "assert_all_ranks",
    "inject",
    "reduction_tree",
    "run_on_ranks",
]
