"""Collectives outside of `run`, and other plain names of strategies."""

import functools

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import ContextError
from tests.devices import assert_array_equal
from tests.helpers import result_of


def of_replica(name, before, own, after):
    return getattr(ms.get_replica_context(), name)(*before, own, *after)


def test_collectives_outside_of_run_are_those_of_the_replica_context(strategy, rank, size):
    own = np.arange(4.0) + rank
    calls = {
        "all_reduce": (("mean",), ()),
        "all_gather": ((), (0,)),
        "broadcast": ((), (size - 1,)),
        "scatter": ((), (size - 1,)),
    }
    for name, (before, after) in calls.items():
        expected = result_of(strategy, functools.partial(of_replica, name, before, own, after))
        for value in (own, ms.PerReplica(own), {"x": own}):
            found = getattr(strategy, name)(*before, value, *after)
            found = found["x"] if isinstance(value, dict) else found
            assert_array_equal(found, expected)
        with strategy.scope():
            assert_array_equal(getattr(strategy, name)(*before, own, *after), expected)
        with pytest.raises(ContextError, match=rf"get_replica_context\(\)\.{name}\(\)"):
            strategy.run(lambda n=name, b=before, a=after: getattr(strategy, n)(*b, own, *a))


def test_they_take_the_values_of_several_replicas_of_a_rank(size):
    own = ms.MPIStrategy(device="cpu", num_replicas=2 * size)
    value = own.distribute_values_from_function(
        lambda context: np.full(2, float(context.replica_id_in_sync_group))
    )
    total = sum(range(2 * size))
    assert own.all_reduce("sum", value).tolist() == [total] * 2
    assert own.all_gather(value, 0)[::2].tolist() == list(range(2 * size))
    assert own.broadcast(value, root=1).tolist() == [1, 1]
    parts = own.local_results(own.scatter(value))
    assert len(parts) == 2
    with pytest.raises(ValueError, match="plain array or number"):
        own.all_reduce("sum", 1.0)
    own.close()


def test_plain_names_are_the_methods_of_tf_distribute(strategy):
    value = strategy.distribute_values_from_function(lambda context: np.ones(2))
    assert strategy.local_results(value) == strategy.experimental_local_results(value)
    assert strategy.xp is strategy.extended.xp
    batches = strategy.distribute_dataset(ms.data.Dataset.range(8).batch(8))
    assert sum(int(strategy.reduce("sum", batch, axis=0)) for batch in batches) == 28
    with strategy.scope():
        strategy.assert_replicas_agree(ms.Variable(np.ones(2)))


def test_rows_of_a_table_that_is_cut_by_ranks(rank, size):
    own = ms.MPIStrategy(device="cpu", variable_partitioner="ranks")
    with own.scope():
        table = ms.Variable(np.zeros((2 * size + 1, 3)), name="table")
        adam = ms.optimizers.Adam(0.1)
    assert isinstance(table, ms.ShardedVariable)
    assert len(table.row_ranges) == size
    table.assign_part(np.full((len(table.row_range), 3), rank, np.float32))
    expected = np.repeat([other for other in range(size) for _ in table.row_ranges[other]], 3)
    assert_array_equal(table.numpy().reshape(-1), expected)
    before = table.numpy()
    own.run(lambda: adam.apply_gradients([(np.ones(table.shape), table)]))
    assert (table.numpy() < before).all()
    with pytest.raises(ValueError, match="shape"):
        table.assign_part(np.zeros((2 * size + 2, 3)))
    with pytest.raises(ValueError, match='the only name is "ranks"'):
        ms.MPIStrategy(variable_partitioner="rows")
    own.close()
