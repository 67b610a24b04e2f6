"""The order of operands in shared memory is the tree of deterministic reductions."""

import threading

import numpy as np
import pytest

from mpistrat.comm import shared_memory
from mpistrat.comm.packing import Message
from mpistrat.comm.pool import Pool
from mpistrat.comm.shared_memory import NodeMemory
from mpistrat.comm.shared_reducer import LocalRows, RowOrder, SharedMemoryReducer
from mpistrat.comm.transport import Occupancy
from mpistrat.native import native_library
from mpistrat.options import ReduceOp
from mpistrat.sharding import Fold, replicas_of_ranks
from tests.helpers import as_bytes
from tests.tree_reduction import expected_reduction, values_of

pytestmark = pytest.mark.skipif(native_library() is None, reason="nothing is compiled")

SIZES = [2, 3, 4, 5, 7, 8, 13]
LENGTHS = [1, 2_047, 2_049, 30_001, 140_003]
"""Around a chunk of 8 KiB of float32, reduced by all ranks or slice by slice, and two blocks."""


def on_ranks(size, work):
    """Call ``work(rank, reducer)`` for each rank, which are threads here, in one memory."""
    memory = np.zeros(size * shared_memory._BYTES_PER_RANK, np.uint8)
    reducers = [
        SharedMemoryReducer(
            NodeMemory(memory, rank, size, native_library(), shares_cores=True), Occupancy()
        )
        for rank in range(size)
    ]
    threads = [threading.Thread(target=work, args=each) for each in enumerate(reducers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture(scope="module")
def all_reduce():
    """Return a reduction of rows by as many ranks."""

    def all_reduce(op, rows):
        results = [np.empty_like(row) for row in rows]

        def work(rank, reducer):
            message = Message([rows[rank]], [results[rank]], Pool())
            reducer.all_reduce(ReduceOp.parse(op), message)

        on_ranks(len(rows), work)
        assert {as_bytes(result) for result in results} == {as_bytes(results[0])}
        return results[0]

    return all_reduce


def nodes_in(share, num_rows):
    """Return first row and width of the sums that a rank can compute of its share of the rows."""
    fold = Fold(num_rows, lambda left, right: None)
    for row in share:
        fold.add(row, None)
    return [(begin, width) for begin, width, _ in fold.nodes]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("num_rows", [4, 5, 7, 12, 29])
@pytest.mark.parametrize(("op", "dtype"), [("sum", "f4"), ("mean", "c16"), ("max", "i2")])
def test_ranks_bring_several_rows(size, num_rows, op, dtype):
    op = ReduceOp.parse(op)
    nodes = [nodes_in(share, num_rows) for share in replicas_of_ranks(num_rows, size)]
    order, local = RowOrder(num_rows, nodes), LocalRows(native_library())
    for length in (3, 2_049, 30_001):
        rows = [values_of(each, length, dtype) for each in range(num_rows)]
        parts = [np.split(row, [2, 1_000]) for row in rows]
        brought = []
        for of_rank in nodes:
            brought.append([])
            for begin, width in of_rank:
                own = range(begin, min(begin + width, num_rows))
                sums = [np.empty_like(part) for part in parts[begin]]
                given = [part for each in own for part in parts[each]]
                if len(own) == 1:
                    sums = given
                else:
                    local.combine(op, RowOrder(num_rows, [[(i, 1) for i in own]]), given, sums)
                brought[-1] += sums
        targets = [[np.empty_like(part) for part in parts[0]] for _ in nodes]
        divisor = num_rows if op is ReduceOp.MEAN else 1
        on_ranks(
            size,
            lambda rank, reducer, brought=brought, targets=targets, by=divisor: reducer.reduce_rows(
                op, order, brought[rank], targets[rank], by
            ),
        )
        expected = as_bytes(expected_reduction(op.name.lower(), rows))
        for of_rank in targets:
            assert as_bytes(np.concatenate(of_rank)) == expected, length


def test_the_rows_of_one_rank_may_lie_where_their_sum_goes():
    rows = [values_of(each, 5_000, "f4") for each in range(7)]
    expected = as_bytes(expected_reduction("sum", rows))
    order = RowOrder(7, [[(each, 1) for each in range(7)]])
    LocalRows(native_library()).combine(ReduceOp.SUM, order, rows, [rows[0]])
    assert as_bytes(rows[0]) == expected


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
