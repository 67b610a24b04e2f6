"""The GPU of the rank is the current one wherever functions of the program run."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data import ArraySpec, Dataset


def current():
    import cupy

    return cupy.cuda.runtime.getDevice()


def device_number(_):
    return np.int64(current())


class Source:
    def __len__(self):
        return 12

    def __getitem__(self, number):
        return device_number(number)


SOURCES = {
    "map": lambda: Dataset.range(12).map(device_number),
    "parallel map": lambda: Dataset.range(12).map(device_number, num_parallel_calls=2),
    "source": lambda: Dataset.from_source(Source()),
    "generator": lambda: Dataset.from_generator(
        lambda: map(device_number, range(12)), ArraySpec((), np.int64)
    ),
}


@pytest.fixture(params=[None, 2], ids=["ranks", "replicas"])
def strategy(request, size, monkeypatch):
    monkeypatch.setenv("MPISTRAT_SHARE_GPUS", "on")
    replicas = None if request.param is None else request.param * size
    made = ms.MPIStrategy(device="gpu", num_replicas=replicas)
    yield made
    made.close()


@pytest.mark.filterwarnings("ignore:.*returned different elements")
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("source", SOURCES)
def test_data_sets_compute_on_the_gpu_of_the_rank(strategy, source, prefetch):
    # The first element, for its dtype, may come from the thread of the program.
    data = SOURCES[source]().batch(2 * strategy.num_replicas_in_sync)
    batches = strategy.distribute_dataset(data.prefetch(prefetch) if prefetch else data)
    own = strategy.extended.device.index
    for batch in batches:
        assert [each.get().tolist() for each in batch.values] == [
            [own] * len(each) for each in batch.values
        ]


def test_what_is_done_for_each_replica_computes_there(strategy, mpi_tmp_path):
    with strategy.scope():
        total = ms.Variable(
            np.zeros(2),
            name="total",
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )
    strategy.run(lambda: total.assign_add(strategy.xp.ones(2)))
    expected = np.full(2, strategy.num_replicas_in_sync)
    path = ms.Checkpoint(total=total).write(mpi_tmp_path / "total.h5")
    total.assign(np.zeros(2))
    ms.Checkpoint(total=total).restore(path).assert_consumed()
    np.testing.assert_array_equal(total.numpy(), expected)
    found = strategy.distribute_datasets_from_function(
        lambda _: Dataset.from_arrays(np.full(2, current())).batch(1)
    )
    own = strategy.extended.device.index
    assert {int(part[0]) for batch in found for part in batch.values} == {own}


def test_an_array_of_another_gpu_leaves_the_current_one(strategy):
    import cupy

    own, xp = strategy.extended.device.index, strategy.xp
    with cupy.cuda.Device(cupy.cuda.runtime.getDeviceCount() - 1 - own):
        elsewhere = cupy.ones(3)
    with strategy.scope():
        weight = ms.Variable(np.zeros(3), name="w")
        optimizer = ms.optimizers.SGD(1.0)

    def step():
        replica = ms.get_replica_context()
        total = replica.all_reduce("sum", elsewhere)
        assert total.device.id == elsewhere.device.id
        assert (total.get() == strategy.num_replicas_in_sync).all()
        assert current() == own
        optimizer.apply_gradients([(elsewhere, weight)])
        return xp.ones(3) + weight

    strategy.run(step)
    assert weight.numpy().tolist() == [-strategy.num_replicas_in_sync] * 3
    assert current() == own
