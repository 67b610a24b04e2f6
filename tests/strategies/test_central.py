"""CentralStorageStrategy: one storage of each variable, with the meanings of mirrored ones."""

import gc
import os

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError, ContextError, LaunchError
from mpistrat.sharding import part_lengths
from mpistrat.testing import launch
from tests.helpers import as_bytes

pytestmark = pytest.mark.host_memory

A = ms.VariableAggregation
ON_READ = ms.VariableSynchronization.ON_READ


@pytest.fixture
def central():
    strategy = ms.CentralStorageStrategy(device="cpu")
    yield strategy
    strategy.close()


def make(strategy, value, **modes):
    with strategy.scope():
        return ms.Variable(value, **modes)


# Where things are


def test_replicas_and_devices(central, size):
    assert central.num_replicas_in_sync == size
    assert len(central.extended.worker_devices) == size
    (device,) = central.extended.parameter_devices
    assert device.endswith("device:CPU:0")
    with pytest.warns(DeprecationWarning, match="non_slot_devices"):
        assert central.extended.non_slot_devices([]) == (device,)
    assert repr(central).startswith("<CentralStorageStrategy rank ")


def test_one_storage_for_all_ranks(central, rank, size):
    variable = make(central, np.zeros(4 * size), name="weight")
    assert isinstance(variable, ms.Variable)
    assert len(variable.values) == 1
    assert variable.value().base is not None
    assert not variable.value().flags.writeable
    kept = variable.value()
    variable.storage[rank] = rank + 1.0
    central.barrier()
    assert kept[:size].tolist() == [each + 1.0 for each in range(size)]
    assert len(variable.part) == len(variable.row_range) == 4 * size
    assert variable.lookup([size - 1]).tolist() == [size]


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 5), (2, 1, 7)], ids=str)
@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "c16", "i4", "u1", "?"])
def test_shapes_and_dtypes(central, shape, dtype):
    value = (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2).astype(dtype)
    variable = make(central, value)
    assert variable.dtype == dtype
    assert variable.shape == shape
    assert as_bytes(variable.value()) == as_bytes(value) == as_bytes(variable.numpy())
    with central.scope():
        variable.assign(np.zeros(shape, dtype))
    assert not variable.numpy().any()


def test_the_value_of_rank_0_counts(central, rank):
    assert make(central, rank + 7.0).numpy() == 7.0


def test_made_inside_of_run(central):
    made = []
    central.run(lambda: made.append(ms.Variable(np.ones(3))))
    assert made[0].strategy is central
    assert made[0].device == central.extended.parameter_devices[0]


def test_initial_values_that_are_made_in_parts(central):
    def rows(partition_shape, partition_offset):
        assert tuple(partition_offset) == (0, 0)
        return np.full(partition_shape, 2.0)

    assert make(central, rows, shape=(5, 2), dtype="f4").numpy().tolist() == [[2.0, 2.0]] * 5


# Writes


def test_writes_that_are_refused(central, rank, others, size):
    variable = make(central, np.ones(3))
    with pytest.raises(ValueError, match="aggregation"):
        central.run(lambda: variable.assign(np.zeros(3)))
    with central.scope():
        with pytest.raises(ValueError, match="PerReplica"):
            variable.assign_add(ms.PerReplica(np.ones(3)))
        with pytest.raises(ValueError, match="shape"):
            variable.assign(np.ones(4))
        assert variable.numpy().tolist() == [1, 1, 1]
        with pytest.raises(CollectiveMismatchError if others else ValueError):
            variable.assign(np.ones(3 if others else 4))
        assert variable.numpy().tolist() == [1, 1, 1]


def test_writes_in_cross_replica_context(central, size):
    variable = make(central, np.full(3, 10.0), aggregation=A.SUM)
    with central.scope():
        assert variable.assign_add(np.ones(3)).tolist() == [11] * 3
        assert variable.assign_add(np.ones(3), read_value=False) is None
    variable.assign_sub(np.full(3, 2.0))  # outside of the scope too
    assert variable.numpy().tolist() == [10] * 3


def test_snapshots_and_views(central):
    variable = make(central, np.zeros(3))
    kept, snapshot = variable.value(), variable.read_value()
    variable.assign(np.ones(3))
    assert kept.tolist() == [1, 1, 1]
    assert snapshot.tolist() == [0, 0, 0]


def test_nobody_reads_half_of_a_write(central, rank, size):
    variable = make(central, np.zeros(200_003), aggregation=A.SUM)
    for number in range(20):
        variable.assign(np.full(200_003, float(number)))
        assert (variable.value() == number).all()
        central.barrier()
        central.run(lambda: variable.assign_add(np.ones(200_003)))
        assert (variable.value() == number + size).all()
        central.barrier()


def test_scatters_are_those_of_mirrored_variables(central, strategy, rank):
    results = []
    for owner in (strategy, central):
        variable = make(owner, np.ones((5, 3)), aggregation=A.SUM)
        rows = ms.IndexedSlices(np.full((3, 3), rank + 0.1), [4, 0, 4])
        owner.run(variable.scatter_add, args=(rows,))
        owner.run(variable.scatter_mul, args=(rows,))
        with owner.scope():
            with pytest.raises(IndexError):
                variable.scatter_add(ms.IndexedSlices(np.ones((1, 3)), [5]))
            other = ms.Variable(np.ones((5, 3)))
            other.scatter_max(ms.IndexedSlices(np.full((1, 3), 3.0), [0]))
            other.scatter_update(ms.IndexedSlices(np.full((1, 3), 7.0), [2]))
            other.batch_scatter_update(ms.IndexedSlices(np.zeros((5, 1)), [[1]] * 5))
        results.append(as_bytes(variable.numpy()) + as_bytes(other.numpy()))
    assert results[0] == results[1]


@pytest.mark.parametrize("aggregation", [A.SUM, A.ONLY_FIRST_REPLICA], ids=lambda a: a.name)
def test_what_is_written_may_be_a_view_of_the_variable(central, size, aggregation):
    """Each rank writes a part while others may still read what it was given."""
    number = 60_001
    whole = np.arange(float(number))
    variable = make(central, whole, aggregation=aggregation)
    rows = make(central, whole[:, None], aggregation=aggregation)
    merged = size if aggregation is A.SUM else 1
    for _ in range(5):
        variable.assign(variable.value()[::-1])
        assert np.array_equal(variable.value(), whole[::-1])
        central.barrier()
        central.run(lambda: variable.assign(variable.value()[::-1]))
        assert np.array_equal(variable.value(), whole * merged)
        central.barrier()
        variable.assign(whole)
        variable.assign_sub(variable.value()[::-1])
        assert np.array_equal(variable.value(), whole - whole[::-1])
        central.barrier()
        variable.assign(whole)

        def reverse():
            return ms.IndexedSlices(rows.value()[::-1], np.arange(number))

        rows.scatter_add(reverse())
        assert (rows.value() == number - 1).all()
        central.barrier()
        rows.assign(whole[:, None])
        central.run(lambda: rows.scatter_add(reverse()))
        expected = whole + merged * whole[::-1]
        assert np.array_equal(rows.value()[:, 0], expected)
        central.barrier()
        rows.assign(whole[:, None])


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c16"])
def test_foreign_byte_orders_become_native(central, rank, size, dtype):
    given = np.arange(5).astype(dtype if rank == 0 else np.dtype(dtype).newbyteorder("="))

    def zeros(partition_shape, partition_offset):
        return np.zeros(partition_shape, dtype)

    native = np.dtype(dtype).newbyteorder("=")
    for variable in (make(central, given), make(central, zeros, shape=(5,), dtype=dtype)):
        central.barrier()
        assert variable.dtype == variable.value().dtype == native
        variable.assign(np.arange(5).astype(dtype))
        assert variable.numpy().tolist() == [0, 1, 2, 3, 4]


# Update, reduce, inputs


def test_update_calls_the_function_once(central, rank, size):
    variable, calls = make(central, np.full(3, 10.0)), []

    def change(var, amount):
        calls.append(rank)
        assert len(var.part) == 3
        var.assign_add(np.full(3, amount))
        return {"rank": rank, "sum": var.numpy().sum()}

    result = central.extended.update(variable, change, args=(2.0,))
    assert calls == ([0] if rank == 0 else [])
    assert result["rank"].values == (0,)
    assert result["sum"].values == (36.0,)
    assert variable.numpy().tolist() == [12] * 3
    (alone,) = central.extended.update(variable, change, args=(1.0,), group=False)
    assert alone == {"rank": 0, "sum": 39.0}


def test_an_error_of_update_is_everyones(central, rank):
    variable = make(central, np.ones(3))

    def fail(var):
        raise ZeroDivisionError("no luck")

    with pytest.raises(ZeroDivisionError, match="no luck"):
        central.extended.update(variable, fail)
    assert variable.assign_add(np.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="PerReplica"):
        central.extended.update(variable, fail, args=(ms.PerReplica(1.0),))


def test_reductions(central, size):
    with pytest.raises(ValueError, match="destinations"):
        central.extended.broadcast_to(np.ones(2), None)
    assert central.extended.reduce_to("sum", ms.PerReplica(1.0), "cpu:0") == size
    variable = make(central, 2.0)
    assert central.reduce("mean", variable) == 2.0
    with pytest.raises(ValueError, match="mirrored"):
        central.reduce("sum", variable)


def test_data_sets_for_each_replica_are_refused(central):
    options = ms.InputOptions(experimental_replication_mode=ms.InputReplicationMode.PER_REPLICA)
    with pytest.raises(NotImplementedError):
        central.experimental_distribute_dataset(ms.data.Dataset.range(10).batch(4), options)


def test_facts(central, rank):
    assert central.extended.should_checkpoint == (rank == 0)
    assert central.extended.experimental_should_init
    assert central.extended.experimental_between_graph
    variable = make(central, np.zeros(3))
    assert central.extended.value_container(variable.value()) is variable
    with pytest.raises((ValueError, LaunchError)):
        ms.CentralStorageStrategy(device="gpu:99")


# Training


def train(strategy, optimizer, rank, uses_buffers=False):
    shapes = [((600, 700), "f4"), ((), "f8"), ((3,), "f4"), ((0, 2), "f4"), ((9,), "f2")]
    with strategy.scope():
        variables = [
            ms.Variable(np.full(shape, 1, dtype), name=f"v{number}")
            for number, (shape, dtype) in enumerate(shapes)
        ]
        made = optimizer()
        average = ms.optimizers.ExponentialMovingAverage(0.5)
    rng = np.random.default_rng(rank)
    buffers = strategy.extended.gradient_buffers(variables)
    for number in range(4):
        gradients = [rng.normal(size=each.shape).astype(each.dtype) for each in variables]
        if uses_buffers and (number != 2 or rank):  # rank 0 does without them once
            for buffer, gradient in zip(buffers, gradients, strict=True):
                buffer[...] = gradient
            gradients = buffers
        if number == 3:
            rows = rng.normal(size=(2, 700)).astype("f4")
            gradients[0] = ms.IndexedSlices(rows, np.array([7, rank]))
        pairs = list(zip(gradients, variables, strict=True))
        strategy.run(made.apply_gradients, args=(pairs,))
        with strategy.scope():
            average.apply(variables)
    names = made._rule.kernel.slots
    slots = [made.slot(each, name) for each in variables for name in names]
    slots += [average.average(each) for each in variables]
    return [each.numpy() for each in (*variables, *slots, made.iterations)]


OPTIMIZERS = {
    "sgd": lambda: ms.optimizers.SGD(0.1),
    "adam": lambda: ms.optimizers.Adam(0.1, weight_decay=0.1),
    "clipped": lambda: ms.optimizers.Adam(0.1, global_clipnorm=0.5),
    "sharded": lambda: ms.optimizers.SGD(0.1, momentum=0.9, sharded_slots=True),
    "scaled": lambda: ms.optimizers.SGD(
        0.1, momentum=0.5, loss_scale=ms.optimizers.LossScale(8.0, growth_interval=2)
    ),
}


@pytest.mark.thorough_product
@pytest.mark.filterwarnings("ignore:The loss scale")
@pytest.mark.parametrize("uses_buffers", [False, True], ids=["arrays", "buffers"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_are_those_of_mirrored_variables(
    central, strategy, rank, size, optimizer, uses_buffers
):
    make_one = OPTIMIZERS[optimizer]
    expected = train(strategy, make_one, rank)
    found = train(central, make_one, rank, uses_buffers)
    if size <= 3:
        assert list(map(as_bytes, found)) == list(map(as_bytes, expected))
    for one, other in zip(found, expected, strict=True):  # more may be added in another order
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_gradient_buffers(central, strategy, rank):
    first, second = make(central, np.zeros((3, 2), "f4")), make(central, 1.0)
    buffers = central.extended.gradient_buffers([first, second])
    assert [(each.shape, each.dtype) for each in buffers] == [((3, 2), "f4"), ((), "f8")]
    buffers[0][...] = rank
    (again,) = central.extended.gradient_buffers([first])
    assert np.shares_memory(again, buffers[0])
    assert (again == rank).all()
    plain = strategy.extended.gradient_buffers([make(strategy, np.zeros(3))])
    assert plain[0].flags.writeable
    with pytest.raises(ContextError):
        central.extended.gradient_buffers([make(strategy, np.zeros(3))])


def test_accumulators_metrics_and_layers(central, strategy, rank):
    results = []
    for owner in (strategy, central):
        with owner.scope():
            weight, adam = ms.Variable(np.ones((4, 3))), ms.optimizers.Adam(0.1)
            accumulator = ms.optimizers.GradientAccumulator([weight])
            norm, mean = ms.layers.BatchNorm(3, dtype="f8"), ms.metrics.Mean()

        def step(weight=weight, adam=adam, accumulator=accumulator, norm=norm, mean=mean):
            for number in range(2):
                y, _ = norm.forward(np.full((4, 3), rank + number + np.arange(3.0)))
                accumulator.add([(y + rank, weight)])
                mean.update_state(y)
            accumulator.apply(adam)

        owner.run(step)
        with owner.scope():
            kept = [weight, norm.gamma, norm.moving_mean]
            results.append([as_bytes(each.numpy()) for each in kept] + [float(mean.result())])
    assert results[0] == results[1]


# Files, copies, the end


@pytest.mark.parametrize("parallel", [False, True], ids=["serial", "parallel"])
def test_files_are_those_of_mirrored_variables(
    central, strategy, shared_tmp_path, rank, size, parallel
):
    path = shared_tmp_path / "run.h5"
    value = np.arange(700_001, dtype=np.float32)

    def checkpoint(owner, start):
        with owner.scope():
            weight, small = ms.Variable(start, name="weight"), ms.Variable(start[:3].copy())
            adam = ms.optimizers.Adam(0.1)
        return weight, small, adam, ms.Checkpoint(weight=weight, small=small, adam=adam)

    for writer, reading in [(central, strategy), (strategy, central), (central, central)]:
        weight, small, adam, source = checkpoint(writer, value)
        gradient = np.ones(value.size, np.float32)
        writer.run(adam.apply_gradients, args=([(gradient, weight), (gradient[:3], small)],))
        source.write(path, parallel=parallel)
        if rank == 0:
            with h5py.File(path) as file:
                assert file["variables/weight"].shape == value.shape
        other, tiny, restored, target = checkpoint(reading, np.zeros_like(value))
        target.restore(path).assert_consumed()
        assert as_bytes(other.value()) == as_bytes(weight.value())
        assert as_bytes(tiny.value()) == as_bytes(small.value())
        slot = restored.slot(other, "second_moment")
        assert as_bytes(slot.value()) == as_bytes(adam.slot(weight, "second_moment").value())
    plain = ms.Variable(np.zeros_like(value))
    ms.Checkpoint(weight=plain).restore(path).expect_partial()
    assert as_bytes(plain.value()) == as_bytes(other.value())


def test_ranks_that_disagree(central, rank, others):
    with pytest.raises(CollectiveMismatchError, match=r"\(3,\)(.|\n)*\(4,\)"):
        make(central, np.zeros(3 if others else 4), name="weight")


def test_a_bad_mode_on_one_rank(central, others):
    with pytest.raises(
        CollectiveMismatchError if others else ValueError, match="VariableAggregation"
    ):
        make(central, np.zeros(3), aggregation=A.SUM if others else "sum")


def test_what_is_closed_raises(central):
    other = ms.CentralStorageStrategy(device="cpu")
    weight = make(other, np.zeros(5))
    other.close()
    other.close()
    for use in (weight.value, weight.numpy, lambda: weight.storage, lambda: weight.assign(0.0)):
        with pytest.raises(RuntimeError, match=r"CentralStorageStrategy.*close"):
            use()


def test_what_is_dropped_leaves_nothing(central):
    def count():
        gc.collect()
        with open("/proc/self/maps") as maps:
            mappings = sum("memfd:mpistrat" in line for line in maps)
        return mappings, len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(20):
        weight = make(central, np.ones(1000))
        central.extended.gradient_buffers([weight])
        del weight
    after = count()
    # Fewer where another test has left something that was freed meanwhile.
    assert all(now <= then for now, then in zip(after, before, strict=True))


def test_memory_that_cannot_be_had(central, rank, size, monkeypatch):
    if size == 1:
        pytest.skip("one rank needs no shared memory")

    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    if rank == size - 1:
        monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(ValueError, match=r"8000 bytes.*MPIStrategy"):
        make(central, np.zeros(1000))
    monkeypatch.undo()
    assert make(central, np.zeros(1000)).size == 1000


def test_more_memory_than_the_node_has(central, rank, size):
    if size == 1:
        pytest.skip("one rank needs no shared memory")
    number = 2**44
    with pytest.raises(ValueError, match=rf"128.0 TiB \({8 * number} bytes\).*MPIStrategy"):
        make(central, np.broadcast_to(0.0, (number,)))
    assert make(central, np.zeros(1000)).size == 1000


LIMITED = """
import resource
import numpy as np
import mpistrat as ms

strategy = ms.CentralStorageStrategy(device="cpu")
zeros = np.broadcast_to(0.0, (10_000_000,))

def limit(kind, number):
    if strategy.rank == {guilty}:
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (number, hard))

def make():
    with strategy.scope():
        return ms.Variable(zeros, name="large")

pages = int(open("/proc/self/statm").read().split()[0])
for kind, number in (
    (resource.RLIMIT_FSIZE, 1000),
    (resource.RLIMIT_AS, pages * resource.getpagesize() + 40_000_000),
    (resource.RLIMIT_NOFILE, 3),
):
    before, _ = resource.getrlimit(kind)
    limit(kind, number)
    try:
        made = make()
    except ValueError as error:
        assert "80000000 bytes" in str(error), error
    else:
        # The rank that makes the file alone needs to be allowed so much of one.
        assert kind == resource.RLIMIT_FSIZE and {guilty} != 0, kind
        del made
    limit(kind, before)
    assert strategy.reduce("sum", 1) == strategy.size
strategy.close()
"""


@pytest.mark.launches
@pytest.mark.parametrize("guilty", [0, 2])
def test_limits_of_one_process_are_errors_of_all(guilty):
    done = launch.run(["-c", LIMITED.format(guilty=guilty)], 3, 60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_communicator_of_some_ranks(rank, size):
    comm = MPI.COMM_WORLD.Split(rank % 2)
    strategy = ms.CentralStorageStrategy(comm, device="cpu")
    weight = make(strategy, 0.0, aggregation=A.SUM)
    strategy.run(lambda: weight.assign(1.0))
    assert weight.numpy() == part_lengths(size, 2)[rank % 2]
    strategy.close()
    comm.Free()


WITHOUT_CHECKS = """
import numpy as np, mpistrat as ms
strategy = ms.CentralStorageStrategy(device="cpu")
size, ones = strategy.size, np.ones((8, 3))
with strategy.scope():
    weight = ms.Variable(np.zeros((8, 3)), name="w", aggregation=ms.VariableAggregation.SUM)
    optimizer = ms.optimizers.SGD(1.0)
for number in range(200):
    strategy.run(lambda: weight.assign_add(ones))
    assert (weight.value() == number + size).all()
    strategy.run(lambda: optimizer.apply_gradients([(ones, weight)]))
    assert (weight.value() == number).all()
    weight.assign_add(ones)
    assert (weight.value() == number + 1).all()
"""


@pytest.mark.launches
def test_no_rank_reads_half_of_a_write_without_checks():
    done = launch.run(["-c", WITHOUT_CHECKS], 2, 60, env={"MPISTRAT_CHECKS": "off"})
    assert done.returncode == 0, done.stderr
