import numpy as np
import pytest

import mpistrat as ms


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_parts_of_different_length(strategy, rank, size, axis):
    def part(r):
        rows = np.arange(r * 6, dtype=np.int16).reshape(r, 2, 3) + 100 * r
        return np.moveaxis(rows, 0, axis)

    gathered = strategy.gather(ms.PerReplica(part(rank)), axis)
    assert gathered.dtype == np.int16
    assert gathered.tolist() == np.concatenate([part(r) for r in range(size)], axis).tolist()
    assert gathered.flags.writeable


@pytest.mark.parametrize("dtype", ["bool", "float16", "complex128", "S3", ">i4"])
def test_dtypes(strategy, size, dtype):
    value = np.array([0, 1, 1]).astype(dtype)
    gathered = strategy.gather(value, 0)
    assert gathered.dtype == np.dtype(dtype).newbyteorder("=")
    assert gathered.tolist() == value.tolist() * size


def test_nests_inside_run(strategy, rank, size):
    def fn():
        return ms.get_replica_context().all_gather({"a": np.full(rank, rank), "b": [[[rank]]]}, 0)

    with pytest.raises(TypeError, match="the leaf 'a' is None"):
        strategy.run(lambda: ms.get_replica_context().all_gather({"a": None}, 0))

    def arrays():
        nest = {"a": np.full(rank, rank), "b": [np.array([rank])]}
        return ms.get_replica_context().all_gather(nest, 0)

    result = strategy.run(arrays)
    assert result["a"].values[0].tolist() == [r for r in range(size) for _ in range(r)]
    assert result["b"][0].values[0].tolist() == list(range(size))


def test_shapes_that_differ_elsewhere_raise_everywhere(strategy, rank, size):
    if size > 1:
        with pytest.raises(ValueError, match="may differ along axis 0 only"):
            strategy.gather(np.ones((2, 1 + rank)), 0)
        with pytest.raises(ValueError):
            strategy.gather(np.ones((1,) * (1 + rank % 2)), 0)
        with pytest.raises(ValueError, match="0-d"):
            strategy.gather(np.ones(1) if rank == 0 else np.float64(1), 0)
    assert strategy.reduce("sum", 1) == size


def test_sync_on_read_variables_are_per_replica_values(strategy, rank, size):
    with strategy.scope():
        variable = ms.Variable(
            np.zeros(2),
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.NONE,
        )
    strategy.run(lambda: variable.assign(np.full(2, float(rank))))
    assert strategy.gather(variable, 0).tolist() == [float(r) for r in range(size) for _ in "ab"]
