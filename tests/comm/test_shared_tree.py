"""The order of operands in shared memory is the tree of deterministic reductions."""

import threading

import numpy as np
import pytest

from mpistrat.comm import shared_memory
from mpistrat.comm.packing import Message
from mpistrat.comm.pool import Pool
from mpistrat.comm.shared_memory import NodeMemory
from mpistrat.comm.shared_reducer import SharedMemoryReducer
from mpistrat.comm.transport import Occupancy
from mpistrat.native import native_library
from mpistrat.options import ReduceOp
from tests.helpers import as_bytes
from tests.tree_reduction import expected_reduction, values_of

pytestmark = pytest.mark.skipif(native_library() is None, reason="nothing is compiled")

SIZES = [2, 3, 4, 5, 7, 8, 13]
LENGTHS = [1, 2_047, 2_049, 30_001, 140_003]
"""Around a chunk of 8 KiB of float32, reduced by all ranks or slice by slice, and two blocks."""


@pytest.fixture(scope="module")
def all_reduce():
    """Return a reduction of rows by as many ranks, which are threads here, in one memory."""

    def all_reduce(op, rows):
        size = len(rows)
        memory = np.zeros(size * shared_memory._BYTES_PER_RANK, np.uint8)
        reducers = [
            SharedMemoryReducer(
                NodeMemory(memory, rank, size, native_library(), shares_cores=True), Occupancy()
            )
            for rank in range(size)
        ]
        results = [np.empty_like(row) for row in rows]

        def work(rank):
            message = Message([rows[rank]], [results[rank]], Pool())
            reducers[rank].all_reduce(ReduceOp.parse(op), message)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {as_bytes(result) for result in results} == {as_bytes(results[0])}
        return results[0]

    return all_reduce


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("op", "dtype"), [("sum", "f4"), ("mean", "f8"), ("prod", "f4"), ("sum", "c8"), ("sum", "u2")]
)
def test_every_number_of_ranks_follows_the_tree(all_reduce, size, op, dtype):
    for length in LENGTHS:
        rows = [values_of(rank, length, dtype) for rank in range(size)]
        with np.errstate(all="ignore"):
            expected = expected_reduction(op, rows)
        assert as_bytes(all_reduce(op, rows)) == as_bytes(expected), length


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8"])
def test_every_nan_is_that_of_numpy(all_reduce, size, dtype):
    rows = [values_of(rank, 5_000, dtype) for rank in range(size)]
    odd = np.array([np.nan, -np.nan, np.inf, -np.inf], rows[0].real.dtype)
    for rank, row in enumerate(rows):
        row.real[rank : 4_000 : 3 + rank] = odd[rank % 4]
    with np.errstate(all="ignore"):
        expected = expected_reduction("sum", rows)
    for part in (expected.real, expected.imag):
        if part.flags.writeable:
            part[np.isnan(part)] = np.nan
    assert np.isnan(expected).any()
    assert as_bytes(all_reduce("sum", rows)) == as_bytes(expected)
