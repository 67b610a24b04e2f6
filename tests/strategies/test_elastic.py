"""Elastic strategies, whose calls are undone and repeated; here without the death of a rank.

Where a unit is to be repeated, the ranks get another order, so that all replicas move to others.
"""

import hashlib

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.errors import CollectiveError, LaunchError, ReplicaLostError
from tests.devices import assert_array_equal

NUM_REPLICAS = 5
RNG = np.random.default_rng(7)
X = RNG.standard_normal((43, 6)).astype(np.float32)
Y = RNG.integers(0, 3, 43)
START = (RNG.standard_normal((6, 3)) / 3).astype(np.float32)


def make(**options):
    return ms.MPIStrategy(device="cpu", num_replicas=NUM_REPLICAS, **options)


def train(strategy, folder, num_steps=14, asynchronous=False):
    """Train, use what else there is, and return a digest of all that came out."""
    with strategy.scope():
        weight = ms.Variable(START)
        bias = ms.Variable(np.zeros(3, np.float32))
        total = ms.metrics.Mean(name="total")
        adam = ms.optimizers.Adam(learning_rate=0.02, global_clipnorm=1.0)
        average = ms.optimizers.ExponentialMovingAverage(0.9)
        norm = ms.layers.BatchNorm(3)

    def step(x, y):
        replica = ms.get_replica_context()
        keep = replica.rng(3, int(adam.iterations.value())).random(x.shape) < 0.8
        x = x * keep
        z = x @ weight.value() + bias.value()
        out, saved = norm.forward(z, training=True) if len(z) else (z, None)
        p = np.exp(out - out.max(axis=1, keepdims=True)) if len(z) else out
        p = p / p.sum(axis=1, keepdims=True)
        count = replica.all_reduce("sum", len(y))
        error = ((p - np.eye(3, dtype=np.float32)[y]) / count).astype(np.float32)
        pairs = []
        if saved is not None:
            error, pairs = norm.backward(saved, error)
        zeros = [(np.zeros(3, np.float32), each) for each in (norm.gamma, norm.beta)]
        pairs = pairs or zeros
        adam.apply_gradients([(x.T @ error, weight), (error.sum(axis=0), bias), *pairs])
        total.update_state(np.abs(error).sum())
        return np.float64(np.abs(error).sum())

    data = strategy.experimental_make_numpy_dataset((X, Y)).shuffle(seed=4).batch(16)
    batches = strategy.experimental_distribute_dataset(data)
    checkpoint = ms.Checkpoint(
        weight=weight, bias=bias, adam=adam, total=total, batches=batches, norm=norm
    )
    manager = ms.CheckpointManager(checkpoint, folder, max_to_keep=2, asynchronous=asynchronous)
    manager.restore_or_initialize()
    digest, done = hashlib.sha256(), 0
    while done < num_steps:
        for batch in batches:
            losses = strategy.run(step, args=batch)
            digest.update(strategy.reduce("sum", losses).tobytes())
            done += 1
        average.apply([weight])
        digest.update(np.float64(total.result()).tobytes())
        manager.save(step=done)
        total.reset_state()
    manager.wait()
    assert len(manager.checkpoints) == 2
    weight.assign_add(np.ones_like(START))
    checkpoint.restore(manager.latest_checkpoint)
    own = strategy.experimental_distribute_values_from_function(
        lambda context: np.full(1, context.replica_id_in_sync_group)
    )
    digest.update(strategy.gather(own, axis=0).tobytes())
    digest.update(repr(strategy.broadcast_object("object")).encode())
    strategy.barrier()
    for each in (weight, bias, average.average(weight), norm.gamma, adam.iterations):
        digest.update(each.numpy().tobytes())
    for each in (norm.moving_mean, norm.moving_variance):
        digest.update(each.numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def known():
    return []


@pytest.fixture
def expected(known, mpi_tmp_path):
    """What comes out without elastic=True."""
    if not known:
        known.append(train(make(), str(mpi_tmp_path / "undisturbed")))
    return known[0]


def test_without_a_loss_nothing_is_repeated(job, expected, mpi_tmp_path):
    assert train(make(elastic=True), str(mpi_tmp_path / "own")) == expected
    assert job.generations == 0


@pytest.mark.thorough_product
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("offset", range(3))
def test_each_call_may_be_repeated(job, expected, mpi_tmp_path, offset, asynchronous):
    job.repeated = lambda number: number % 3 == offset
    own = str(mpi_tmp_path / "own")
    assert train(make(elastic=True), own, asynchronous=asynchronous) == expected
    assert job.generations == len(job.done) > 10


@pytest.mark.parametrize("size", [3, 20_000])
def test_components_of_any_length_come_back(job, size):
    strategy = make(elastic=True)
    with strategy.scope():
        own = ms.Variable(
            np.zeros(size),
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )

    def step(number):
        replica = ms.get_replica_context().replica_id_in_sync_group
        own.assign_add(np.full(size, 10.0 ** (2 * number)) * (replica + 1))
        return np.full(7, replica), "text", None

    job.repeated = lambda number: number % 2 == 0
    for number in range(6):
        result = strategy.run(step, args=(number,))
    total = sum(range(1, NUM_REPLICAS + 1)) * sum(10.0 ** (2 * each) for each in range(6))
    assert_array_equal(own.numpy(), np.full(size, total))
    strategy.barrier()
    strategy.barrier()
    ids = [int(each[0]) for each in strategy.experimental_local_results(result[0])]
    assert ids == list(strategy.extended.local_replica_ids)


@pytest.mark.parametrize("policy", ["FILE", "OFF"])
def test_batches_of_any_division_are_read_again(job, mpi_tmp_path, policy):
    if MPI.COMM_WORLD.rank == 0:
        for number in range(NUM_REPLICAS + 2):
            with h5py.File(mpi_tmp_path / f"part-{number}.h5", "w") as file:
                file["x"] = np.arange(4 + number % 3) + 10.0 * number
    MPI.COMM_WORLD.barrier()
    data = ms.data.Dataset.from_hdf5(str(mpi_tmp_path / "part-*.h5"), "x").shuffle(seed=2)
    data = data.batch(10).with_options(auto_shard_policy=ms.data.AutoShardPolicy[policy])

    def sums(strategy):
        found = []
        batches = strategy.experimental_distribute_dataset(data)
        for _ in range(2):
            for batch in batches:
                found.append(strategy.reduce("sum", strategy.run(np.sum, args=(batch,))).tobytes())
        return found

    expected = sums(make())
    job.repeated = lambda number: number % 2 == 0
    assert sums(make(elastic=True)) == expected
    assert job.generations > 3


def test_data_sets_of_a_function_are_made_again(job):
    asked = []

    def make_one(context):
        asked.append(context.input_pipeline_id)
        assert context.num_input_pipelines == context.num_replicas_in_sync == NUM_REPLICAS
        data = ms.data.Dataset.range(20 + 3 * context.input_pipeline_id).shuffle(seed=2)
        return data.map(lambda x: x + ms.data.example_rng().random()).batch(4)

    def sums(strategy):
        batches = strategy.distribute_datasets_from_function(make_one)
        return [
            strategy.reduce("sum", strategy.run(np.sum, args=(batch,))).tobytes()
            for _ in range(2)
            for batch in batches
        ]

    expected = sums(make())
    asked.clear()
    strategy = make(elastic=True)
    own = list(strategy.extended.local_replica_ids)
    job.repeated = lambda number: number % 3 == 0
    assert sums(strategy) == expected
    assert job.generations > 3
    assert set(asked) >= {*own, *strategy.extended.local_replica_ids}
    assert len(asked) <= 2 * len(own) + NUM_REPLICAS


def test_a_function_that_returns_another_data_set(job):
    calls = []

    def make_one(context):
        calls.append(context)
        return ms.data.Dataset.range(9 + len(calls) // NUM_REPLICAS).batch(2)

    strategy = make(elastic=True)
    batches = iter(strategy.distribute_datasets_from_function(make_one))
    next(batches)
    calls.extend([None] * NUM_REPLICAS)
    ids = strategy.extended.local_replica_ids
    job.repeated = lambda number: number == 3
    strategy.barrier()
    if strategy.size == 1:
        next(batches)
        return
    is_whole = set(strategy.extended.local_replica_ids) <= set(ids)
    with pytest.raises((ms.errors.DataError, CollectiveError), match="the same InputContext"):
        if not is_whole:
            next(batches)
        strategy.barrier()


@pytest.mark.parametrize("number", [1, 4, 6])
@pytest.mark.parametrize("options", [{}, {"elastic": True}])
def test_an_error_in_a_batch_reaches_all_ranks(job, options, number):
    # No rank does a collective in the loop, and none may end it without an error.
    def stumble(x):
        if x == number:
            raise KeyError("bad one")
        return x

    strategy = make(**options)
    data = ms.data.Dataset.range(7).map(stumble).batch(2)
    batches = strategy.experimental_distribute_dataset(data)
    job.repeated = lambda number: True
    with pytest.raises((KeyError, CollectiveError), match="bad one"):
        for _ in batches:
            pass
    assert job.generations == 0  # a unit with an error of the program is not repeated
    strategy.close()


def test_the_end_of_a_pass_may_be_repeated(job):
    strategy = make(elastic=True)
    batches = strategy.experimental_distribute_dataset(ms.data.Dataset.range(7).batch(2))
    job.repeated = lambda number: True
    for generation in range(1, 4):
        assert len(list(batches)) == 4
        assert job.generations == generation


def test_shares_move_and_are_asked_for(job):
    strategy = make(elastic=True)
    rank, size = strategy.rank, strategy.size
    job.repeated = lambda number: number == 2
    strategy.barrier()
    assert strategy.rank == size - 1 - rank == strategy.cluster_resolver.task_id
    found = strategy.run(lambda: ms.get_replica_context().replica_id_in_sync_group)
    assert list(strategy.experimental_local_results(found)) == list(
        strategy.extended.local_replica_ids
    )


def test_names_are_given_once(job):
    strategy = make(elastic=True)
    job.repeated = lambda number: number in (2, 3)
    with strategy.scope():
        names = [ms.Variable(0.0).name for _ in range(3)]
    assert names == ["Variable", "Variable_1", "Variable_2"]


def test_what_nobody_can_make_again_is_named(job):
    strategy = make(elastic=True)
    kept = []

    def merge(strategy, value):
        kept.append(value)

    def step():
        replica = ms.get_replica_context()
        replica.merge_call(merge, (float(replica.replica_id_in_sync_group),))

    strategy.run(step)
    if strategy.size == 1:
        assert strategy.reduce("sum", kept[0]) == sum(range(NUM_REPLICAS))
        return
    job.repeated = lambda number: number == 3
    strategy.barrier()
    before = job.generations
    assert before == 1
    if strategy.extended.local_replica_ids != kept[0]._ids:
        with pytest.raises(ReplicaLostError, match="also computes"):
            strategy.experimental_local_results(kept[0])


def test_long_results_are_not_kept(job):
    strategy = make(elastic=True)
    long = strategy.run(lambda: np.zeros(2**18))
    ids = strategy.extended.local_replica_ids
    job.repeated = lambda number: number == 3
    strategy.barrier()
    if strategy.extended.local_replica_ids != ids:
        with pytest.raises(ReplicaLostError, match="1 MiB"):
            strategy.experimental_local_results(long)


def test_errors_of_the_program_are_raised_once(job):
    strategy = make(elastic=True)
    calls = []

    def fails():
        calls.append(1)
        raise ArithmeticError("of the program")

    with pytest.raises(ArithmeticError):
        strategy.run(fails)
    assert len(calls) == 1
    assert strategy.reduce("sum", strategy.run(lambda: 1)) == NUM_REPLICAS


def test_handles_do_not_outlive_their_run(job):
    strategy, kept = make(elastic=True), []

    def begin(waits):
        kept.append(ms.get_replica_context().start_all_reduce("sum", np.ones(3)))
        if waits:
            kept[-1].wait()

    strategy.run(begin, args=(True,))
    with pytest.raises(
        ValueError, match=r"start_all_reduce at .*test_elastic.* wait\(\) within fn"
    ):
        strategy.run(begin, args=(False,))
    assert all(np.all(each.wait() == NUM_REPLICAS) for each in kept)
    strategy.run(begin, args=(True,))
    strategy.close()


def test_what_is_refused(job):
    strategy = make(elastic=True)
    endless = ms.data.Dataset.from_generator(lambda: iter(()), ms.data.ArraySpec((), "int64"))
    with pytest.raises(NotImplementedError, match="known length"):
        strategy.distribute_datasets_from_function(lambda context: endless.batch(1))
    with pytest.raises(NotImplementedError, match="could not be repeated"):
        strategy.extended._collectives.gather_json(1, "something else")
    with pytest.raises(ValueError, match="same number of replicas"):
        ms.MPIStrategy(num_replicas=NUM_REPLICAS + 1, elastic=True)


def test_arguments():
    with pytest.raises(ValueError, match="needs num_replicas="):
        ms.MPIStrategy(elastic=True)
    with pytest.raises(ValueError, match="cannot be combined with comm="):
        ms.MPIStrategy(MPI.COMM_WORLD, num_replicas=NUM_REPLICAS, elastic=True)
    with pytest.raises(TypeError, match="elastic"):
        ms.MPIStrategy(num_replicas=NUM_REPLICAS, elastic="yes")


def test_where_ranks_are_not_outlived(monkeypatch):
    if MPI.COMM_WORLD.size == 1:
        pytest.skip("one rank alone needs no proof")
    with pytest.raises(LaunchError, match="mpiexec --with-ft ulfm"):
        make(elastic=True)
