"""Writes of `IndexedSlices`: rounds, shapes, dtypes, refusals and batches.

The matrix of kinds, modes and contexts is in test_writes.py.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.variables.slice_writes import split_into_rounds
from tests.devices import assert_allclose, assert_array_equal
from tests.helpers import triangle

Aggregation = ms.VariableAggregation
METHODS = {
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_div": np.true_divide,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
    "scatter_update": lambda old, new: new,
}


def make(strategy, value, aggregation=Aggregation.SUM, **options):
    with strategy.scope():
        return ms.Variable(value, name="w", aggregation=aggregation, **options)


def one_by_one(method, dense, values, indices):
    """What the slices do to `dense`, in the order in which they stand."""
    dense = np.array(dense)
    for value, index in zip(values, indices, strict=True):
        dense[index] = METHODS[method](dense[index], value)
    return dense


@given(st.lists(st.integers(-3, 3)))
def test_rounds_hold_each_row_once_and_keep_its_order(rows):
    order, ends = split_into_rounds(np.array(rows, np.int64))
    assert sorted(order) == list(range(len(rows)))
    assert ([0, *ends])[-1] == len(rows)
    for start, end in zip([0, *ends], ends, strict=False):
        assert len({rows[i] for i in order[start:end]}) == end - start > 0
    for row in set(rows):
        of_row = [i for i in order if rows[i] == row]
        assert of_row == sorted(of_row)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("trailing", [(), (2,), (2, 3)])
def test_slices_are_applied_in_order(method, trailing):
    generator = np.random.default_rng(len(trailing))
    dense = generator.uniform(1, 2, (5, *trailing)).astype(np.float32)
    for indices in ([], [4], [1, 3, 1, 1, 0, 3]):
        values = generator.uniform(1, 2, (len(indices), *trailing)).astype(np.float32)
        variable = ms.Variable(dense)
        address = variable.value().__array_interface__["data"]
        result = getattr(variable, method)(ms.IndexedSlices(values, indices))
        expected = one_by_one(method, dense, values, indices)
        assert_array_equal(result, expected)
        assert_array_equal(variable.numpy(), expected)
        assert variable.value().__array_interface__["data"] == address


def test_ranks_bring_different_numbers_of_slices(strategy, rank, size):
    variable = make(strategy, np.zeros((size + 1, 2)))

    def fn(scale):
        rows = ms.IndexedSlices(np.full((rank, 2), scale), np.arange(rank))
        return variable.scatter_add(rows)

    # Row r is named by the ranks above r; rank 0 and the last row take no part.
    counts = [max(size - 1 - row, 0) for row in range(size + 1)]
    (result,) = strategy.experimental_local_results(strategy.run(fn, (3.0,)))
    assert result[:, 0].tolist() == [3.0 * count for count in counts]
    strategy.run(fn, (0.5,))
    assert variable.numpy()[:, 1].tolist() == [3.5 * count for count in counts]


def test_no_slice_on_any_rank_changes_nothing(strategy):
    variable = make(strategy, np.ones((2, 3), np.float32))
    strategy.run(lambda: variable.scatter_add(ms.IndexedSlices([], [])))
    assert variable.numpy().tolist() == [[1] * 3] * 2


def test_replicas_come_in_rank_order(strategy, rank, size):
    # Multiplication and subtraction of one row by all ranks, in float16 where order shows.
    variable = make(strategy, np.full(1, 7, np.float16))
    strategy.run(lambda: variable.scatter_mul(ms.IndexedSlices([1 + rank / 3], [0])))
    expected = one_by_one(
        "scatter_mul",
        np.full(1, 7, np.float16),
        np.array([1 + r / 3 for r in range(size)], np.float16),
        [0] * size,
    )
    assert variable.numpy() == expected


def test_mean_divides_the_values_first(strategy, rank, size):
    variable = make(strategy, np.ones(2), Aggregation.MEAN)
    strategy.run(lambda: variable.scatter_add(ms.IndexedSlices([float(rank)], [1])))
    assert_allclose(variable.numpy(), [1, 1 + triangle(size) / size])


@pytest.mark.parametrize("indices", [[0, 3], [-1], [2**40], np.array([2**64 - 1], np.uint64)])
@pytest.mark.parametrize("method", [*METHODS, "batch_scatter_update"])
def test_an_index_out_of_range_changes_nothing(strategy, size, method, indices):
    variable = make(strategy, np.ones((3, 2)), Aggregation.ONLY_FIRST_REPLICA)
    slices = ms.IndexedSlices(np.full((len(indices), 2), 5.0), indices)

    def fn(*_):
        with pytest.raises(IndexError, match=r"'w'.*3 rows"):
            getattr(variable, method)(slices)

    fn()
    strategy.run(fn)
    strategy.extended.update(variable, fn)
    assert (variable.numpy() == 1).all()
    assert strategy.reduce("sum", 1) == size


def test_an_index_out_of_range_on_one_rank_is_an_error_on_all(strategy, others):
    variable = make(strategy, np.ones(3))
    slices = ms.IndexedSlices([1.0], [0 if others else 3])
    error = ms.errors.CollectiveMismatchError if others else IndexError
    with pytest.raises(error, match="scatter_add"):
        strategy.run(lambda: variable.scatter_add(slices))
    assert variable.values[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (np.ones(2), TypeError, "takes IndexedSlices"),
        (ms.IndexedSlices([1.0], [0]), ValueError, "do not fit"),
        (ms.IndexedSlices(np.ones((1, 3)), [0]), ValueError, r"values of the shape \(1, 2\) do"),
        (ms.IndexedSlices(np.ones((1, 2)), [0], (4, 2)), ValueError, "dense_shape"),
        (ms.IndexedSlices(np.ones((1, 1, 2)), [[0]]), ValueError, "batch_scatter_update"),
        (ms.IndexedSlices(np.ones((1, 2), complex), [0]), TypeError, "Cast it first"),
    ],
)
def test_bad_slices_are_refused_in_every_context(strategy, size, value, error, text):
    variable = make(strategy, np.zeros((3, 2)))

    def fn(*_):
        with pytest.raises(error, match=f"scatter_add of variable 'w'.*{text}"):
            variable.scatter_add(value)

    fn()
    strategy.run(fn)
    strategy.extended.update(variable, fn)
    assert not variable.numpy().any()
    assert strategy.reduce("sum", 1) == size


def test_ranks_must_give_as_many_slices_in_cross_replica_context(strategy, others):
    variable = make(strategy, np.ones(3))
    slices = ms.IndexedSlices(np.ones(1 + others), np.arange(1 + others))
    with pytest.raises(ms.errors.CollectiveMismatchError, match="scatter_add"):
        variable.scatter_add(slices)
    assert variable.values[0].tolist() == [1, 1, 1]


def test_dtypes(strategy):
    integers = make(strategy, np.array([7, -7, 6]))
    with pytest.raises(TypeError, match="float64 does not fit into int64"):
        integers.scatter_add(ms.IndexedSlices([0.5], [0]))
    integers.scatter_div(ms.IndexedSlices([2, 2, -2, 2], [0, 1, 2, 0]))
    assert integers.numpy().tolist() == [1, -3, -3], "towards zero, one after the other"
    singles = make(strategy, np.zeros(2, np.float32))
    singles.scatter_add(ms.IndexedSlices([1, 2], [1, 1]))
    assert singles.numpy().tolist() == [0, 3]
    assert singles.dtype == np.float32
    small = make(strategy, np.zeros(2, np.uint8))
    with pytest.raises(TypeError, match="int64 does not fit into uint8"):
        small.scatter_add(ms.IndexedSlices([1], [1]))
    flags = make(strategy, np.array([False, True]), Aggregation.NONE)
    with pytest.raises(TypeError, match="no arithmetic"):
        flags.scatter_add(ms.IndexedSlices([True], [0]))
    assert flags.scatter_update(ms.IndexedSlices([True], [0])).tolist() == [True, True]
    assert flags.scatter_min(ms.IndexedSlices([False], [0])).tolist() == [False, True]
    phases = make(strategy, np.ones(2, complex), Aggregation.NONE)
    with pytest.raises(TypeError, match="no order"):
        phases.scatter_max(ms.IndexedSlices([1j], [0]))
    assert phases.scatter_mul(ms.IndexedSlices([1j], [0])).tolist() == [1j, 1]


def test_values_that_are_a_view_of_the_variable(strategy):
    variable = make(strategy, np.array([1.0, 2.0, 3.0]), Aggregation.NONE)
    mirrored = variable.value()[::-1]
    assert variable.scatter_update(ms.IndexedSlices(mirrored, [0, 1, 2])).tolist() == [3, 2, 1]
    doubled = ms.IndexedSlices(variable.value()[:2], [0, 0])
    assert variable.scatter_add(doubled).tolist() == [3 + 3 + 2, 2, 1]


def test_tensors(strategy, size):
    torch = pytest.importorskip("torch")
    variable = make(strategy, np.zeros(3))
    slices = ms.IndexedSlices(torch.ones(2), torch.tensor([2, 2]))
    strategy.run(lambda: variable.scatter_add(slices))
    assert variable.numpy().tolist() == [0, 0, 2 * size]


def test_a_0_d_variable_has_no_rows(strategy):
    with pytest.raises(ValueError, match="no rows"):
        make(strategy, 1.0).scatter_add(ms.IndexedSlices([1.0], [0]))


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("trailing", [(), (2,)])
def test_batch_scatter_update(strategy, rank, batch, trailing):
    shape = (*batch, 4, *trailing)
    variable = make(strategy, np.zeros(shape), Aggregation.ONLY_FIRST_REPLICA)
    generator = np.random.default_rng(0)
    indices = generator.integers(0, 4, (*batch, 3))
    values = generator.uniform(1, 2, (*indices.shape, *trailing))
    expected = np.zeros(shape)
    for at in np.ndindex(indices.shape):
        expected[(*at[:-1], indices[at])] = values[at]
    slices = ms.IndexedSlices(values, indices, shape)
    assert_array_equal(variable.batch_scatter_update(slices), expected)
    # In replica context rank 0's slices count.
    mine = ms.IndexedSlices(values * (rank + 2), indices)
    strategy.run(lambda: variable.batch_scatter_update(mine))
    assert_array_equal(variable.numpy(), expected * 2)


@pytest.mark.parametrize(
    ("values", "indices"),
    [
        (np.ones((3, 1)), np.zeros((3, 1), int)),
        (np.ones((2, 1, 1)), np.zeros((2, 1), int)),
        (np.ones((2, 4, 1)), np.zeros((2, 4, 1), int)),
    ],
)
def test_bad_batches_are_refused(strategy, values, indices):
    variable = make(strategy, np.zeros((2, 4)), Aggregation.NONE)
    with pytest.raises(ValueError, match="do not fit"):
        variable.batch_scatter_update(ms.IndexedSlices(values, indices))


def test_batches_of_indices_are_for_batch_scatter_update_alone(strategy):
    slices = ms.IndexedSlices(np.ones((2, 1)), np.zeros((2, 1), int))
    with pytest.raises(ValueError, match="batches of indices"):
        strategy.reduce("sum", slices)
    with pytest.raises(ValueError, match="dense_shape"):
        ms.IndexedSlices(np.ones((2, 1)), np.zeros((2, 1), int), (3, 4))
    with pytest.raises(ValueError, match="one index"):
        ms.IndexedSlices(np.ones((2, 2)), np.zeros((2, 1), int))
