"""Tests of pure code, which run once, outside of mpiexec."""

from tests.helpers import outside_mpiexec

collect_ignore = outside_mpiexec(
    "test_casts.py",
    "test_message_parts.py",
    "test_ordered_keys.py",
    "test_pack_plan.py",
    "test_packing.py",
    "test_pool.py",
    "test_ops.py",
    "test_shared_memory.py",
    "test_shared_tree.py",
    "test_slices.py",
    "test_waiting.py",
    "test_wire.py",
)
