"""Arrays of bfloat16, which NumPy knows through ml_dtypes."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

import mpistrat as ms
from tests.devices import assert_array_equal
from tests.helpers import result_of, triangle


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("op", ["sum", "mean", "prod", "min", "max"])
def test_reductions(strategy, rank, size, op, axis):
    rows = [np.array([[r + 1, -r, 0.5]], bfloat16) for r in range(size)]
    fold = {"sum": np.sum, "mean": np.mean, "prod": np.prod, "min": np.min, "max": np.max}[op]
    expected = fold(np.concatenate(rows).astype(np.float32), axis=0).astype(bfloat16)
    result = strategy.reduce(op, rows[rank], axis=axis)
    assert result.dtype == bfloat16
    assert result.shape == ((1, 3) if axis is None else (3,))
    assert result.reshape(-1).tolist() == expected.tolist()


def test_sums_are_taken_in_float32(strategy, rank, size):
    # 256 + 1 is 256 in bfloat16.
    total = strategy.reduce("sum", np.full(2, 256 if rank == 0 else 1, bfloat16))
    assert total.tolist() == [float(np.float32(255 + size).astype(bfloat16))] * 2


def test_extremes_with_nan_and_without_elements(strategy, rank, size):
    value = np.array([np.nan if rank == 0 else rank, rank], bfloat16)
    assert_array_equal(strategy.reduce("max", value).astype(np.float32), [np.nan, size - 1])
    part = np.full((1 if rank == size - 1 else 0, 2), 3, bfloat16)
    assert strategy.reduce("min", part, axis=0).tolist() == [3, 3]


def test_gathers_broadcasts_and_numbers(strategy, rank, size):
    gathered = strategy.gather(np.full((rank, 2), rank, bfloat16), 0)
    assert gathered.dtype == bfloat16
    assert gathered[:, 0].tolist() == [r for r in range(size) for _ in range(r)]
    (copy,) = strategy.extended.broadcast_to(np.array([rank + 1.5], bfloat16), "cpu:0").values
    assert copy.dtype == bfloat16
    assert copy.tolist() == [1.5]
    total = result_of(strategy, lambda: ms.get_replica_context().all_reduce("sum", bfloat16(2)))
    assert total.dtype == bfloat16
    assert total == 2 * size


@pytest.mark.host_memory
def test_variables(strategy, rank, size):
    on_read = ms.VariableSynchronization.ON_READ
    with strategy.scope():
        initial = np.full(2, rank + 1, bfloat16)
        mirrored = ms.Variable(initial, aggregation=ms.VariableAggregation.MEAN)
        local = ms.Variable(
            initial, synchronization=on_read, aggregation=ms.VariableAggregation.SUM
        )
    assert mirrored.dtype == local.dtype == bfloat16
    assert mirrored.numpy().tolist() == [1, 1]

    def fn():
        mirrored.assign(np.full(2, rank, bfloat16))
        local.assign(np.full(2, rank, bfloat16))
        local.assign_add(np.ones(2, bfloat16))

    strategy.run(fn)
    assert mirrored.numpy().tolist() == [(size - 1) / 2] * 2
    assert local.numpy().tolist() == [triangle(size) + size] * 2


def test_sparse_sums(strategy, rank, size):
    slices = ms.IndexedSlices(np.full((1, 2), rank, bfloat16), np.array([rank]), (9, 2))
    total = result_of(strategy, lambda: ms.get_replica_context().all_reduce("mean", slices))
    assert total.values.dtype == bfloat16
    expected = [float(np.array(r / size, bfloat16)) for r in range(size)]
    assert total.values[:, 0].tolist() == expected


@pytest.mark.host_memory
def test_a_bfloat16_tensor_stays_bfloat16(strategy, rank, size):
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([1.5, -3.0, 2.0**100], dtype=torch.bfloat16)
    with strategy.scope():
        mirrored = ms.Variable(tensor, aggregation=ms.VariableAggregation.SUM)
        wide = ms.Variable(tensor, dtype=np.float32)
    for variable in (mirrored, ms.Variable(tensor), ms.Variable(lambda: tensor)):
        assert variable.dtype == bfloat16
        assert variable.numpy().astype(float).tolist() == tensor.tolist()
    assert wide.dtype == np.float32  # as asked
    wide.assign(tensor)
    assert wide.numpy().tolist() == tensor.tolist()
    mirrored.assign(torch.full((3,), 0.5, dtype=torch.bfloat16))
    strategy.run(lambda: mirrored.assign_add(torch.full((3,), rank, dtype=torch.bfloat16)))
    assert mirrored.dtype == bfloat16
    assert mirrored.numpy().astype(float).tolist() == [0.5 + triangle(size)] * 3
