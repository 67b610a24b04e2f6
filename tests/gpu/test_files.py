"""Datasets and checkpoints of arrays on devices."""

import warnings

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arrays import is_on_host
from mpistrat.optimizers import Adam


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_arrive_on_the_device(gpus, size, prefetch):
    numbers = np.arange(64.0 * size)
    data = ms.data.Dataset.from_arrays({"x": numbers, "y": numbers[:, None] * np.ones(300)})
    data = data.shuffle(seed=1).batch(4 * size)
    if prefetch:
        data = data.prefetch(prefetch)
    own = 0.0
    for batch in gpus.experimental_distribute_dataset(data):
        assert not is_on_host(batch["x"].values[0])

        def step(x, y):
            assert not is_on_host(y)
            assert bool((y[:, 0] == x).all())
            return x.sum()

        per_replica = gpus.run(step, (batch["x"], batch["y"]))
        own += float(per_replica.values[0])
    assert gpus.reduce("sum", np.float64(own), axis=None) == numbers.sum()


@pytest.mark.parametrize(
    ("dtype", "moves"),
    [("?", True), ("f2", True), ("F", True), (">f4", True), ("i1", True), ("u8", True),
     ("U3", False), ("S3", False), ("M8[ns]", False), ("m8[s]", False), ("g", False), ("G", False)],
)  # fmt: skip
def test_dtypes_that_devices_lack_stay_in_host_memory(gpus, size, dtype, moves):
    array = np.zeros(8 * size, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for batch in gpus.experimental_distribute_dataset(
            ms.data.Dataset.from_arrays(array).batch(4 * size)
        ):
            (own,) = batch.values
            assert is_on_host(own) != moves
            assert own.dtype == np.dtype(dtype).newbyteorder("=")


def test_data_sets_take_what_lies_on_a_device(gpus, size):
    xp, dataset = gpus.extended.xp, ms.data.Dataset
    numbers = dataset.from_arrays(xp.arange(20))

    def elements(data):
        return [int(each) for each in data]

    assert elements(numbers.select(xp.asarray([1, 3, 2]))) == [1, 3, 2]
    assert elements(numbers.select(xp.arange(20) > 17)) == [18, 19]
    weights = np.arange(20.0)
    drawn = numbers.sample(xp.asarray(weights), num_examples=9)
    assert elements(drawn) == elements(numbers.sample(weights, num_examples=9))
    spec = ms.data.ArraySpec((2,), np.int64)
    generated = dataset.from_generator(lambda: (xp.full(2, i) for i in range(4 * size)), spec)
    batches = [*gpus.distribute_dataset(generated.batch(2 * size))]
    rows = [batch.values[0].get() for batch in batches]
    first = [2 * gpus.rank, 2 * (size + gpus.rank)]
    assert [row[:, 0].tolist() for row in rows] == [[each, each + 1] for each in first]


def test_state_of_devices_is_saved_and_restored_anywhere(gpus, hosts, rank, mpi_tmp_path):
    def model(strategy):
        with strategy.scope():
            weight = ms.Variable(np.arange(300_000, dtype=np.float32), name="w")
            optimizer = Adam(0.01)
        gradient = strategy.extended.xp.ones(300_000, dtype=np.float32)
        strategy.run(lambda: optimizer.apply_gradients([(gradient, weight)]))
        return weight, optimizer, ms.Checkpoint(weight=weight, optimizer=optimizer)

    weight, _, checkpoint = model(gpus)
    before = weight.numpy()
    path = checkpoint.write(mpi_tmp_path / "run.h5")
    weight.assign(np.zeros(300_000, np.float32))
    checkpoint.restore(path).assert_consumed()
    np.testing.assert_array_equal(weight.numpy(), before)
    assert not is_on_host(weight.value())
    on_host, _, of_hosts = model(hosts)
    on_host.assign(np.zeros(300_000, np.float32))
    of_hosts.restore(path).assert_consumed()
    np.testing.assert_array_equal(on_host.numpy(), before)
    back = of_hosts.write(mpi_tmp_path / "host.h5")
    weight.assign(np.zeros(300_000, np.float32))
    checkpoint.restore(back).assert_consumed()
    np.testing.assert_array_equal(weight.numpy(), before)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_manager_saves_device_memory(gpus, mpi_tmp_path, asynchronous):
    with gpus.scope():
        weight = ms.Variable(np.zeros(100_000, np.float32), name="w")
    checkpoint = ms.Checkpoint(weight=weight)
    with gpus.scope():
        manager = ms.CheckpointManager(
            checkpoint, mpi_tmp_path / "runs", max_to_keep=2, asynchronous=asynchronous
        )
        for number in range(3):
            weight.assign(np.full(100_000, number, np.float32))
            manager.save(number)
        manager.wait()
        weight.assign(np.zeros(100_000, np.float32))
        checkpoint.restore(manager.latest_checkpoint).assert_consumed()
    assert len(manager.checkpoints) == 2
    assert weight.numpy()[0] == 2


def test_a_generator_on_the_device_goes_on_where_it_was(gpus, mpi_tmp_path):
    import cupy

    generator = cupy.random.default_rng(3)
    with gpus.scope():
        checkpoint = ms.Checkpoint(rng=generator)
        path = checkpoint.write(mpi_tmp_path / "run.h5")
        first = generator.random(5).get()
        checkpoint.restore(path)
    np.testing.assert_array_equal(generator.random(5).get(), first)
