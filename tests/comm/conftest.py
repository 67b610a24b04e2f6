"""Which of these tests one rank runs for all."""

from tests.helpers import serial

collect_ignore = serial(
    "test_casts.py",
    "test_mpi_buffers.py",
    "test_ordered_keys.py",
    "test_pack_plan.py",
    "test_packing.py",
    "test_pool.py",
    "test_reducers.py",
    "test_shared_memory.py",
    "test_slices.py",
    "test_wire.py",
)
