"""Every write and read of variables three times, by each fast path and without: the same bits."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpistrat as ms
from tests.fast_paths import OFF, WAYS, all_opened, thorough_but
from tests.helpers import as_bytes

TIMES = 3
SHAPE = (6, 3)
WRITES = ["assign", "assign_add", "assign_sub"]
SCATTERED = ["scatter_add", "scatter_sub", "scatter_mul", "scatter_update", "scatter_max"]
AGGREGATIONS = list(ms.VariableAggregation)
SYNCHRONIZATIONS = [ms.VariableSynchronization.AUTO, ms.VariableSynchronization.ON_READ]


@pytest.fixture(scope="module", params=[None, 5], ids=["ranks", "replicas"])
def strategies(request):
    ways = WAYS if request.param is None else WAYS[:1]
    with all_opened([*ways, OFF], num_replicas=request.param) as opened:
        yield opened


def numbers(*seed, dtype=np.float32):
    """Return whole numbers and quarters: each order of a sum, and each mean of 4, is exact."""
    return (np.random.default_rng(seed).integers(-9, 9, SHAPE) / 4).astype(dtype)


def written(strategy, synchronization, aggregation, method, context, dtype):
    """Return the values after each write, or the error that refuses it."""
    with strategy.scope():
        variable = ms.Variable(
            numbers(0, dtype=dtype), synchronization=synchronization, aggregation=aggregation
        )

    def write(time):
        replica = ms.get_replica_context()
        own = 0 if replica is None else replica.replica_id_in_sync_group
        value = numbers(1, own, time, dtype=dtype)
        if "scatter" in method:
            value = ms.IndexedSlices(value[:3], np.array([4, 1, 1]))
        getattr(variable, method)(value)

    found = []
    for time in range(TIMES):
        try:
            if context == "replica":
                strategy.run(write, args=(time,))
            else:
                with strategy.scope():
                    write(time)
        except (ValueError, NotImplementedError) as error:
            found.append(type(error))
            continue
        found.append(as_bytes(variable.values[0]))
        with contextlib.suppress(ValueError):
            found.append(as_bytes(variable.numpy()))
            found.append(as_bytes(strategy.extended.read_var(variable)))
            found.append(as_bytes(strategy.reduce("mean", variable)))
    return found


@pytest.mark.parametrize("method", thorough_but(WRITES + SCATTERED, ["assign_add", "scatter_add"]))
@pytest.mark.parametrize("context", thorough_but(["replica", "cross-replica"], ["replica"]))
def test_writes(strategies, method, context):
    for synchronization in SYNCHRONIZATIONS:
        for aggregation in AGGREGATIONS:
            for dtype in (np.float32, np.float16):
                case = (synchronization, aggregation, method, context, dtype)
                expected = written(strategies[OFF], *case)
                for way, strategy in strategies.items():
                    assert written(strategy, *case) == expected, (way, case)


@settings(max_examples=15)
@given(
    aggregation=st.sampled_from([each for each in AGGREGATIONS if each.name != "NONE"]),
    writes=st.lists(
        st.tuples(st.sampled_from(WRITES), st.booleans(), st.integers(0, 9)), min_size=1, max_size=5
    ),
)
def test_any_writes_again(strategies, aggregation, writes):
    """Of floats whose sums round: MPI adds up in its own order, so between nodes it is left out."""
    found = {}
    for way in ("memory", OFF):
        strategy = strategies[way]
        with strategy.scope():
            variable = ms.Variable(np.ones(50, np.float32), aggregation=aggregation)

        def step(variable=variable):
            own = ms.get_replica_context().replica_id_in_sync_group
            for method, is_large, seed in writes:
                drawn = np.random.default_rng([own, seed]).normal(size=50)
                value = (drawn * 1000 if is_large else drawn).astype(np.float32)
                getattr(variable, method)(value)

        found[way] = []
        for _ in range(TIMES):
            strategy.run(step)
            found[way].append(as_bytes(variable.numpy()))
    assert found["memory"] == found[OFF]


def test_sharded_variables():
    def partitioner(shape, dtype):
        return ms.partitioners.FixedShardsPartitioner(3)(shape, dtype)

    with all_opened([*WAYS, OFF], variable_partitioner=partitioner) as opened:
        found = {}
        for way, strategy in opened.items():
            with strategy.scope():
                variable = ms.Variable(numbers(0), aggregation=ms.VariableAggregation.SUM)

            def step(time, variable=variable):
                own = ms.get_replica_context().replica_id_in_sync_group
                variable.assign_add(numbers(own, time))
                return variable.lookup([4, 0, own % 6])

            found[way] = []
            for time in range(TIMES):
                rows = strategy.run(step, args=(time,))
                found[way].append(as_bytes(strategy.experimental_local_results(rows)[0]))
                found[way].append(as_bytes(variable.numpy()))
        assert all(each == found[OFF] for each in found.values())
